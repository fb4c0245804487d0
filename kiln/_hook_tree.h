/* The tree of a guard set: fetches from the bound arguments, with checks at its nodes. */
#ifndef KILN_HOOK_TREE_H
#define KILN_HOOK_TREE_H

#include "_hook_compat.h"
#include "_hook_tensor.h"

typedef enum {
    FETCH_ARG,     /* operand: index */
    FETCH_CONST,   /* operand: the object */
    FETCH_ATTR,    /* operand: name */
    FETCH_DICT,    /* the instance dict; nothing when there is none */
    FETCH_KEY,     /* operand: key of the dict that the parent fetched */
    FETCH_ITEM,    /* operand: key */
    FETCH_CELL,
    FETCH_CLOSURE, /* operand: index */
    FETCH_CALL,    /* operand: callable on the tuple of arguments */
} Fetch;

/* Checks of one value come first, then those of several values or of none. */
typedef enum {
    CHECK_TYPE,     /* operand: the type */
    CHECK_IS,       /* operand: the object */
    CHECK_EQUALS,   /* operand: a constant that same_constant knows */
    CHECK_CONSTANT, /* operand: callable on the value, whose answer depends on the value's identity alone */
    CHECK_LENGTH,   /* operand: int */
    CHECK_KEYS,     /* operand: tuple of such constants */
    CHECK_HAS,      /* operand: key of a dict or set */
    CHECK_LACKS,
    CHECK_ABSENT,   /* operand: key of an instance dict, which may itself be absent */
    CHECK_FUNCTION, /* operand: (code, defaults, kwdefaults) */
    CHECK_TENSOR,   /* operand: see tensor_spec */
    CHECK_SHAPED,   /* operand: see shaped_spec */
    CHECK_INT,      /* an int that a machine word holds */
    CHECK_TEST,     /* operand: callable on the value */
    LAST_OF_ONE = CHECK_TEST,
    CHECK_CLASS,    /* operand: (class, name, value), or (class, name) when the name is to be missing */
    CHECK_SAME,
    CHECK_DISTINCT,
    CHECK_STATE,    /* operand: see state_spec */
    CHECK_SYMBOLS,  /* operand: (callable on numbers, (index among the values, what to read, dimension), …) */
    CHECK_CALL,     /* operand: callable on the tuple of arguments */
    LAST_CHECK = CHECK_CALL,
} CheckKind;

typedef struct {
    CheckKind kind;
    int count; /* of nodes */
    int *nodes;
    PyObject *operand;
    void *spec; /* of a tensor or of global state */
} Check;

typedef struct {
    Fetch kind;
    int parent;
    int first_check, check_count; /* a range of Guards.placed */
    int first_child, child_count; /* a range of Guards.children */
    int register_;                /* where the value is kept for relations, or -1 */
    PyObject *operand;
    Py_ssize_t index;
} Node;

typedef struct Seal Seal;

typedef struct {
    PyObject_HEAD
    Seal *seal;   /* what the pinned part of the tree looked like when it last held, or NULL */
    int restless; /* how many walks go by before the next seal, when seals have been breaking */
    int waited;
    bool settled; /* see check_pinned */
    bool cleared; /* by the garbage collector: nothing holds any more */
    Node *nodes;
    int node_count;
    Check *checks;
    int check_count;
    int *placed;   /* checks of one node, node by node */
    int *children; /* nodes by parent */
    int *roots;
    int root_count;
    int *loose;    /* checks without a node, or with several */
    int loose_count;
    int register_count;
} Guards;

static PyTypeObject Guards_Type;

/* The arguments of the call under check; the tuple is made only for checks that are Python callables. */
typedef struct {
    PyObject *const *argv;
    Py_ssize_t argc;
    PyObject *tuple;
    PyObject **registers;
    PyObject *const *sealed; /* by node: the value that a seal vouches for, or NULL; NULL without a seal */
    const int *places;       /* by node: its register under the seal, or -1; NULL without a seal */
} Call;

static inline int register_of(Guards *self, const Call *call, int number)
{
    return call->places != NULL ? call->places[number] : self->nodes[number].register_;
}

static PyObject *call_tuple(Call *call)
{
    if (call->tuple == NULL) {
        PyObject *tuple = PyTuple_New(call->argc);
        if (tuple == NULL)
            return NULL;
        for (Py_ssize_t i = 0; i < call->argc; i++)
            PyTuple_SET_ITEM(tuple, i, Py_NewRef(call->argv[i]));
        call->tuple = tuple;
    }
    return call->tuple;
}

