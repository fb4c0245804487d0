/* Nests of tuples, lists, dicts and slices, as the arguments of a node are: all stages walk them, many times. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

static int
gather(PyTypeObject *kind, PyObject *value, PyObject *found)
{
    if (Py_TYPE(value) == kind)
        return PyList_Append(found, value);
    if (PyTuple_CheckExact(value)) {
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); i++)
            if (gather(kind, PyTuple_GET_ITEM(value, i), found) < 0)
                return -1;
    } else if (PyList_CheckExact(value)) {
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); i++)
            if (gather(kind, PyList_GET_ITEM(value, i), found) < 0)
                return -1;
    } else if (PyDict_CheckExact(value)) {
        PyObject *key, *item;
        Py_ssize_t place = 0;
        while (PyDict_Next(value, &place, &key, &item))
            if (gather(kind, item, found) < 0)
                return -1;
    } else if (PySlice_Check(value)) {
        PySliceObject *slice = (PySliceObject *)value;
        if (gather(kind, slice->start, found) < 0 || gather(kind, slice->stop, found) < 0 ||
            gather(kind, slice->step, found) < 0)
            return -1;
    }
    return 0;
}

static PyObject *
nests_gathered(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count < 1 || !PyType_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "gathered(kind, *nests) takes a class first");
        return NULL;
    }
    PyObject *found = PyList_New(0);
    for (Py_ssize_t i = 1; found != NULL && i < count; i++)
        if (gather((PyTypeObject *)args[0], args[i], found) < 0)
            Py_CLEAR(found);
    return found;
}

/* What becomes of that which is no container: what a function makes of it, or, where a class is given, what a
   dict has for an object of exactly that class. */
typedef struct {
    PyTypeObject *kind; /* NULL: `by` is a function */
    PyObject *by;
} Leaves;

static PyObject *
of_leaf(const Leaves *leaves, PyObject *value)
{
    if (leaves->kind == NULL)
        return PyObject_CallOneArg(leaves->by, value);
    if (Py_TYPE(value) != leaves->kind)
        return Py_NewRef(value);
    PyObject *found = PyDict_GetItemWithError(leaves->by, value);
    return found == NULL && PyErr_Occurred() ? NULL : Py_NewRef(found != NULL ? found : value);
}

static PyObject *walked(const Leaves *leaves, PyObject *value);

/* A tuple in which nothing changes is itself. */
static PyObject *
of_tuple(const Leaves *leaves, PyObject *value)
{
    PyObject *made = NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); i++) {
        PyObject *old = PyTuple_GET_ITEM(value, i), *item = walked(leaves, old);
        if (item != NULL && item != old && made == NULL) {
            made = PyTuple_New(PyTuple_GET_SIZE(value));
            for (Py_ssize_t k = 0; made != NULL && k < i; k++)
                PyTuple_SET_ITEM(made, k, Py_NewRef(PyTuple_GET_ITEM(value, k)));
        }
        if (item == NULL || (item != old && made == NULL)) {
            Py_XDECREF(item);
            Py_XDECREF(made);
            return NULL;
        }
        if (made != NULL)
            PyTuple_SET_ITEM(made, i, item);
        else
            Py_DECREF(item);
    }
    return made != NULL ? made : Py_NewRef(value);
}

static PyObject *
walked(const Leaves *leaves, PyObject *value)
{
    if (PyTuple_CheckExact(value))
        return of_tuple(leaves, value);
    if (PyList_CheckExact(value)) {
        PyObject *made = PyList_New(0);
        for (Py_ssize_t i = 0; made != NULL && i < PyList_GET_SIZE(value); i++) {
            PyObject *item = walked(leaves, PyList_GET_ITEM(value, i));
            if (item == NULL || PyList_Append(made, item) < 0)
                Py_CLEAR(made);
            Py_XDECREF(item);
        }
        return made;
    }
    if (PyDict_CheckExact(value)) {
        PyObject *made = PyDict_New(), *key, *held;
        Py_ssize_t place = 0;
        while (made != NULL && PyDict_Next(value, &place, &key, &held)) {
            PyObject *item = walked(leaves, held);
            if (item == NULL || PyDict_SetItem(made, key, item) < 0)
                Py_CLEAR(made);
            Py_XDECREF(item);
        }
        return made;
    }
    if (PySlice_Check(value)) {
        PySliceObject *slice = (PySliceObject *)value;
        PyObject *start = walked(leaves, slice->start);
        PyObject *stop = start == NULL ? NULL : walked(leaves, slice->stop);
        PyObject *step = stop == NULL ? NULL : walked(leaves, slice->step);
        PyObject *made = step == NULL ? NULL : PySlice_New(start, stop, step);
        Py_XDECREF(start);
        Py_XDECREF(stop);
        Py_XDECREF(step);
        return made;
    }
    return of_leaf(leaves, value);
}

static PyObject *
nests_mapped(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "mapped(value, leaf) takes two arguments");
        return NULL;
    }
    return walked(&(Leaves){NULL, args[1]}, args[0]);
}

static PyObject *
nests_replaced(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 3 || !PyType_Check(args[0]) || !PyDict_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "replaced(kind, nest, instead) takes a class, a nest and a dict");
        return NULL;
    }
    return walked(&(Leaves){(PyTypeObject *)args[0], args[2]}, args[1]);
}

static PyMethodDef methods[] = {
    {"gathered", (PyCFunction)(void (*)(void))nests_gathered, METH_FASTCALL,
     "gathered(kind, *nests): the objects of exactly this class in nests of tuples, lists, dicts and slices."},
    {"mapped", (PyCFunction)(void (*)(void))nests_mapped, METH_FASTCALL,
     "mapped(value, leaf): the nest with leaf applied to all that is not a tuple, list, dict or slice."},
    {"replaced", (PyCFunction)(void (*)(void))nests_replaced, METH_FASTCALL,
     "replaced(kind, nest, instead): the nest with what a dict has for objects of exactly this class."},
    {NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kiln._nests",
    .m_doc = "Walks over nests of tuples, lists, dicts and slices.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC
PyInit__nests(void)
{
    return PyModule_Create(&module);
}
