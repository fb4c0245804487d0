/* Region: the callable around a function that runs the first cache entry whose guards hold. */
#ifndef KILN_HOOK_REGION_H
#define KILN_HOOK_REGION_H

#include "_hook_guards.h"
#include "_hook_tail.h"

typedef struct {
    PyObject_HEAD
    Guards *guards;
    PyObject *run;
    PyObject *info;
    char hit; /* whether a call after the one it was made for has run it */
} Entry;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *function;
    PyObject *miss;
    PyObject *dict;
    PyObject *weakrefs;
    Entry **entries;
    int count, capacity;
    PyObject *spare;       /* an empty dict for the next call without further keywords, or NULL */
    PyObject *trampoline;  /* for frames that run as this region, or NULL */
    struct Runner *runner; /* of the trampoline: borrowed */
    char enabled;
    char limit_hit;
    int wait; /* how many misses run the original before the next one compiles */
} Region;

static PyTypeObject Entry_Type, Region_Type;

static PyObject *call_alone(PyObject *function, PyObject *const *args, size_t nargsf, PyObject *names);
static void forget_region(Region *region);
static void clean_traceback(void);
static PyObject *call_tails(PyObject *result);

/* marker(region) is called before an entry runs and gives what is called after it; NULL while no profile is on. */
static PyObject *marker;

static void Entry_dealloc(Entry *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->guards);
    Py_XDECREF(self->run);
    Py_XDECREF(self->info);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int Entry_traverse(Entry *self, visitproc visit, void *arg)
{
    Py_VISIT(self->guards);
    Py_VISIT(self->run);
    Py_VISIT(self->info);
    return 0;
}

static int Entry_clear(Entry *self)
{
    Py_CLEAR(self->guards);
    Py_CLEAR(self->run);
    Py_CLEAR(self->info);
    return 0;
}

static PyMemberDef Entry_members[] = {
    {"guards", T_OBJECT, offsetof(Entry, guards), READONLY, NULL},
    {"run", T_OBJECT, offsetof(Entry, run), READONLY, NULL},
    {"info", T_OBJECT, offsetof(Entry, info), READONLY, NULL},
    {"hit", T_BOOL, offsetof(Entry, hit), READONLY, "Whether a call after the one it was made for has run it."},
    {NULL},
};

static PyTypeObject Entry_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "kiln._hook.Entry",
    .tp_basicsize = sizeof(Entry),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_doc = "A cache entry of a region: guards, run, info.",
    .tp_dealloc = (destructor)Entry_dealloc,
    .tp_traverse = (traverseproc)Entry_traverse,
    .tp_clear = (inquiry)Entry_clear,
    .tp_members = Entry_members,
};

static inline PyCodeObject *code_of(PyObject *function)
{
    return (PyCodeObject *)((PyFunctionObject *)function)->func_code;
}

static int slot_count(PyCodeObject *code)
{
    return code->co_argcount + code->co_kwonlyargcount + ((code->co_flags & CO_VARARGS) != 0) +
           ((code->co_flags & CO_VARKEYWORDS) != 0);
}

/* The slot of a keyword argument, or -1. */
static int keyword_slot(PyCodeObject *code, PyObject *name)
{
    PyObject *names = code->co_localsplusnames;
    int first = code->co_posonlyargcount, end = code->co_argcount + code->co_kwonlyargcount;
    for (int i = first; i < end; i++)
        if (PyTuple_GET_ITEM(names, i) == name)
            return i;
    for (int i = first; i < end; i++)
        if (PyUnicode_Compare(PyTuple_GET_ITEM(names, i), name) == 0)
            return i;
    return -1;
}

static bool bind_extra(Region *self, PyCodeObject *code, PyObject *const *args, Py_ssize_t nargs, PyObject **slots)
{
    Py_ssize_t positional = code->co_argcount;
    int next = code->co_argcount + code->co_kwonlyargcount;
    if (code->co_flags & CO_VARARGS) {
        Py_ssize_t extra = nargs > positional ? nargs - positional : 0;
        PyObject *rest = PyTuple_New(extra);
        if (rest == NULL)
            return false;
        for (Py_ssize_t i = 0; i < extra; i++)
            PyTuple_SET_ITEM(rest, i, Py_NewRef(args[positional + i]));
        slots[next++] = rest;
    }
    else if (nargs > positional)
        return false;
    if (!(code->co_flags & CO_VARKEYWORDS))
        return true;
    slots[next] = self->spare != NULL ? self->spare : PyDict_New();
    self->spare = NULL;
    return slots[next] != NULL;
}

