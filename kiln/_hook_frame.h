/* The frame hook (PEP 523): Python frames that start while a thread has entered it may run as regions.

   A frame is never evaluated by hand: its code is exchanged for a trampoline of the same layout of variables, and the
   interpreter runs and clears the frame as it does any other. The trampoline is `return ~runner`; the runner is a
   constant of it and runs the region on the argument slots of the frame it was called from. One stack slot is enough
   for that, and every frame has one. */
#ifndef KILN_HOOK_FRAME_H
#define KILN_HOOK_FRAME_H

#include "_hook_region.h"
#include "_hook_interpreter.h"
#include <opcode.h>

typedef struct Runner {
    PyObject_HEAD
    Region *region; /* borrowed; NULL when it is gone */
    PyObject *code; /* of the trampoline: borrowed, it holds the runner */
} Runner;

/* What is known of a code object. */
typedef struct {
    int skipped;
    int alone; /* what runs while its frames do is left alone, too */
    enum { SHOWN, HIDDEN, INNER, GENERATED } shown; /* in tracebacks; see hook_hide */
    PyObject *region; /* a weak reference to the region that ran last */
    PyObject *asked; /* the family that it was asked for, which it keeps alive: borrowed */
} CodeState;

static PyTypeObject Runner_Type;
static Py_ssize_t code_state_index = -1;
static PyObject *frame_callback;
static int entered_threads;
static _PyFrameEvalFunction next_eval; /* what was set before */
static __thread int depth;
static __thread Frame *evaluating; /* while another evaluator, which may come back to this one, has it */
static __thread PyObject *family; /* of the function that runs with the hook on: borrowed */
static __thread PyObject *left_alone; /* the next frame of this function runs as it is */

static void code_state_free(void *state)
{
    if (state != NULL) {
        Py_XDECREF(((CodeState *)state)->region);
        PyMem_Free(state);
    }
}

static CodeState *code_state(PyCodeObject *code, bool make)
{
    void *state = NULL;
    if (code_extra_get((PyObject *)code, code_state_index, &state) < 0)
        return NULL;
    if (state == NULL && make) {
        state = PyMem_Calloc(1, sizeof(CodeState));
        if (state != NULL && code_extra_set((PyObject *)code, code_state_index, state) < 0) {
            PyMem_Free(state);
            return NULL;
        }
    }
    return state;
}

/* Whether an entry of a traceback stands for no line of the program. */
static bool is_inner(PyTracebackObject *entry)
{
    PyCodeObject *code = PyFrame_GetCode(entry->tb_frame);
    CodeState *state = code_state(code, false);
    bool inner = state != NULL && (state->shown == HIDDEN || (state->shown == INNER && entry->tb_next != NULL));
    if (state != NULL && state->shown == GENERATED) {
        int line, column, last, end;
        inner = PyCode_Addr2Location(code, entry->tb_lasti, &line, &column, &last, &end) && column == 0 && end == 0;
    }
    Py_DECREF(code);
    return inner;
}

/* Takes out of the traceback of the current exception what stands for no line of the program. */
static void clean_traceback(void)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    for (PyObject **link = &trace; *link != NULL && PyTraceBack_Check(*link);) {
        PyTracebackObject *entry = (PyTracebackObject *)*link;
        if (is_inner(entry)) {
            PyObject *next = Py_XNewRef((PyObject *)entry->tb_next);
            Py_SETREF(*link, next);
        }
        else
            link = (PyObject **)&entry->tb_next;
    }
    PyErr_Restore(type, value, trace);
}

/* Calls the function itself, which the hook would otherwise turn into a region again. */
static PyObject *call_alone(PyObject *function, PyObject *const *args, size_t nargsf, PyObject *names)
{
    PyObject *before = left_alone;
    left_alone = depth > 0 ? function : NULL;
    PyObject *result = PyObject_Vectorcall(function, args, nargsf, names);
    left_alone = before;
    return result;
}

/* Calls a function with bound arguments. */
static PyObject *call_bound(PyObject *function, PyObject *const *slots)
{
    PyCodeObject *code = code_of(function);
    int positional = code->co_argcount, named = positional + code->co_kwonlyargcount, next = named;
    PyObject *rest = code->co_flags & CO_VARARGS ? slots[next++] : NULL;
    PyObject *extra = code->co_flags & CO_VARKEYWORDS ? slots[next] : NULL;
    Py_ssize_t n = positional + (rest ? PyTuple_GET_SIZE(rest) : 0);
    PyObject *args = PyTuple_New(n), *keywords = PyDict_New(), *result = NULL;
    bool ready = args != NULL && keywords != NULL;
    for (Py_ssize_t i = 0; ready && i < n; i++)
        PyTuple_SET_ITEM(args, i, Py_NewRef(i < positional ? slots[i] : PyTuple_GET_ITEM(rest, i - positional)));
    for (int i = positional; ready && i < named; i++)
        ready = PyDict_SetItem(keywords, PyTuple_GET_ITEM(code->co_localsplusnames, i), slots[i]) == 0;
    if (ready && extra != NULL)
        ready = PyDict_Update(keywords, extra) == 0;
    if (ready) {
        PyObject *before = left_alone;
        left_alone = depth > 0 ? function : NULL;
        result = PyObject_Call(function, args, keywords);
        left_alone = before;
    }
    Py_XDECREF(args);
    Py_XDECREF(keywords);
    return result;
}

