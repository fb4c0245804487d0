/* Making a seal: which words vouch for what a guard tree reads from pinned objects. */
#ifndef KILN_HOOK_SEALING_H
#define KILN_HOOK_SEALING_H

#include "_hook_seal.h"

/* A member of `__slots__`: the address of its value in the object, or NULL when the attribute is anything else. */
static PyObject **slot_address(PyObject *base, PyObject *name)
{
    PyTypeObject *type = Py_TYPE(base);
    PyObject *descriptor = type->tp_getattro == PyObject_GenericGetAttr ? _PyType_Lookup(type, name) : NULL;
    if (descriptor == NULL || Py_TYPE(descriptor) != &PyMemberDescr_Type)
        return NULL;
    const PyMemberDef *member = ((PyMemberDescrObject *)descriptor)->d_member;
    return member->type == T_OBJECT_EX ? (PyObject **)((char *)base + member->offset) : NULL;
}

static PyObject *sealed_attr(Seal *seal, const Node *node, PyObject *base, int *failed)
{
    if (PyModule_CheckExact(base)) {
        PyObject *dict = PyModule_GetDict(base);
        *failed = _PyType_Lookup(&PyModule_Type, node->operand) == NULL ? add_version(seal, node->parent, dict) : 1;
        return *failed ? NULL : PyDict_GetItemWithError(dict, node->operand);
    }
    PyObject **slot = slot_address(base, node->operand);
    if (slot == NULL || *slot == NULL || add_tag(seal, Py_TYPE(base)) != 1)
        return NULL;
    *failed = add_type(seal, node->parent, base) || add_word(seal, node->parent, slot);
    seal->marks[node->parent] |= WORDED;
    return *slot;
}

static PyObject *sealed_dict(Seal *seal, const Node *node, PyObject *base, int *failed)
{
    if (PyType_Check(base) || PyModule_Check(base))
        return instance_dict(base);
    if (instance_dict(base) == NULL)
        return NULL;
    PyObject **slot = _PyObject_GetDictPtr(base);
    if (slot == NULL || *slot == NULL)
        return NULL;
    seal->marks[node->parent] |= WORDED;
    *failed = add_link(seal, node->parent, slot, dict_exchange_is_seen(Py_TYPE(base)));
    return *slot;
}

/* The value of a node below a sealed one, borrowed, when a few words vouch for it; else NULL. */
static PyObject *sealed_fetch(Seal *seal, const Node *node, PyObject *base, int *failed)
{
    switch (node->kind) {
    case FETCH_DICT:
        return sealed_dict(seal, node, base, failed);
    case FETCH_ATTR:
        return sealed_attr(seal, node, base, failed);
    case FETCH_KEY:
    case FETCH_ITEM:
        if (PyDict_Check(base)) {
            *failed = add_version(seal, node->parent, base);
            return PyDict_GetItemWithError(base, node->operand);
        }
        if (PyTuple_CheckExact(base) && node->index >= 0 && node->index < PyTuple_GET_SIZE(base))
            return PyTuple_GET_ITEM(base, node->index);
        if (PyList_CheckExact(base) && node->index >= 0 && node->index < PyList_GET_SIZE(base)) {
            *failed = add_list(seal, node->parent);
            return PyList_GET_ITEM(base, node->index);
        }
        return NULL;
    case FETCH_CELL:
        if (!PyCell_Check(base))
            return NULL;
        seal->marks[node->parent] |= WORDED;
        *failed = add_word(seal, node->parent, &((PyCellObject *)base)->ob_ref);
        return PyCell_GET(base);
    case FETCH_CLOSURE: { /* a function never changes its closure */
        PyObject *closure = PyFunction_Check(base) ? PyFunction_GET_CLOSURE(base) : NULL;
        return closure != NULL && node->index < PyTuple_GET_SIZE(closure) ? PyTuple_GET_ITEM(closure, node->index) : NULL;
    }
    default:
        return NULL;
    }
}

static int seal_function(Seal *seal, int number, PyObject *value)
{
    if (!PyFunction_Check(value))
        return -1;
    PyFunctionObject *f = (PyFunctionObject *)value;
    seal->marks[number] |= WORDED;
    if (add_word(seal, number, &f->func_code) < 0 || add_word(seal, number, &f->func_defaults) < 0 ||
        add_word(seal, number, &f->func_kwdefaults) < 0)
        return -1;
    return f->func_kwdefaults != NULL ? add_version(seal, number, f->func_kwdefaults) : 0;
}