static bool bind_keywords(PyCodeObject *code, PyObject *const *values, PyObject *names, PyObject **slots)
{
    PyObject *rest = code->co_flags & CO_VARKEYWORDS ? slots[slot_count(code) - 1] : NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i);
        if (!PyUnicode_Check(name))
            return false;
        int slot = keyword_slot(code, name);
        if (slot >= 0) {
            if (slots[slot] != NULL)
                return false;
            slots[slot] = Py_NewRef(values[i]);
        }
        else if (rest == NULL || PyDict_SetItem(rest, name, values[i]) < 0)
            return false;
    }
    return true;
}

static bool bind_defaults(PyFunctionObject *function, PyCodeObject *code, PyObject **slots)
{
    int positional = code->co_argcount, named = positional + code->co_kwonlyargcount;
    int optional = function->func_defaults ? (int)PyTuple_GET_SIZE(function->func_defaults) : 0;
    for (int i = 0; i < positional; i++)
        if (slots[i] == NULL) {
            if (i < positional - optional)
                return false;
            slots[i] = Py_NewRef(PyTuple_GET_ITEM(function->func_defaults, i - (positional - optional)));
        }
    for (int i = positional; i < named; i++)
        if (slots[i] == NULL) {
            PyObject *name = PyTuple_GET_ITEM(code->co_localsplusnames, i);
            PyObject *value = function->func_kwdefaults ? PyDict_GetItemWithError(function->func_kwdefaults, name) : NULL;
            if (value == NULL)
                return false;
            slots[i] = Py_NewRef(value);
        }
    return true;
}

/* Binds the arguments of a call to the slots of the function's code; false when the function would refuse them. */
static bool bind(Region *self, PyFunctionObject *function, PyObject *const *args, Py_ssize_t nargs, PyObject *names, PyObject **slots)
{
    PyCodeObject *code = code_of((PyObject *)function);
    Py_ssize_t given = nargs < code->co_argcount ? nargs : code->co_argcount;
    for (Py_ssize_t i = 0; i < given; i++)
        slots[i] = Py_NewRef(args[i]);
    bool bound = bind_extra(self, code, args, nargs, slots) &&
                 (names == NULL || bind_keywords(code, args + nargs, names, slots)) &&
                 bind_defaults(function, code, slots);
    PyErr_Clear();
    return bound;
}

/* Keeps an empty dict that nobody else has: making one each call costs time, and tells every guard that some dict in
   the process has changed. */
static void keep_spare(Region *self, PyObject **slot)
{
    if (*slot != NULL && Py_REFCNT(*slot) == 1 && PyDict_GET_SIZE(*slot) == 0 && self->spare == NULL) {
        self->spare = *slot;
        *slot = NULL;
    }
}

/* Runs an entry between the marks of a profile; the whole is what it does and the calls that it leaves. */
static PyObject *run_marked(Region *self, PyObject *run, PyObject *const *argv, Py_ssize_t argc, bool whole)
{
    PyObject *now = Py_NewRef(marker), *end = PyObject_CallOneArg(now, (PyObject *)self);
    Py_DECREF(now);
    if (end == NULL)
        return NULL;
    PyObject *result = PyObject_Vectorcall(run, argv, argc, NULL), *type, *value, *trace;
    if (whole)
        result = call_tails(result);
    PyErr_Fetch(&type, &value, &trace);
    Py_XDECREF(PyObject_CallNoArgs(end));
    Py_DECREF(end);
    if (type != NULL || PyErr_Occurred() == NULL)
        PyErr_Restore(type, value, trace);
    else
        Py_CLEAR(result);
    return result;
}

static PyObject *run_entry(Region *self, Entry *entry, PyObject *const *argv, Py_ssize_t argc, bool whole)
{
    PyObject *run = Py_NewRef(entry->run);
    PyObject *result = marker == NULL ? PyObject_Vectorcall(run, argv, argc, NULL) : run_marked(self, run, argv, argc, whole);
    Py_DECREF(run);
    if (result == NULL)
        clean_traceback();
    return result;
}