/* The dict of an object, borrowed; NULL without an error when it has none. */
static PyObject *instance_dict(PyObject *object)
{
    if (PyType_Check(object))
        return type_dict((PyTypeObject *)object);
    if (PyModule_Check(object))
        return PyModule_GetDict(object);
    PyObject *dict = PyObject_GenericGetDict(object, NULL);
    if (dict == NULL) {
        if (PyErr_ExceptionMatches(PyExc_AttributeError))
            PyErr_Clear();
        return NULL;
    }
    Py_DECREF(dict); /* the object keeps it */
    return dict;
}

/* One step of a path: a new reference, or NULL with or without an error. `base` is NULL for an absent dict. */
static PyObject *fetch(const Node *node, PyObject *base, Call *call)
{
    switch (node->kind) {
    case FETCH_ARG:
        return node->index < call->argc ? Py_NewRef(call->argv[node->index]) : NULL;
    case FETCH_CONST:
        return Py_NewRef(node->operand);
    case FETCH_ATTR:
        return PyObject_GetAttr(base, node->operand);
    case FETCH_DICT:
        return Py_XNewRef(instance_dict(base));
    case FETCH_KEY:
        return base == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(base, node->operand));
    case FETCH_ITEM:
        if (PyDict_Check(base))
            return Py_XNewRef(PyDict_GetItemWithError(base, node->operand));
        if (node->index >= 0 && PyTuple_CheckExact(base))
            return node->index < PyTuple_GET_SIZE(base) ? Py_NewRef(PyTuple_GET_ITEM(base, node->index)) : NULL;
        if (node->index >= 0 && PyList_CheckExact(base))
            return node->index < PyList_GET_SIZE(base) ? Py_NewRef(PyList_GET_ITEM(base, node->index)) : NULL;
        return PyObject_GetItem(base, node->operand);
    case FETCH_CELL:
        return PyCell_Check(base) ? PyCell_Get(base) : PyObject_GetAttrString(base, "cell_contents");
    case FETCH_CLOSURE: {
        PyObject *closure = PyFunction_Check(base) ? PyFunction_GET_CLOSURE(base) : NULL;
        if (closure == NULL || node->index >= PyTuple_GET_SIZE(closure))
            return NULL;
        return Py_NewRef(PyTuple_GET_ITEM(closure, node->index));
    }
    case FETCH_CALL: {
        PyObject *tuple = call_tuple(call);
        return tuple == NULL ? NULL : PyObject_CallOneArg(node->operand, tuple);
    }
    }
    return NULL;
}

static inline bool same_float(double a, double b)
{
    if (a != a || b != b)
        return a != a && b != b;
    return memcmp(&a, &b, sizeof a) == 0;
}

/* `same` of check/values.py, but for ranges and frozensets; -1 with an error. */
static int same_constant(PyObject *a, PyObject *b)
{
    if (a == b)
        return 1;
    if (Py_TYPE(a) != Py_TYPE(b))
        return 0;
    if (PyFloat_Check(a))
        return same_float(PyFloat_AS_DOUBLE(a), PyFloat_AS_DOUBLE(b));
    if (PyComplex_Check(a)) {
        Py_complex x = ((PyComplexObject *)a)->cval, y = ((PyComplexObject *)b)->cval;
        return same_float(x.real, y.real) && same_float(x.imag, y.imag);
    }
    if (PyTuple_Check(a)) {
        Py_ssize_t n = PyTuple_GET_SIZE(a);
        int same = PyTuple_GET_SIZE(b) == n;
        for (Py_ssize_t i = 0; same == 1 && i < n; i++)
            same = same_constant(PyTuple_GET_ITEM(a, i), PyTuple_GET_ITEM(b, i));
        return same;
    }
    if (PySlice_Check(a)) {
        PySliceObject *x = (PySliceObject *)a, *y = (PySliceObject *)b;
        int same = same_constant(x->start, y->start);
        if (same == 1)
            same = same_constant(x->stop, y->stop);
        return same == 1 ? same_constant(x->step, y->step) : same;
    }
    return PyObject_RichCompareBool(a, b, Py_EQ);
}

static int same_keys(PyObject *dict, PyObject *keys)
{
    Py_ssize_t n = PyTuple_GET_SIZE(keys), position = 0, i = 0;
    if (!PyDict_Check(dict) || PyDict_GET_SIZE(dict) != n)
        return 0;
    if (PyODict_Check(dict)) {
        PyObject *iterator = PyODict_Type.tp_iter(dict), *key;
        int same = iterator == NULL ? -1 : 1;
        while (same == 1 && i < n && (key = PyIter_Next(iterator)) != NULL) {
            same = same_constant(key, PyTuple_GET_ITEM(keys, i++));
            Py_DECREF(key);
        }
        Py_XDECREF(iterator);
        return PyErr_Occurred() ? -1 : same == 1 && i == n;
    }
    for (PyObject *key, *value; i < n && PyDict_Next(dict, &position, &key, &value); i++) {
        Py_INCREF(key);
        int same = same_constant(key, PyTuple_GET_ITEM(keys, i));
        Py_DECREF(key);
        if (same != 1)
            return same;
    }
    return i == n;
}

