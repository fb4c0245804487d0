/* Guards: conditions on the bound arguments of a call, as a Python object. */
#ifndef KILN_HOOK_GUARDS_H
#define KILN_HOOK_GUARDS_H

#include "_hook_pinned.h"

/* An ordinary exception in a guard means that it does not hold; others (KeyboardInterrupt) pass on. */
static int settle(int holds)
{
    if (holds < 0 && PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear();
        return 0;
    }
    return holds;
}

/* A check with registers for the values of relations: they are released afterwards. */
static int with_registers(Guards *self, Call *call, int count, int (*check)(Guards *, Call *))
{
    PyObject *few[32];
    call->registers = count <= 32 ? few : PyMem_Malloc(count * sizeof(PyObject *));
    if (call->registers == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    memset(call->registers, 0, count * sizeof(PyObject *));
    int holds = check(self, call);
    for (int i = 0; i < count; i++)
        Py_XDECREF(call->registers[i]);
    if (call->registers != few)
        PyMem_Free(call->registers);
    return holds;
}

/* The whole tree, without a seal; leaves one when all guards hold. */
static int check_open(Guards *self, Call *call)
{
    int holds = 1;
    for (int i = 0; holds == 1 && i < self->root_count; i++)
        holds = walk(self, &self->nodes[self->roots[i]], NULL, call);
    for (int i = 0; holds == 1 && i < self->loose_count; i++)
        holds = check_relation(self, &self->checks[self->loose[i]], call);
    if (holds == 1 && self->seal == NULL && self->waited++ >= self->restless) {
        self->waited = 0;
        self->seal = seal_make(self);
    }
    return holds;
}

static __thread int paused; /* Python frames that start meanwhile run as they are */

/* Whether all guards hold: 1, 0, or -1 with an error. */
static int guards_check(Guards *self, PyObject *const *argv, Py_ssize_t argc)
{
    Call call = {.argv = argv, .argc = argc};
    if (self->cleared)
        return 0;
    paused++; /* a guard that reads an attribute may run the program's own __getattribute__ */
    int holds = self->seal == NULL ? BROKEN : with_registers(self, &call, self->seal->register_count, check_sealed);
    if (holds == BROKEN)
        holds = with_registers(self, &call, self->register_count, check_open);
    paused--;
    holds = settle(holds);
    Py_XDECREF(call.tuple);
    return holds;
}

static PyObject *Guards_check(Guards *self, PyObject *argv)
{
    if (!PyTuple_Check(argv))
        return PyErr_Format(PyExc_TypeError, "check() takes a tuple of arguments, not %s", Py_TYPE(argv)->tp_name);
    int holds = guards_check(self, ((PyTupleObject *)argv)->ob_item, PyTuple_GET_SIZE(argv));
    return holds < 0 ? NULL : PyBool_FromLong(holds);
}

static int Guards_clear(Guards *self)
{
    self->cleared = true;
    seal_drop(self);
    for (int i = 0; i < self->node_count; i++)
        Py_CLEAR(self->nodes[i].operand);
    for (int i = 0; i < self->check_count; i++)
        Py_CLEAR(self->checks[i].operand);
    return 0;
}

static int Guards_traverse(Guards *self, visitproc visit, void *arg)
{
    for (int i = 0; i < self->node_count; i++) {
        Py_VISIT(self->nodes[i].operand);
        if (self->seal != NULL)
            Py_VISIT(self->seal->values[i]);
    }
    for (int i = 0; i < self->check_count; i++)
        Py_VISIT(self->checks[i].operand);
    return 0;
}

static void Guards_dealloc(Guards *self)
{
    PyObject_GC_UnTrack(self);
    Guards_clear(self);
    for (int i = 0; i < self->check_count; i++) {
        PyMem_Free(self->checks[i].nodes);
        PyMem_Free(self->checks[i].spec);
    }
    PyMem_Free(self->nodes);
    PyMem_Free(self->checks);
    PyMem_Free(self->placed);
    PyMem_Free(self->children);
    PyMem_Free(self->roots);
    PyMem_Free(self->loose);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int read_nodes(Guards *self, PyObject *nodes)
{
    for (int i = 0; i < (int)PyList_GET_SIZE(nodes); i++) {
        Node *node = &self->nodes[i];
        int kind;
        PyObject *operand;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(nodes, i), "iiO", &node->parent, &kind, &operand))
            return -1;
        if (node->parent >= i || kind < 0 || kind > FETCH_CALL) {
            PyErr_SetString(PyExc_ValueError, "a node's parent comes before it");
            return -1;
        }
        node->kind = kind;
        node->register_ = -1;
        node->index = -1;
        node->operand = Py_NewRef(operand);
        self->node_count = i + 1;
        if (PyLong_CheckExact(operand) && kind != FETCH_CONST) {
            node->index = PyLong_AsSsize_t(operand);
            if (node->index == -1 && PyErr_Occurred())
                PyErr_Clear();
        }
    }
    return 0;
}

static bool symbols_operand(PyObject *operand, int nodes)
{
    bool fits = PyTuple_Check(operand) && PyTuple_GET_SIZE(operand) > 0;
    for (Py_ssize_t i = 1; fits && i < PyTuple_GET_SIZE(operand); i++) {
        int index, what, dim;
        fits = PyTuple_Check(PyTuple_GET_ITEM(operand, i)) &&
               PyArg_ParseTuple(PyTuple_GET_ITEM(operand, i), "iii", &index, &what, &dim) && index >= 0 &&
               index < nodes && what >= READ_SIZE && what <= READ_VALUE && dim >= 0 && (what == READ_VALUE || layout.ready);
    }
    if (!fits && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "symbols are read as (index of a node, what, dimension)");
    return fits;
}