/* Compiles, and runs what the miss gave by then(); another answer is the result of the call itself. A debugger does
   not follow into the compiler. */
static PyObject *call_miss(Region *self, PyObject *const *argv, Py_ssize_t argc, bool whole)
{
    PyObject *tuple = PyTuple_New(argc);
    if (tuple == NULL)
        return NULL;
    for (Py_ssize_t i = 0; i < argc; i++)
        PyTuple_SET_ITEM(tuple, i, Py_NewRef(argv[i]));
    PyThreadState *thread = PyThreadState_Get();
    Py_tracefunc trace = thread->c_tracefunc;
    PyObject *traced = Py_XNewRef(thread->c_traceobj);
    if (trace != NULL)
        PyEval_SetTrace(NULL, NULL);
    PyObject *args[] = {(PyObject *)self, tuple};
    PyObject *result = PyObject_Vectorcall(self->miss, args, 2, NULL);
    if (trace != NULL)
        PyEval_SetTrace(trace, traced);
    Py_XDECREF(traced);
    Py_DECREF(tuple);
    if (result != NULL && Py_IS_TYPE(result, &Entry_Type)) {
        Entry *entry = (Entry *)result;
        result = run_entry(self, entry, argv, argc, whole);
        Py_DECREF(entry);
    }
    else if (result == NULL)
        clean_traceback();
    return result;
}

static void move_to_front(Region *self, Entry *entry)
{
    for (int i = 1; i < self->count; i++)
        if (self->entries[i] == entry) {
            memmove(self->entries + 1, self->entries, i * sizeof *self->entries);
            self->entries[0] = entry;
            return;
        }
}

/* Guards may run Python code, which may change the entries: a failed check goes on at the place after it. */
static Entry *find_entry(Region *self, PyObject *const *argv, Py_ssize_t argc, int *error)
{
    for (int i = 0; i < self->count; i++) {
        Entry *entry = (Entry *)Py_NewRef(self->entries[i]);
        int holds = entry->guards == NULL || entry->run == NULL ? 0 : guards_check(entry->guards, argv, argc);
        if (holds == 1) {
            entry->hit = 1;
            if (i != 0)
                move_to_front(self, entry);
            return entry;
        }
        Py_DECREF(entry);
        if (holds < 0) {
            *error = 1;
            return NULL;
        }
    }
    return NULL;
}

/* Runs the region on bound arguments, up to where it leaves a call; NULL without an error asks the caller to run the
   original. The whole, with those calls, is what a profile shows of it. */
static PyObject *region_run(Region *self, PyObject *const *argv, Py_ssize_t argc, bool whole)
{
    int error = 0;
    Entry *entry = find_entry(self, argv, argc, &error);
    if (entry != NULL) {
        PyObject *result = run_entry(self, entry, argv, argc, whole);
        Py_DECREF(entry);
        return result;
    }
    if (error || self->limit_hit)
        return NULL;
    if (self->wait > 0) {
        self->wait--;
        return NULL;
    }
    return call_miss(self, argv, argc, whole);
}

/* Makes the call that a tail is. */
static PyObject *call_tail(Tail *tail)
{
    Py_ssize_t n = Py_SIZE(tail);
    if (!Py_IS_TYPE(tail->target, &Region_Type)) {
        PyObject *result = call_given(tail->target, tail->values, n);
        if (result == NULL)
            clean_traceback();
        return result;
    }
    Region *region = (Region *)tail->target;
    PyObject *result = region->enabled ? region_run(region, tail->values, n, false) : NULL;
    if (result == NULL && !PyErr_Occurred())
        result = call_alone(region->function, tail->values, n, NULL);
    return result;
}

/* Makes the calls that a result leaves one after the other, and gives the result of the last. */
static PyObject *call_tails(PyObject *result)
{
    while (result != NULL && Py_IS_TYPE(result, &Tail_Type)) {
        PyObject *tail = result;
        result = call_tail((Tail *)tail);
        Py_DECREF(tail);
    }
    return result;
}

static PyObject *hook_driven(PyObject *module, PyObject *result)
{
    return call_tails(Py_NewRef(result));
}