static int seal_tensor(Guards *self, Seal *seal, int number, const Check *check, PyObject *value)
{
    const TensorSpec *spec = check->spec;
    if (Py_TYPE(value) != spec->type)
        return -1;
    const char *impl = pointer_at((char *)value, layout.impl);
    seal->marks[number] |= WORDED | TYPED;
    PinnedTensor pinned = {value, spec->type, impl, pointer_at(impl, layout.meta), spec->kind, spec->keys, spec->dims,
                           (int)spec->rank, spec->requires_grad};
    for (int i = 0; i < seal->tensors.count; i++) { /* equal sizes are compared with the same memory */
        PinnedTensor *other = &seal->tensors.items[i];
        if (other->rank == pinned.rank && memcmp(other->dims, pinned.dims, 2 * pinned.rank * sizeof(int64_t)) == 0) {
            pinned.dims = other->dims;
            break;
        }
    }
    if (PUSH(seal->tensors, pinned) < 0 || PUSH(seal->tensor_checks, check) < 0)
        return -1;
    int parent = self->nodes[number].parent;
    if (parent < 0 || seal->values[parent] == NULL || !PyDict_Check(seal->values[parent])) {
        int last = seal->tensors.count - 1, place = seal->free_tensors++;
        PinnedTensor other = seal->tensors.items[place];
        const Check *other_check = seal->tensor_checks.items[place];
        seal->tensors.items[place] = pinned;
        seal->tensor_checks.items[place] = check;
        seal->tensors.items[last] = other;
        seal->tensor_checks.items[last] = other_check;
    }
    return 0;
}

static int seal_length(Seal *seal, const Node *node, int number, int check, PyObject *value)
{
    if (PyDict_CheckExact(value) || PyODict_CheckExact(value)) {
        if (WATCHING || node->child_count > 0)
            return add_version(seal, number, value);
        seal->marks[number] |= WORDED;
        if (seal->marks[number] & VERSIONED)
            return 0;
        const AnyWord *size = (const AnyWord *)&((PyDictObject *)value)->ma_used;
        return PUSH(seal->versions, (Word){size, *size}) < 0 ? -1 : PUSH(seal->version_owners, number);
    }
    if (PyList_CheckExact(value))
        return add_list(seal, number);
    if (PyTuple_CheckExact(value) || PyUnicode_CheckExact(value) || PyBytes_CheckExact(value) ||
        PyFrozenSet_CheckExact(value))
        return 0;
    return PUSH(seal->tests, check);
}

/* Notes what keeps one check of a sealed value true. */
static int seal_check(Guards *self, Seal *seal, int number, int check, PyObject *value)
{
    switch (self->checks[check].kind) {
    case CHECK_TYPE:
        return add_type(seal, number, value);
    case CHECK_LENGTH:
        return seal_length(seal, &self->nodes[number], number, check, value);
    case CHECK_KEYS:
        if (PyODict_Check(value) && PyDict_GET_SIZE(value) > 1) /* move_to_end leaves the version alone */
            return PUSH(seal->tests, check);
        return PyDict_Check(value) ? add_version(seal, number, value) : -1;
    case CHECK_HAS:
    case CHECK_LACKS:
    case CHECK_ABSENT:
        if (PyDict_Check(value))
            return add_version(seal, number, value);
        return PyFrozenSet_CheckExact(value) ? 0 : PUSH(seal->tests, check);
    case CHECK_FUNCTION:
        return seal_function(seal, number, value);
    case CHECK_TENSOR:
        return seal_tensor(self, seal, number, &self->checks[check], value);
    case CHECK_SHAPED:
    case CHECK_TEST:
        return PUSH(seal->tests, check);
    default: /* identity is enough */
        return 0;
    }
}

static const Check *identity_check(Guards *self, const Node *node)
{
    for (int i = 0; i < node->check_count; i++)
        if (self->checks[self->placed[node->first_check + i]].kind == CHECK_IS)
            return &self->checks[self->placed[node->first_check + i]];
    return NULL;
}

static bool has_tensor_check(Guards *self, const Node *node)
{
    for (int i = 0; i < node->check_count; i++)
        if (self->checks[self->placed[node->first_check + i]].kind == CHECK_TENSOR)
            return true;
    return false;
}