static PyObject *hook_original(PyObject *module, PyObject *args)
{
    PyObject *function, *slots;
    if (!PyArg_ParseTuple(args, "O!O!:original", &PyFunction_Type, &function, &PyTuple_Type, &slots))
        return NULL;
    return call_bound(function, ((PyTupleObject *)slots)->ob_item);
}

/* `~runner` in a trampoline. */
static PyObject *Runner_run(Runner *self)
{
    Frame *frame = current_frame(PyThreadState_Get());
    if (frame == NULL || FRAME_CODE(frame) != self->code) {
        PyErr_SetString(PyExc_RuntimeError, "a runner works in its own trampoline only");
        return NULL;
    }
    PyObject *function = Py_NewRef(FRAME_FUNCTION(frame)), *result = NULL;
    int n = slot_count(code_of(function));
    PyObject **slots = PyMem_Malloc((n + 1) * sizeof *slots);
    if (slots == NULL) {
        Py_DECREF(function);
        return PyErr_NoMemory();
    }
    for (int i = 0; i < n; i++)
        slots[i] = Py_NewRef(FRAME_SLOTS(frame)[i]);
    if (self->region != NULL) {
        Region *region = (Region *)Py_NewRef(self->region);
        result = region->enabled ? region_run(region, slots, n, true) : NULL;
        Py_DECREF(region);
    }
    if (result == NULL && !PyErr_Occurred())
        result = call_bound(function, slots);
    for (int i = 0; i < n; i++)
        Py_DECREF(slots[i]);
    PyMem_Free(slots);
    Py_DECREF(function);
    return call_tails(result);
}

static PyNumberMethods Runner_number = {.nb_invert = (unaryfunc)Runner_run};

static void Runner_dealloc(Runner *self)
{
    if (self->region != NULL)
        self->region->runner = NULL;
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject Runner_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "kiln._hook.Runner",
    .tp_basicsize = sizeof(Runner),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_doc = "Runs a region on the arguments of the trampoline frame that asks for it.",
    .tp_dealloc = (destructor)Runner_dealloc,
    .tp_as_number = &Runner_number,
};

static void forget_region(Region *region)
{
    if (region->runner != NULL)
        region->runner->region = NULL;
    Py_XDECREF(region->trampoline);
}

/* The trampoline of a region: a new reference. The region keeps the code, the code the runner; the runner knows the
   region without holding it, because cycles through code objects are never collected. */
static PyObject *make_trampoline(Region *region)
{
    static const unsigned char body[] = {RESUME, 0, LOAD_CONST, 0, UNARY_INVERT, 0, RETURN_VALUE, 0};
    static const unsigned char lines[] = {0x80 | 13 << 3 | 3, 0}; /* four units on the first line */
    PyObject *replaced = NULL, *method = PyObject_GetAttrString((PyObject *)code_of(region->function), "replace");
    Runner *runner = PyObject_New(Runner, &Runner_Type);
    if (runner != NULL)
        runner->region = NULL;
    PyObject *keywords = Py_BuildValue("{sy#s(O)s()sy#sy#}", "co_code", body, (Py_ssize_t)sizeof body, "co_consts",
                                       runner, "co_names", "co_linetable", lines, (Py_ssize_t)sizeof lines,
                                       "co_exceptiontable", "", (Py_ssize_t)0);
    PyObject *empty = PyTuple_New(0);
    if (method != NULL && runner != NULL && keywords != NULL && empty != NULL)
        replaced = PyObject_Call(method, empty, keywords);
    if (replaced != NULL) {
        runner->region = region;
        runner->code = replaced;
        region->runner = runner;
        CodeState *state = code_state((PyCodeObject *)replaced, true);
        if (state != NULL)
            state->shown = HIDDEN;
    }
    Py_XDECREF(runner);
    Py_XDECREF(method);
    Py_XDECREF(keywords);
    Py_XDECREF(empty);
    return replaced;
}

