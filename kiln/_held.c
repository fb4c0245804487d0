/* Watches tensors that a program holds: whether one of them has changed since they were last looked at. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

typedef int32_t (*DataPointer)(void *tensor, void **address);
typedef int64_t (*Version)(const void *tensor);

/* Found by launch/native.py in torch's own libraries. */
static struct {
    DataPointer data_pointer;
    Version version;   /* NULL where there is none: then the attribute is read */
    Py_ssize_t offset; /* of the tensor's handle in its Python object */
} torch;

static PyObject *version_name;

/* What is seen of a tensor: writes through `.data` or numpy raise no version, so a few words of its memory are read. */
typedef struct {
    PyObject *tensor;
    int64_t version, bytes;
    void *data;
    uint64_t words;
} Seen;

typedef struct {
    PyObject_HEAD
    Seen *seen;
    Py_ssize_t count;
    int64_t stamp;
} Watch;

enum {
    SMALL = 1024, /* bytes that are all read */
    PLACES = 8,   /* words that are read of more, spread over it; the last one besides */
};

static uint64_t
word_at(const char *data, int64_t place)
{
    uint64_t word;
    memcpy(&word, data + place, sizeof word);
    return word;
}

static uint64_t
words_of(const char *data, int64_t bytes)
{
    uint64_t words = 0;
    if (data == NULL)
        return 0;
    if (bytes < 8) {
        memcpy(&words, data, bytes);
        return words;
    }
    words = word_at(data, bytes - 8);
    int64_t step = bytes <= SMALL ? 8 : bytes / PLACES / 8 * 8;
    for (int64_t place = 0; place + 8 <= bytes; place += step)
        words = words * 0x9E3779B97F4A7C15u + word_at(data, place);
    return words;
}

/* The version of a tensor; -1 with an exception set. */
static int64_t
version_of(PyObject *tensor)
{
    if (torch.version != NULL)
        return torch.version((char *)tensor + torch.offset);
    PyObject *version = PyObject_GetAttr(tensor, version_name);
    if (version == NULL)
        return -1;
    int64_t number = PyLong_AsLongLong(version);
    Py_DECREF(version);
    return number;
}

/* Looks at one tensor; 1 when it has changed, -1 with an exception set. */
static int
look(Seen *seen)
{
    int64_t number = version_of(seen->tensor);
    if (number == -1 && PyErr_Occurred())
        return -1;
    void *data = NULL;
    if (torch.data_pointer((char *)seen->tensor + torch.offset, &data)) {
        PyErr_SetString(PyExc_RuntimeError, "a tensor's memory cannot be read");
        return -1;
    }
    uint64_t words = words_of(data, seen->bytes);
    int changed = number != seen->version || data != seen->data || words != seen->words;
    seen->version = number, seen->data = data, seen->words = words;
    return changed;
}

static PyObject *
watch_stamp(Watch *watch, PyObject *unused)
{
    int changed = 0;
    for (Py_ssize_t i = 0; i < watch->count; i++) {
        int found = look(&watch->seen[i]);
        if (found < 0)
            return NULL;
        changed |= found;
    }
    watch->stamp += changed;
    return PyLong_FromLongLong(watch->stamp);
}

static PyObject *
watch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *tensors, *bytes;
    if (!PyArg_ParseTuple(args, "O!O!:Watch", &PyTuple_Type, &tensors, &PyTuple_Type, &bytes))
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(tensors);
    if (PyTuple_GET_SIZE(bytes) != count)
        return PyErr_Format(PyExc_ValueError, "a size for each tensor");
    if (torch.data_pointer == NULL)
        return PyErr_Format(PyExc_RuntimeError, "set_torch has not been called");
    Watch *watch = (Watch *)type->tp_alloc(type, 0);
    if (watch == NULL)
        return NULL;
    watch->seen = PyMem_Calloc(count ? count : 1, sizeof(Seen));
    if (watch->seen == NULL) {
        Py_DECREF(watch);
        return PyErr_NoMemory();
    }
    for (; watch->count < count; watch->count++) {
        Seen *seen = &watch->seen[watch->count];
        seen->tensor = Py_NewRef(PyTuple_GET_ITEM(tensors, watch->count));
        seen->version = -1;
        seen->bytes = PyLong_AsLongLong(PyTuple_GET_ITEM(bytes, watch->count));
    }
    if (PyErr_Occurred()) {
        Py_DECREF(watch);
        return NULL;
    }
    return (PyObject *)watch;
}

static int
watch_traverse(Watch *watch, visitproc visit, void *arg)
{
    for (Py_ssize_t i = 0; i < watch->count; i++)
        Py_VISIT(watch->seen[i].tensor);
    return 0;
}

static int
watch_clear(Watch *watch)
{
    Py_ssize_t count = watch->count;
    watch->count = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        Py_CLEAR(watch->seen[i].tensor);
    return 0;
}

static void
watch_dealloc(Watch *watch)
{
    PyObject_GC_UnTrack(watch);
    watch_clear(watch);
    PyMem_Free(watch->seen);
    Py_TYPE(watch)->tp_free((PyObject *)watch);
}

static PyMethodDef watch_methods[] = {
    {"stamp", (PyCFunction)watch_stamp, METH_NOARGS, "A number that is another one after a tensor has changed."},
    {NULL},
};

static PyTypeObject WatchType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kiln._held.Watch",
    .tp_doc = "Watch(tensors, bytes): tuples of tensors and of the bytes of memory that each spans.",
    .tp_basicsize = sizeof(Watch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = watch_new,
    .tp_traverse = (traverseproc)watch_traverse,
    .tp_clear = (inquiry)watch_clear,
    .tp_dealloc = (destructor)watch_dealloc,
    .tp_methods = watch_methods,
};

static PyObject *
set_torch(PyObject *module, PyObject *args)
{
    unsigned long long data_pointer, version;
    if (!PyArg_ParseTuple(args, "nKK:set_torch", &torch.offset, &data_pointer, &version))
        return NULL;
    torch.data_pointer = (DataPointer)(uintptr_t)data_pointer;
    torch.version = (Version)(uintptr_t)version;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"set_torch", set_torch, METH_VARARGS, "set_torch(offset, data_pointer, version): addresses in torch's libraries"},
    {NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "kiln._held", NULL, -1, functions};

PyMODINIT_FUNC
PyInit__held(void)
{
    PyObject *module = PyModule_Create(&definition);
    version_name = PyUnicode_InternFromString("_version");
    if (module == NULL || version_name == NULL || PyModule_AddType(module, &WatchType) < 0) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
