/* kiln._hook: regions, guards and the frame hook. Needs a C compiler and Python's headers, nothing else. */
#include "_hook_frame.h"
#include "_hook_generator.h"

static PyMethodDef hook_methods[] = {
    {"set_tensor_layout", set_tensor_layout, METH_VARARGS, "Sets where a tensor keeps its properties; without arguments, unsets."},
    {"tensor_words", tensor_words, METH_O, "(kind, dispatch keys, requires_grad) of a tensor as the layout finds them."},
    {"set_state_functions", set_state_functions, METH_VARARGS, "Sets how global state is read; without arguments, unsets."},
    {"dict_epoch", hook_dict_epoch, METH_NOARGS, "A number that changes whenever a dict that guards read may have."},
    {"state_words", state_words, METH_NOARGS, "The global state as C reads it."},
    {"set_frame_callback", hook_set_callback, METH_O, "Sets callback(function, argv) -> Region | None; gives the one before."},
    {"enter", hook_enter, METH_NOARGS, "From here on frames of this thread may run as regions; nests."},
    {"leave", hook_leave, METH_NOARGS, "Ends what the last enter() began."},
    {"pause", hook_pause, METH_NOARGS, "Leaves the frames of this thread alone until resume(); nests."},
    {"resume", hook_resume, METH_NOARGS, "Ends what the last pause() began."},
    {"depth", hook_depth, METH_NOARGS, "(enters, pauses) of this thread and the number of threads that entered."},
    {"skip", hook_skip, METH_O, "Frames of this code object are left alone."},
    {"hide", hook_hide, METH_VARARGS,
     "hide(code, how): keeps its frames out of tracebacks, as HIDDEN, INNER or GENERATED says."},
    {"then", hook_then, METH_O, "What a miss gives for the region to run on the arguments of the call."},
    {"in_python", hook_in_python, METH_VARARGS, "in_python(function, family): the function, run with the frame hook on."},
    {"original", hook_original, METH_VARARGS, "original(function, argv): calls the function itself on bound arguments."},
    {"family", hook_family, METH_NOARGS, "The family of the function that runs with the frame hook on, or None."},
    {"later", (PyCFunction)(void (*)(void))hook_later, METH_FASTCALL,
     "later(function, *values): a call that is left to whoever runs the region."},
    {"driven", hook_driven, METH_O, "The result of the calls that a result leaves, made one after the other."},
    {"let_go", hook_let_go, METH_NOARGS, "Drops what the caller holds of the arguments that this frame was given."},
    {"set_marker", hook_set_marker, METH_O, "Sets marker(region) -> end(), called around runs of regions; or None."},
    {"leave_alone", hook_leave_alone, METH_O, "Frames of this code object are left alone, with all that they call."},
    {"suspended", hook_suspended, METH_O,
     "(code, offset, variables and stack) of a suspended generator; () where they cannot be told."},
    {"finish", hook_finish, METH_O, "Ends a suspended generator without running what it has left to do."},
    {"forget", hook_forget, METH_O, "The callback is asked about this code object again."},
    {NULL},
};

static struct PyModuleDef hook_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kiln._hook",
    .m_doc = "Compiled callables, guard evaluation and the frame hook.",
    .m_size = -1,
    .m_methods = hook_methods,
};

#define CONSTANT(name) {#name, name}

static const struct {
    const char *name;
    long value;
} constants[] = {
    CONSTANT(HIDDEN), CONSTANT(INNER), CONSTANT(GENERATED),
    CONSTANT(FETCH_ARG), CONSTANT(FETCH_CONST), CONSTANT(FETCH_ATTR), CONSTANT(FETCH_DICT), CONSTANT(FETCH_KEY),
    CONSTANT(FETCH_ITEM), CONSTANT(FETCH_CELL), CONSTANT(FETCH_CLOSURE), CONSTANT(FETCH_CALL),
    CONSTANT(CHECK_TYPE), CONSTANT(CHECK_IS), CONSTANT(CHECK_EQUALS), CONSTANT(CHECK_LENGTH), CONSTANT(CHECK_KEYS),
    CONSTANT(CHECK_HAS), CONSTANT(CHECK_LACKS), CONSTANT(CHECK_ABSENT), CONSTANT(CHECK_FUNCTION),
    CONSTANT(CHECK_CONSTANT), CONSTANT(CHECK_TENSOR), CONSTANT(CHECK_STATE), CONSTANT(CHECK_SHAPED), CONSTANT(CHECK_INT),
    CONSTANT(CHECK_SYMBOLS), CONSTANT(READ_SIZE), CONSTANT(READ_STRIDE), CONSTANT(READ_VALUE), CONSTANT(FREE_STRIDE),
    CONSTANT(CHECK_CLASS), CONSTANT(CHECK_SAME), CONSTANT(CHECK_DISTINCT), CONSTANT(CHECK_TEST), CONSTANT(CHECK_CALL),
};

PyMODINIT_FUNC PyInit__hook(void)
{
    PyObject *module = PyModule_Create(&hook_module);
    if (module == NULL || PyModule_AddType(module, &Guards_Type) < 0 || PyModule_AddType(module, &Region_Type) < 0 ||
        PyModule_AddType(module, &Entry_Type) < 0)
        return NULL;
    if (PyType_Ready(&Runner_Type) < 0 || PyType_Ready(&Tail_Type) < 0 || PyType_Ready(&InPython_Type) < 0 ||
        watch_start() < 0 || exchange_start() < 0)
        return NULL;
    unbound = PyObject_CallNoArgs((PyObject *)&PyBaseObject_Type);
    if (unbound == NULL || PyModule_AddObjectRef(module, "UNBOUND", unbound) < 0)
        return NULL;
    code_state_index = code_extra_index(code_state_free);
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++)
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) < 0)
            return NULL;
    return module;
}
