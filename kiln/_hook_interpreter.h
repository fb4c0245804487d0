/* The interpreter's frames, which CPython declares in internal headers only. */
#ifndef KILN_HOOK_INTERPRETER_H
#define KILN_HOOK_INTERPRETER_H

#include "_hook_compat.h"

#ifndef Py_BUILD_CORE
#define Py_BUILD_CORE 1
#endif
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE

typedef struct _PyInterpreterFrame Frame;

#define FRAME_SLOTS(frame) ((frame)->localsplus)

#if PY_VERSION_HEX >= 0x030D0000
#define FRAME_CODE(frame) ((frame)->f_executable)
#define FRAME_FUNCTION(frame) ((frame)->f_funcobj)
#define FRAME_NEXT(frame, code) ((frame)->instr_ptr = _PyCode_CODE(code))
#define current_frame(tstate) ((tstate)->current_frame)
#elif PY_VERSION_HEX >= 0x030C0000
#define FRAME_CODE(frame) ((PyObject *)(frame)->f_code)
#define FRAME_FUNCTION(frame) ((frame)->f_funcobj)
#define FRAME_NEXT(frame, code) ((frame)->prev_instr = _PyCode_CODE(code) - 1)
#define current_frame(tstate) ((tstate)->cframe->current_frame)
#else
#define FRAME_CODE(frame) ((PyObject *)(frame)->f_code)
#define FRAME_FUNCTION(frame) ((PyObject *)(frame)->f_func)
#define FRAME_NEXT(frame, code) ((frame)->prev_instr = _PyCode_CODE(code) - 1)
#define current_frame(tstate) ((tstate)->cframe->current_frame)
#endif

/* Makes a frame that has not started run another code with the same variables. */
static inline void frame_set_code(Frame *frame, PyObject *code)
{
    PyObject *before = FRAME_CODE(frame);
#if PY_VERSION_HEX >= 0x030D0000
    frame->f_executable = Py_NewRef(code);
#else
    frame->f_code = (PyCodeObject *)Py_NewRef(code);
#endif
    FRAME_NEXT(frame, (PyCodeObject *)code);
    Py_DECREF(before);
}

#if PY_VERSION_HEX >= 0x030C0000
#define code_extra_index PyUnstable_Eval_RequestCodeExtraIndex
#define code_extra_get PyUnstable_Code_GetExtra
#define code_extra_set PyUnstable_Code_SetExtra
#else
#define code_extra_index _PyEval_RequestCodeExtraIndex
#define code_extra_get _PyCode_GetExtra
#define code_extra_set _PyCode_SetExtra
#endif

/* What a weak reference refers to: a new reference, or NULL when it is gone. */
static inline PyObject *weakref_target(PyObject *weak)
{
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *target = NULL;
    return PyWeakref_GetRef(weak, &target) == 1 ? target : (PyErr_Clear(), NULL);
#else
    PyObject *target = PyWeakref_GET_OBJECT(weak);
    return target == Py_None ? NULL : Py_NewRef(target);
#endif
}

#endif
