/* Tail: a call that code leaves to whoever runs it, so that what is handed on is nobody else's.

   Residual code that goes on after a break returns such a call in the place of making it: its frame, and all that the
   frame holds, is gone before the call is made, and turns of a loop do not nest. Code that runs the program's own
   instructions takes its arguments over: it drops the tail's references with let_go(), so that each value lives as
   long as a variable of the program holds it. No collector sees a tail: it is called as soon as it is made. */
#ifndef KILN_HOOK_TAIL_H
#define KILN_HOOK_TAIL_H

#include "_hook_compat.h"

typedef struct {
    PyObject_VAR_HEAD
    PyObject *target;
    PyObject *values[]; /* NULL where they were let go */
} Tail;

/* References that a call is made with and that its frame holds, too, from its first instruction on. */
typedef struct {
    PyObject **values;
    Py_ssize_t count;
} Given;

static PyTypeObject Tail_Type;
static __thread Given given;

static void drop_values(PyObject **values, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++)
        Py_CLEAR(values[i]);
}

/* A function that runs with the frame hook on. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *function;
    PyObject *family; /* what the hook's callback asks for meanwhile */
} InPython;

static PyTypeObject InPython_Type;

/* Whether all that is called is a Python function, whose frame keeps what it is given. */
static bool keeps_given(PyObject *function)
{
    if (Py_IS_TYPE(function, &InPython_Type))
        function = ((InPython *)function)->function;
    return PyFunction_Check(function);
}

/* Calls a function with values that it may let go of. */
static PyObject *call_given(PyObject *function, PyObject **values, Py_ssize_t count)
{
    Given before = given;
    given = keeps_given(function) ? (Given){values, count} : (Given){NULL, 0};
    PyObject *result = PyObject_Vectorcall(function, values, count, NULL);
    given = before;
    return result;
}

static PyObject *hook_let_go(PyObject *module, PyObject *unused)
{
    Given now = given;
    given = (Given){NULL, 0};
    drop_values(now.values, now.count);
    Py_RETURN_NONE;
}

static PyObject *hook_later(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (count < 1) {
        PyErr_SetString(PyExc_TypeError, "later() needs something to call");
        return NULL;
    }
    Tail *tail = PyObject_NewVar(Tail, &Tail_Type, count - 1);
    if (tail == NULL)
        return NULL;
    tail->target = Py_NewRef(args[0]);
    for (Py_ssize_t i = 1; i < count; i++)
        tail->values[i - 1] = Py_NewRef(args[i]);
    return (PyObject *)tail;
}

static void Tail_dealloc(Tail *self)
{
    Py_DECREF(self->target);
    drop_values(self->values, Py_SIZE(self));
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject Tail_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "kiln._hook.Tail",
    .tp_basicsize = offsetof(Tail, values),
    .tp_itemsize = sizeof(PyObject *),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_doc = "A call that is left to whoever runs the code: what is called, and with what.",
    .tp_dealloc = (destructor)Tail_dealloc,
};

#endif