static int seal_node(Guards *self, Seal *seal, int number)
{
    const Node *node = &self->nodes[number];
    PyObject *base = node->parent >= 0 ? seal->values[node->parent] : NULL, *value = NULL;
    int failed = 0;
    if (node->kind == FETCH_CONST)
        value = node->operand;
    else if (base != NULL)
        value = sealed_fetch(seal, node, base, &failed);
    if (failed || PyErr_Occurred())
        return -1;
    if (value != NULL)
        seal->marks[number] |= COVERED;
    else {
        const Check *is = identity_check(self, node);
        if (is != NULL)
            value = is->operand;
        if (node->parent < 0 ? PUSH(seal->roots, number) < 0 : base != NULL && PUSH(seal->live, number) < 0)
            return -1;
        if (value == NULL)
            return 0;
    }
    seal->values[number] = Py_NewRef(value);
    if (has_tensor_check(self, node))
        seal->marks[number] |= TYPED;
    for (int i = 0; i < node->check_count; i++) {
        int check = self->placed[node->first_check + i];
        if (seal_check(self, seal, number, check, value) < 0 || check_value(&self->checks[check], value) != 1)
            return -1;
    }
    return 0;
}

static size_t crowd_slot(const Crowd *crowd, PyObject *value)
{
    size_t slot = (((uintptr_t)value >> 4) * 0x9E3779B97F4A7C15u >> 20) & crowd->mask;
    while (crowd->table[slot] != NULL && crowd->table[slot] != value)
        slot = (slot + 1) & crowd->mask;
    return slot;
}

static int seal_crowd(Seal *seal, const Check *check, int sealed)
{
    if (PUSH(seal->crowds, (Crowd){.mask = 64}) < 0)
        return -1;
    Crowd *crowd = &seal->crowds.items[seal->crowds.count - 1];
    while (crowd->mask < (size_t)sealed * 2)
        crowd->mask *= 2;
    if ((crowd->table = PyMem_Calloc(crowd->mask--, sizeof *crowd->table)) == NULL)
        return -1;
    for (int i = 0; i < check->count; i++) {
        PyObject *value = seal->values[check->nodes[i]];
        if (value == NULL) {
            if (PUSH(crowd->strangers, check->nodes[i]) < 0)
                return -1;
            continue;
        }
        size_t slot = crowd_slot(crowd, value);
        if (crowd->table[slot] != NULL)
            return -1;
        crowd->table[slot] = value;
    }
    return 0;
}

static int seal_loose(Guards *self, Seal *seal, int number)
{
    const Check *check = &self->checks[number];
    if (check->kind == CHECK_CLASS) {
        PyTypeObject *type = (PyTypeObject *)PyTuple_GET_ITEM(check->operand, 0);
        same_class_attr(check->operand); /* gives the class a version where it has none */
        int tagged = add_tag(seal, type);
        if (tagged < 0 || same_class_attr(check->operand) != 1)
            return -1;
        return tagged ? 0 : PUSH(seal->loose, number);
    }
    int sealed = 0;
    for (int i = 0; i < check->count; i++)
        sealed += seal->values[check->nodes[i]] != NULL;
    if (check->kind == CHECK_DISTINCT && sealed > 8)
        return seal_crowd(seal, check, sealed);
    for (int i = 0; i < check->count; i++)
        if (seal->values[check->nodes[i]] != NULL && PUSH(seal->fills, check->nodes[i]) < 0)
            return -1;
    return PUSH(seal->loose, number);
}

/* Only the values that relations still compare need registers. */
static void seal_registers(Guards *self, Seal *seal)
{
    for (int i = 0; i < self->node_count; i++)
        seal->places[i] = self->nodes[i].register_ >= 0 && seal->values[i] == NULL ? seal->register_count++ : -1;
    for (int i = 0; i < seal->fills.count; i++)
        if (seal->places[seal->fills.items[i]] < 0)
            seal->places[seal->fills.items[i]] = seal->register_count++;
}

/* A seal of the tree as it is now; NULL (without an error) when it does not hold or memory is short. */
static Seal *seal_make(Guards *self)
{
    Seal *seal = PyMem_Calloc(1, sizeof *seal);
    if (seal == NULL)
        return NULL;
    seal->users = 1;
    seal->epoch = dict_epoch();
    seal->link_epoch = exchange_epoch();
    seal->values = PyMem_Calloc(self->node_count + 1, sizeof *seal->values);
    seal->marks = PyMem_Calloc(self->node_count + 1, 1);
    seal->places = PyMem_Calloc(self->node_count + 1, sizeof *seal->places);
    int failed = seal->values == NULL || seal->marks == NULL || seal->places == NULL ? -1 : 0;
    for (int i = 0; failed == 0 && i < self->node_count; i++)
        failed = seal_node(self, seal, i);
    for (int i = 0; failed == 0 && i < self->loose_count; i++)
        failed = seal_loose(self, seal, self->loose[i]);
    if (failed == 0) {
        seal_registers(self, seal);
        return seal;
    }
    PyErr_Clear();
    seal_free(seal, self->node_count);
    return NULL;
}

#endif
