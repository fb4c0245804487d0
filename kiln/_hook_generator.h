/* Suspended generators: what their frames hold, and an end without what they have left to do. */
#ifndef KILN_HOOK_GENERATOR_H
#define KILN_HOOK_GENERATOR_H

#include "_hook_interpreter.h"

static PyObject *unbound; /* stands for a variable without a value */

static bool is_suspended(PyObject *value)
{
    return PyGen_CheckExact(value) && ((PyGenObject *)value)->gi_frame_state < FRAME_EXECUTING;
}

/* (code, offset of the last instruction, variables and stack), or an empty tuple where they cannot be told. */
static PyObject *hook_suspended(PyObject *Py_UNUSED(module), PyObject *value)
{
    PyGenObject *generator = (PyGenObject *)value;
    if (!is_suspended(value) ||
        (generator->gi_exc_state.exc_value != NULL && generator->gi_exc_state.exc_value != Py_None))
        return PyTuple_New(0);
    Frame *frame = (Frame *)generator->gi_iframe;
    PyObject *code = FRAME_CODE(frame), *slots = PyTuple_New(frame->stacktop);
    if (slots == NULL)
        return NULL;
    for (int i = 0; i < frame->stacktop; i++) {
        PyObject *held = FRAME_SLOTS(frame)[i];
        PyTuple_SET_ITEM(slots, i, Py_NewRef(held == NULL ? unbound : held));
    }
    return Py_BuildValue("OiN", code, _PyInterpreterFrame_LASTI(frame) * (int)sizeof(_Py_CODEUNIT), slots);
}

/* Nothing of it runs any more; its variables go when it does. */
static PyObject *hook_finish(PyObject *Py_UNUSED(module), PyObject *value)
{
    if (is_suspended(value))
        ((PyGenObject *)value)->gi_frame_state = FRAME_COMPLETED;
    Py_RETURN_NONE;
}

#endif