static int has_key(PyObject *container, PyObject *key, int wanted)
{
    int has = PyDict_Check(container)     ? PyDict_Contains(container, key)
              : PyAnySet_Check(container) ? PySet_Contains(container, key)
                                          : -2;
    return has == -2 ? 0 : has < 0 ? -1 : has == wanted;
}

/* `alike` of check/values.py; -1 with an error. */
static int alike(PyObject *a, PyObject *b)
{
    if (a == b)
        return 1;
    if (Py_TYPE(a) != Py_TYPE(b))
        return 0;
    if (PyTuple_CheckExact(a)) {
        Py_ssize_t n = PyTuple_GET_SIZE(a);
        int same = PyTuple_GET_SIZE(b) == n;
        for (Py_ssize_t i = 0; same == 1 && i < n; i++)
            same = alike(PyTuple_GET_ITEM(a, i), PyTuple_GET_ITEM(b, i));
        return same;
    }
    if (PyDict_CheckExact(a)) {
        Py_ssize_t position = 0;
        int same = PyDict_GET_SIZE(a) == PyDict_GET_SIZE(b);
        for (PyObject *key, *value; same == 1 && PyDict_Next(a, &position, &key, &value);) {
            PyObject *other = PyDict_GetItemWithError(b, key);
            same = other != NULL ? alike(value, other) : PyErr_Occurred() ? -1 : 0;
        }
        return same;
    }
    bool constant = PyLong_CheckExact(a) || PyFloat_CheckExact(a) || PyComplex_CheckExact(a) || PyUnicode_CheckExact(a) ||
                    PyBytes_CheckExact(a);
    return constant ? same_constant(a, b) : 0;
}

static int same_function(PyObject *value, PyObject *state)
{
    if (!PyFunction_Check(value))
        return 0;
    PyFunctionObject *f = (PyFunctionObject *)value;
    PyObject *defaults = f->func_defaults ? f->func_defaults : Py_None;
    PyObject *kwdefaults = f->func_kwdefaults ? f->func_kwdefaults : Py_None;
    if (f->func_code != PyTuple_GET_ITEM(state, 0))
        return 0;
    int same = alike(defaults, PyTuple_GET_ITEM(state, 1));
    return same == 1 ? alike(kwdefaults, PyTuple_GET_ITEM(state, 2)) : same;
}

/* operand: (class, name, value) or (class, name) when the name is to be absent */
static int same_class_attr(PyObject *operand)
{
    PyObject *expected = PyTuple_GET_SIZE(operand) == 3 ? PyTuple_GET_ITEM(operand, 2) : NULL;
    return _PyType_Lookup((PyTypeObject *)PyTuple_GET_ITEM(operand, 0), PyTuple_GET_ITEM(operand, 1)) == expected;
}