/* The region for a frame, asked of the callback: a new reference; NULL when the frame is to be left alone. */
static Region *ask_callback(PyObject *function, CodeState *state, Frame *frame)
{
    int n = slot_count(code_of(function));
    PyObject *argv = PyTuple_New(n), *answer = NULL, *callback = Py_NewRef(frame_callback);
    for (int i = 0; argv != NULL && i < n; i++)
        PyTuple_SET_ITEM(argv, i, Py_NewRef(FRAME_SLOTS(frame)[i]));
    if (argv != NULL) {
        PyObject *args[] = {function, argv};
        answer = PyObject_Vectorcall(callback, args, 2, NULL);
        Py_DECREF(argv);
    }
    if (answer == NULL) {
        if (PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
            PyErr_Clear();
            PyErr_SetInterrupt();
        }
        else
            PyErr_WriteUnraisable(callback);
    }
    else if (PyObject_TypeCheck(answer, &Region_Type) && code_of(((Region *)answer)->function) == code_of(function)) {
        PyObject *weak = PyWeakref_NewRef(answer, NULL);
        if (weak == NULL)
            PyErr_Clear();
        Py_XSETREF(state->region, weak);
        state->asked = family;
        Py_DECREF(callback);
        return (Region *)answer;
    }
    else if (answer == Py_None)
        state->skipped = 1;
    Py_XDECREF(answer);
    Py_DECREF(callback);
    return NULL;
}

static Region *region_of_frame(PyObject *function, CodeState *state, Frame *frame)
{
    if (state->region != NULL) {
        PyObject *known = weakref_target(state->region);
        if (known != NULL && ((Region *)known)->function == function && state->asked == family)
            return (Region *)known;
        Py_XDECREF(known);
    }
    return frame_callback == NULL ? NULL : ask_callback(function, state, frame);
}

/* Puts the trampoline of its region in the place of the frame's code. */
static void divert(Frame *frame)
{
    PyCodeObject *code = (PyCodeObject *)FRAME_CODE(frame);
    const int needed = CO_OPTIMIZED | CO_NEWLOCALS;
    if ((code->co_flags & (needed | CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR)) != needed)
        return;
    CodeState *state = code_state(code, true);
    if (state == NULL || state->skipped) {
        PyErr_Clear();
        return;
    }
    PyObject *function = FRAME_FUNCTION(frame);
    if (function == NULL || !PyFunction_Check(function) || code_of(function) != code)
        return;
    Py_INCREF(function);
    Region *region = region_of_frame(function, state, frame);
    if (region != NULL && region->enabled) {
        if (region->trampoline == NULL && (region->trampoline = make_trampoline(region)) == NULL)
            PyErr_WriteUnraisable((PyObject *)region);
        if (region->trampoline != NULL)
            frame_set_code(frame, region->trampoline);
    }
    Py_XDECREF(region);
    Py_DECREF(function);
}

static PyObject *evaluated(PyThreadState *tstate, Frame *frame, int throwflag)
{
    if (next_eval == _PyEval_EvalFrameDefault || evaluating == frame)
        return _PyEval_EvalFrameDefault(tstate, frame, throwflag);
    Frame *before = evaluating;
    evaluating = frame;
    PyObject *result = next_eval(tstate, frame, throwflag);
    evaluating = before;
    return result;
}

static PyObject *eval_frame(PyThreadState *tstate, Frame *frame, int throwflag)
{
    /* While `tracing`, the interpreter calls an audit hook, a tracer or a profiler: no part of the program. */
    if (depth > 0 && paused == 0 && tstate->tracing == 0 && !throwflag && evaluating != frame) {
        if (left_alone != NULL && FRAME_FUNCTION(frame) == left_alone)
            left_alone = NULL;
        else {
            paused++; /* the callback, and whoever is told of its errors, run as they are */
            divert(frame);
            paused--;
        }
        CodeState *state = code_state((PyCodeObject *)FRAME_CODE(frame), false);
        if (state != NULL && state->alone) {
            paused++;
            PyObject *result = evaluated(tstate, frame, throwflag);
            paused--;
            return result;
        }
    }
    return evaluated(tstate, frame, throwflag);
}

static void enter(void)
{
    if (depth++ == 0 && entered_threads++ == 0) {
        PyInterpreterState *interpreter = PyInterpreterState_Get();
        _PyFrameEvalFunction now = _PyInterpreterState_GetEvalFrameFunc(interpreter);
        if (now != eval_frame) {
            next_eval = now;
            _PyInterpreterState_SetEvalFrameFunc(interpreter, eval_frame);
        }
    }
}