static int read_checks(Guards *self, PyObject *checks)
{
    for (int i = 0; i < (int)PyList_GET_SIZE(checks); i++) {
        Check *check = &self->checks[i];
        int kind;
        PyObject *nodes, *operand;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(checks, i), "iO!O", &kind, &PyTuple_Type, &nodes, &operand))
            return -1;
        int n = (int)PyTuple_GET_SIZE(nodes);
        if (kind < 0 || kind > LAST_CHECK || (kind <= LAST_OF_ONE && n != 1)) {
            PyErr_SetString(PyExc_ValueError, "no such check, or not with so many nodes");
            return -1;
        }
        check->nodes = PyMem_Calloc(n + 1, sizeof(int));
        if (check->nodes == NULL)
            return PyErr_NoMemory(), -1;
        check->kind = kind;
        check->count = n;
        check->operand = Py_NewRef(operand);
        self->check_count = i + 1;
        if (kind == CHECK_SYMBOLS && !symbols_operand(operand, n))
            return -1;
        if ((kind == CHECK_TENSOR && (check->spec = tensor_spec(operand)) == NULL) ||
            (kind == CHECK_SHAPED && (check->spec = shaped_spec(operand)) == NULL) ||
            (kind == CHECK_STATE && (check->spec = state_spec(operand)) == NULL))
            return -1;
        bool single = kind <= LAST_OF_ONE;
        for (int j = 0; j < n; j++) {
            long number = PyLong_AsLong(PyTuple_GET_ITEM(nodes, j));
            if (number < 0 || number >= self->node_count) {
                PyErr_SetString(PyExc_ValueError, "a check names a node that is not there");
                return -1;
            }
            check->nodes[j] = (int)number;
            if (!single && self->nodes[number].register_ < 0)
                self->nodes[number].register_ = self->register_count++;
        }
        if (single)
            self->nodes[check->nodes[0]].check_count++;
        else
            self->loose[self->loose_count++] = i;
    }
    return 0;
}

/* Lays children and checks out node by node. */
static void place(Guards *self)
{
    int checks = 0, children = 0;
    for (int i = 0; i < self->node_count; i++)
        if (self->nodes[i].parent >= 0)
            self->nodes[self->nodes[i].parent].child_count++;
        else
            self->roots[self->root_count++] = i;
    for (int i = 0; i < self->node_count; i++) {
        Node *node = &self->nodes[i];
        node->first_check = checks;
        node->first_child = children;
        checks += node->check_count;
        children += node->child_count;
        node->check_count = node->child_count = 0;
    }
    for (int i = 0; i < self->node_count; i++)
        if (self->nodes[i].parent >= 0) {
            Node *parent = &self->nodes[self->nodes[i].parent];
            self->children[parent->first_child + parent->child_count++] = i;
        }
    for (int i = 0; i < self->check_count; i++) {
        if (self->checks[i].kind <= LAST_OF_ONE) {
            Node *node = &self->nodes[self->checks[i].nodes[0]];
            self->placed[node->first_check + node->check_count++] = i;
        }
    }
}

static PyObject *Guards_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"nodes", "checks", "settled", NULL};
    PyObject *nodes, *checks;
    int settled = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!|p:Guards", names, &PyList_Type, &nodes, &PyList_Type, &checks,
                                     &settled))
        return NULL;
    Guards *self = (Guards *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->settled = settled;
    size_t n = PyList_GET_SIZE(nodes) + 1, m = PyList_GET_SIZE(checks) + 1;
    self->nodes = PyMem_Calloc(n, sizeof(Node));
    self->checks = PyMem_Calloc(m, sizeof(Check));
    self->placed = PyMem_Calloc(m, sizeof(int));
    self->loose = PyMem_Calloc(m, sizeof(int));
    self->children = PyMem_Calloc(n, sizeof(int));
    self->roots = PyMem_Calloc(n, sizeof(int));
    if (!self->nodes || !self->checks || !self->placed || !self->loose || !self->children || !self->roots)
        PyErr_NoMemory();
    else if (read_nodes(self, nodes) == 0 && read_checks(self, checks) == 0) {
        place(self);
        return (PyObject *)self;
    }
    Py_DECREF(self);
    return NULL;
}

static PyObject *Guards_sealed(Guards *self, void *unused)
{
    const Seal *s = self->seal;
    if (s == NULL)
        Py_RETURN_NONE;
    return Py_BuildValue("{sisisisisisisisi}", "dicts", s->versions.count, "links", s->links.count, "words", s->words.count, "classes", s->tags.count, "tensors",
                         s->tensors.count, "lists", s->lists.count, "fetches", s->live.count, "checks",
                         s->tests.count + s->loose.count);
}

static PyGetSetDef Guards_getset[] = {
    {"sealed", (getter)Guards_sealed, NULL, "How much is compared as plain memory, and what is left; None before.", NULL},
    {NULL},
};

static PyMethodDef Guards_methods[] = {
    {"check", (PyCFunction)Guards_check, METH_O, "Whether all guards hold on a tuple of bound arguments."},
    {NULL},
};

static PyTypeObject Guards_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "kiln._hook.Guards",
    .tp_basicsize = sizeof(Guards),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "Guards(nodes, checks, settled=False): conditions on the bound arguments of a call.",
    .tp_new = Guards_new,
    .tp_dealloc = (destructor)Guards_dealloc,
    .tp_traverse = (traverseproc)Guards_traverse,
    .tp_clear = (inquiry)Guards_clear,
    .tp_methods = Guards_methods,
    .tp_getset = Guards_getset,
};

#endif