static int all_distinct(PyObject **values, int n)
{
    if (n <= 16) {
        for (int i = 1; i < n; i++)
            for (int j = 0; j < i; j++)
                if (values[i] == values[j])
                    return 0;
        return 1;
    }
    size_t size = 64;
    while (size < (size_t)n * 2)
        size *= 2;
    PyObject **table = PyMem_Calloc(size, sizeof *table);
    if (table == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    int distinct = 1;
    for (int i = 0; i < n && distinct; i++) {
        size_t slot = ((uintptr_t)values[i] >> 4) * 0x9E3779B97F4A7C15u >> 20 & (size - 1);
        while (table[slot] != NULL && table[slot] != values[i])
            slot = (slot + 1) & (size - 1);
        distinct = table[slot] == NULL;
        table[slot] = values[i];
    }
    PyMem_Free(table);
    return distinct;
}

static int truth(PyObject *result)
{
    if (result == NULL)
        return -1;
    int holds = PyObject_IsTrue(result);
    Py_DECREF(result);
    return holds;
}

/* A check of one value (NULL only for an absent dict): 1, 0, or -1 with an error. */
static int check_value(const Check *check, PyObject *value)
{
    PyObject *operand = check->operand;
    if (value == NULL)
        return check->kind == CHECK_ABSENT;
    switch (check->kind) {
    case CHECK_TYPE:
        return (PyObject *)Py_TYPE(value) == operand;
    case CHECK_IS:
        return value == operand;
    case CHECK_EQUALS:
        return same_constant(value, operand);
    case CHECK_LENGTH: {
        Py_ssize_t n = PyObject_Size(value);
        return n < 0 ? -1 : n == PyLong_AsSsize_t(operand);
    }
    case CHECK_KEYS:
        return same_keys(value, operand);
    case CHECK_HAS:
        return has_key(value, operand, 1);
    case CHECK_LACKS:
    case CHECK_ABSENT:
        return has_key(value, operand, 0);
    case CHECK_FUNCTION:
        return same_function(value, operand);
    case CHECK_TENSOR:
        return tensor_matches(value, check->spec);
    case CHECK_SHAPED:
        return shaped_matches(value, check->spec);
    case CHECK_INT: {
        int overflow = 0;
        return PyLong_CheckExact(value) && PyLong_AsLongLongAndOverflow(value, &overflow) > LLONG_MIN && overflow == 0;
    }
    case CHECK_CONSTANT:
    case CHECK_TEST:
        return truth(PyObject_CallOneArg(operand, value));
    default:
        Py_UNREACHABLE();
    }
}

/* Calls the operand's function with the sizes, strides and numbers that it names; the nodes of tensors come after the
   checks that make sure of their layout. */
static int check_symbols(PyObject *operand, PyObject **values)
{
    Py_ssize_t n = PyTuple_GET_SIZE(operand) - 1, have = 0;
    PyObject *few[32], **numbers = few;
    if (n > 32 && (numbers = PyMem_Malloc(n * sizeof *numbers)) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (; have < n; have++) {
        PyObject *read = PyTuple_GET_ITEM(operand, have + 1);
        PyObject *value = values[PyLong_AsSsize_t(PyTuple_GET_ITEM(read, 0))];
        if (value == NULL || (numbers[have] = read_symbol(value, (Read)PyLong_AsLong(PyTuple_GET_ITEM(read, 1)),
                                                          PyLong_AsSsize_t(PyTuple_GET_ITEM(read, 2)))) == NULL)
            break;
    }
    int holds = have < n ? (PyErr_Occurred() ? -1 : 0)
                         : truth(PyObject_Vectorcall(PyTuple_GET_ITEM(operand, 0), numbers, n, NULL));
    for (Py_ssize_t i = 0; i < have; i++)
        Py_DECREF(numbers[i]);
    if (numbers != few)
        PyMem_Free(numbers);
    return holds;
}

/* A check of several values, or of none. */
static int check_loose(const Check *check, PyObject **values, Call *call)
{
    switch (check->kind) {
    case CHECK_CLASS:
        return same_class_attr(check->operand);
    case CHECK_SAME:
        return values[0] == values[1];
    case CHECK_DISTINCT:
        return all_distinct(values, check->count);
    case CHECK_STATE:
        return state_matches(check->spec);
    case CHECK_SYMBOLS:
        return check_symbols(check->operand, values);
    case CHECK_CALL: {
        PyObject *tuple = call_tuple(call);
        return tuple == NULL ? -1 : truth(PyObject_CallOneArg(check->operand, tuple));
    }
    default:
        Py_UNREACHABLE();
    }
}

static int walk(Guards *self, const Node *node, PyObject *base, Call *call)
{
    PyObject *value = fetch(node, base, call);
    if (value == NULL && (node->kind != FETCH_DICT || PyErr_Occurred()))
        return PyErr_Occurred() ? -1 : 0;
    if (call->sealed != NULL && call->sealed[node - self->nodes] != NULL) {
        Py_XDECREF(value);
        return value == call->sealed[node - self->nodes];
    }
    int holds = 1;
    for (int i = 0; holds == 1 && i < node->check_count; i++)
        holds = check_value(&self->checks[self->placed[node->first_check + i]], value);
    for (int i = 0; holds == 1 && i < node->child_count; i++)
        holds = walk(self, &self->nodes[self->children[node->first_child + i]], value, call);
    int place = register_of(self, call, (int)(node - self->nodes));
    if (place >= 0)
        call->registers[place] = value;
    else
        Py_XDECREF(value);
    return holds;
}

static int check_relation(Guards *self, const Check *check, Call *call)
{
    PyObject *few[16], **values = few;
    if (check->count > 16 && (values = PyMem_Malloc(check->count * sizeof *values)) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int i = 0; i < check->count; i++)
        values[i] = call->registers[register_of(self, call, check->nodes[i])];
    int holds = check_loose(check, values, call);
    if (values != few)
        PyMem_Free(values);
    return holds;
}

#endif