static void leave(void)
{
    if (--depth == 0 && --entered_threads == 0) {
        PyInterpreterState *interpreter = PyInterpreterState_Get();
        if (_PyInterpreterState_GetEvalFrameFunc(interpreter) == eval_frame)
            _PyInterpreterState_SetEvalFrameFunc(interpreter, next_eval);
    }
}

static PyObject *hook_enter(PyObject *module, PyObject *unused)
{
    enter();
    Py_RETURN_NONE;
}

static PyObject *hook_leave(PyObject *module, PyObject *unused)
{
    if (depth == 0) {
        PyErr_SetString(PyExc_RuntimeError, "leave() without enter()");
        return NULL;
    }
    leave();
    Py_RETURN_NONE;
}

static PyObject *in_python_vectorcall(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *names)
{
    InPython *self = (InPython *)Py_NewRef(object);
    PyObject *before = family;
    family = self->family;
    enter();
    PyObject *result = PyObject_Vectorcall(self->function, args, nargsf, names);
    leave();
    family = before;
    Py_DECREF(self);
    return result;
}

static PyObject *hook_in_python(PyObject *module, PyObject *args)
{
    PyObject *function, *asked;
    if (!PyArg_ParseTuple(args, "OO:in_python", &function, &asked))
        return NULL;
    InPython *made = PyObject_GC_New(InPython, &InPython_Type);
    if (made == NULL)
        return NULL;
    made->vectorcall = in_python_vectorcall;
    made->function = Py_NewRef(function);
    made->family = Py_NewRef(asked);
    PyObject_GC_Track(made);
    return (PyObject *)made;
}

static PyObject *hook_family(PyObject *module, PyObject *unused)
{
    return Py_NewRef(family == NULL ? Py_None : family);
}

static int InPython_traverse(InPython *self, visitproc visit, void *arg)
{
    Py_VISIT(self->function);
    Py_VISIT(self->family);
    return 0;
}

static int InPython_clear(InPython *self)
{
    Py_CLEAR(self->function);
    Py_CLEAR(self->family);
    return 0;
}

static void InPython_dealloc(InPython *self)
{
    PyObject_GC_UnTrack(self);
    InPython_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject InPython_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "kiln._hook.InPython",
    .tp_basicsize = sizeof(InPython),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_vectorcall_offset = offsetof(InPython, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_doc = "A function that runs with the frame hook on.",
    .tp_dealloc = (destructor)InPython_dealloc,
    .tp_traverse = (traverseproc)InPython_traverse,
    .tp_clear = (inquiry)InPython_clear,
};

static PyObject *hook_pause(PyObject *module, PyObject *unused)
{
    paused++;
    Py_RETURN_NONE;
}

static PyObject *hook_resume(PyObject *module, PyObject *unused)
{
    if (paused == 0) {
        PyErr_SetString(PyExc_RuntimeError, "resume() without pause()");
        return NULL;
    }
    paused--;
    Py_RETURN_NONE;
}

static PyObject *hook_depth(PyObject *module, PyObject *unused)
{
    return Py_BuildValue("iii", depth, paused, entered_threads);
}

static PyObject *hook_set_callback(PyObject *module, PyObject *callback)
{
    PyObject *before = frame_callback ? frame_callback : Py_NewRef(Py_None);
    frame_callback = callback == Py_None ? NULL : Py_NewRef(callback);
    return before;
}

static PyObject *set_skipped(PyObject *code, int skipped)
{
    if (!PyCode_Check(code)) {
        PyErr_Format(PyExc_TypeError, "a code object is needed, not %s", Py_TYPE(code)->tp_name);
        return NULL;
    }
    CodeState *state = code_state((PyCodeObject *)code, true);
    if (state == NULL)
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    state->skipped = skipped;
    if (!skipped)
        Py_CLEAR(state->region);
    Py_RETURN_NONE;
}

static PyObject *hook_skip(PyObject *module, PyObject *code)
{
    return set_skipped(code, 1);
}

static PyObject *hook_leave_alone(PyObject *module, PyObject *code)
{
    PyObject *done = set_skipped(code, 1);
    if (done != NULL)
        code_state((PyCodeObject *)code, true)->alone = 1;
    return done;
}

/* HIDDEN never shows in tracebacks, INNER only where it raised itself, GENERATED where an instruction has columns of
   the program's source. */
static PyObject *hook_hide(PyObject *module, PyObject *args)
{
    PyObject *code;
    int shown;
    if (!PyArg_ParseTuple(args, "O!i:hide", &PyCode_Type, &code, &shown))
        return NULL;
    CodeState *state = code_state((PyCodeObject *)code, true);
    if (state == NULL)
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    state->shown = shown;
    Py_RETURN_NONE;
}

static PyObject *hook_forget(PyObject *module, PyObject *code)
{
    return set_skipped(code, 0);
}

#endif