static PyObject *region_vectorcall(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Region *self = (Region *)object;
    Py_ssize_t nargs = PyVectorcall_NARGS(nargsf);
    PyFunctionObject *function = (PyFunctionObject *)self->function;
    PyObject *result = NULL;
    if (self->enabled) {
        PyCodeObject *code = code_of(self->function);
        int n = slot_count(code);
        if (names == NULL && nargs == n && n == code->co_argcount)
            result = region_run(self, args, n, true);
        else {
            PyObject *few[24], **slots = few;
            if (n > 24 && (slots = PyMem_Malloc(n * sizeof *slots)) == NULL)
                return PyErr_NoMemory();
            memset(slots, 0, n * sizeof *slots);
            if (bind(self, function, args, nargs, names, slots))
                result = region_run(self, slots, n, true);
            if (code->co_flags & CO_VARKEYWORDS)
                keep_spare(self, &slots[n - 1]);
            for (int i = 0; i < n; i++)
                Py_XDECREF(slots[i]);
            if (slots != few)
                PyMem_Free(slots);
        }
        if (result != NULL || PyErr_Occurred())
            return call_tails(result);
    }
    return call_alone(self->function, args, nargsf & ~PY_VECTORCALL_ARGUMENTS_OFFSET, names);
}

static PyObject *Region_call_original(Region *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    return call_alone(self->function, args, nargs, names);
}

static Entry *entry_new(PyObject *guards, PyObject *run, PyObject *info)
{
    Entry *entry = PyObject_GC_New(Entry, &Entry_Type);
    if (entry == NULL)
        return NULL;
    entry->guards = (Guards *)Py_XNewRef(guards);
    entry->run = Py_NewRef(run);
    entry->info = Py_NewRef(info);
    entry->hit = 0;
    PyObject_GC_Track(entry);
    return entry;
}

static PyObject *hook_then(PyObject *module, PyObject *run)
{
    return (PyObject *)entry_new(NULL, run, Py_None);
}

static PyObject *hook_set_marker(PyObject *module, PyObject *given)
{
    Py_XSETREF(marker, given == Py_None ? NULL : Py_NewRef(given));
    Py_RETURN_NONE;
}

static PyObject *Region_add(Region *self, PyObject *args)
{
    PyObject *guards, *run, *info = Py_None;
    if (!PyArg_ParseTuple(args, "O!O|O:add", &Guards_Type, &guards, &run, &info))
        return NULL;
    if (self->count == self->capacity) {
        int capacity = self->capacity ? self->capacity * 2 : 4;
        Entry **entries = PyMem_Realloc(self->entries, capacity * sizeof *entries);
        if (entries == NULL)
            return PyErr_NoMemory();
        self->entries = entries;
        self->capacity = capacity;
    }
    Entry *entry = entry_new(guards, run, info);
    if (entry == NULL)
        return NULL;
    memmove(self->entries + 1, self->entries, self->count * sizeof *self->entries);
    self->entries[0] = entry;
    self->count++;
    Py_RETURN_NONE;
}

static void drop_entries(Region *self)
{
    Entry **entries = self->entries;
    int n = self->count;
    self->entries = NULL;
    self->count = self->capacity = 0;
    for (int i = 0; i < n; i++)
        Py_DECREF(entries[i]);
    PyMem_Free(entries);
}

static PyObject *Region_clear_entries(Region *self, PyObject *unused)
{
    drop_entries(self);
    self->wait = 0;
    Py_RETURN_NONE;
}

static PyObject *Region_entries(Region *self, void *unused)
{
    PyObject *list = PyList_New(self->count);
    for (int i = 0; list != NULL && i < self->count; i++)
        PyList_SET_ITEM(list, i, Py_NewRef(self->entries[i]));
    return list;
}

static PyObject *Region_get(PyObject *self, PyObject *object, PyObject *type)
{
    return object == NULL || object == Py_None ? Py_NewRef(self) : PyMethod_New(self, object);
}

static PyObject *Region_same(PyObject *self, PyObject *unused)
{
    return Py_NewRef(self);
}

static PyObject *Region_reduce(PyObject *self, PyObject *unused)
{
    return PyObject_GetAttrString(self, "__qualname__");
}

static PyObject *Region_repr(Region *self)
{
    return PyUnicode_FromFormat("<compiled %R>", self->function);
}

static int Region_traverse(Region *self, visitproc visit, void *arg)
{
    Py_VISIT(self->function);
    Py_VISIT(self->miss);
    Py_VISIT(self->dict);
    for (int i = 0; i < self->count; i++)
        Py_VISIT(self->entries[i]);
    return 0;
}

/* The function stays until the end: a region is callable as long as it can be reached. */
static int Region_clear(Region *self)
{
    Py_CLEAR(self->dict);
    Py_CLEAR(self->spare);
    drop_entries(self);
    return 0;
}

static void Region_dealloc(Region *self)
{
    PyObject_GC_UnTrack(self);
    if (self->weakrefs != NULL)
        PyObject_ClearWeakRefs((PyObject *)self);
    Region_clear(self);
    forget_region(self);
    Py_XDECREF(self->function);
    Py_XDECREF(self->miss);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Makes the region look like its function, as functools.wraps does. */
static int take_names(Region *self)
{
    static const char *const names[] = {"__module__", "__name__", "__qualname__", "__doc__", "__annotations__"};
    PyFunctionObject *function = (PyFunctionObject *)self->function;
    if (function->func_dict != NULL && PyDict_Update(self->dict, function->func_dict) < 0)
        return -1;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        PyObject *value = PyObject_GetAttrString(self->function, names[i]);
        if (value == NULL || PyDict_SetItemString(self->dict, names[i], value) < 0) {
            Py_XDECREF(value);
            return -1;
        }
        Py_DECREF(value);
    }
    return PyDict_SetItemString(self->dict, "__wrapped__", self->function);
}

static PyObject *Region_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"function", "miss", NULL};
    PyObject *function, *miss;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O:Region", names, &PyFunction_Type, &function, &miss))
        return NULL;
    Region *self = (Region *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->vectorcall = region_vectorcall;
    self->function = Py_NewRef(function);
    self->miss = Py_NewRef(miss);
    self->enabled = 1;
    self->dict = PyDict_New();
    if (self->dict == NULL || take_names(self) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyMethodDef Region_methods[] = {
    {"add", (PyCFunction)Region_add, METH_VARARGS, "add(guards, run, info=None): puts an entry first."},
    {"clear", (PyCFunction)Region_clear_entries, METH_NOARGS, "Takes out all entries."},
    {"call_original", (PyCFunction)(void (*)(void))Region_call_original, METH_FASTCALL | METH_KEYWORDS,
     "Calls the function itself."},
    {"__copy__", Region_same, METH_NOARGS, "The region itself: functions are atoms."},
    {"__deepcopy__", Region_same, METH_O, "The region itself: functions are atoms."},
    {"__reduce__", Region_reduce, METH_NOARGS, "Pickles by name, as functions do."},
    {NULL},
};

static PyMemberDef Region_members[] = {
    {"function", T_OBJECT, offsetof(Region, function), READONLY, "The original function."},
    {"miss", T_OBJECT, offsetof(Region, miss), READONLY, "Called with (region, argv) when no entry fits."},
    {"enabled", T_BOOL, offsetof(Region, enabled), 0, "When False the original runs."},
    {"limit_hit", T_BOOL, offsetof(Region, limit_hit), 0, "When True a miss runs the original."},
    {"wait", T_INT, offsetof(Region, wait), 0, "How many misses run the original before the next one compiles."},
    {NULL},
};

static PyGetSetDef Region_getset[] = {
    {"entries", (getter)Region_entries, NULL, "The entries, most recently hit first: a copy.", NULL},
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL},
};

static PyTypeObject Region_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "kiln._hook.Region",
    .tp_basicsize = sizeof(Region),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_vectorcall_offset = offsetof(Region, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = Region_new,
    .tp_dealloc = (destructor)Region_dealloc,
    .tp_traverse = (traverseproc)Region_traverse,
    .tp_clear = (inquiry)Region_clear,
    .tp_dictoffset = offsetof(Region, dict),
    .tp_weaklistoffset = offsetof(Region, weakrefs),
    .tp_descr_get = Region_get,
    .tp_repr = (reprfunc)Region_repr,
    .tp_methods = Region_methods,
    .tp_members = Region_members,
    .tp_getset = Region_getset,
};

#endif
