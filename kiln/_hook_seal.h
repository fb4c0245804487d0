/* Seal: the part of a guard tree that hangs on pinned objects, flattened to words of memory that must not have changed.

   A pinned object is a constant of the tree or a value with an identity check. What is reached from it through instance
   dicts, dict items, cells and tuples stays the same object as long as a few words do: the version of each dict, the
   slot of each instance dict, the contents of each cell. Each word is read before what it vouches for is checked, and
   every object whose memory is read is kept alive. When a word has changed, its node alone is looked at again. */
#ifndef KILN_HOOK_SEAL_H
#define KILN_HOOK_SEAL_H

#include "_hook_tree.h"
#include "_hook_watch.h"

enum { BROKEN = -2 }; /* the seal no longer says anything: walk the tree */

#define VECTOR(type) struct { type *items; int count, capacity; }

typedef uint64_t __attribute__((may_alias)) AnyWord;

typedef struct {
    const AnyWord *at;
    uint64_t want;
} Word;

typedef struct {
    PyTypeObject *type;
    unsigned want;
} Tag;

/* One cache line. */
typedef struct {
    PyObject *object;
    PyTypeObject *type;
    const char *impl, *meta;
    uint64_t kind, keys;
    const int64_t *dims;
    int rank, requires_grad;
} PinnedTensor;

/* A Distinct whose sealed values are in a hash table. */
typedef struct {
    const Check *check;
    PyObject **table;
    size_t mask;
} Crowd;

struct Seal {
    int users;
    PyObject **values; /* by node: a strong reference, or NULL where the node is not sealed */
    char *marks;       /* by node */
    VECTOR(Word) words;
    VECTOR(int) owners; /* by word: the node to look at again */
    VECTOR(Word) versions; /* of dicts, and the sizes of those that nothing else is asked of */
    VECTOR(int) version_owners;
    VECTOR(PyObject *) dicts; /* that have a word: borrowed from the values */
    uint64_t epoch;           /* of all dicts when these words were last right */
    VECTOR(Word) links;       /* types of objects, and where they keep their dicts */
    VECTOR(int) link_owners;
    VECTOR(Tag) tags;
    VECTOR(PinnedTensor) tensors;
    VECTOR(const Check *) tensor_checks;
    int free_tensors; /* these come first; the others are values of dicts */
    int turn;         /* which tensors a sample takes next */
    VECTOR(int) lists; /* nodes that are lists */
    VECTOR(int) live;  /* nodes below sealed ones that must be fetched each time */
    VECTOR(int) tests; /* checks on sealed values that must be made each time */
    VECTOR(int) loose; /* checks of several values or none that must be made each time */
    VECTOR(int) fills; /* sealed nodes that these read */
    VECTOR(Crowd) crowds;
};

enum { VERSIONED = 1, LISTED = 2, TYPED = 4, WORDED = 8, COVERED = 16 };

static int grow(void **items, int *capacity, size_t size)
{
    int more = *capacity ? *capacity * 2 : 8;
    void *bigger = PyMem_Realloc(*items, more * size);
    if (bigger == NULL)
        return -1;
    *items = bigger;
    *capacity = more;
    return 0;
}

#define PUSH(v, ...)                                                                                                 \
    ((v).count == (v).capacity && grow((void **)&(v).items, &(v).capacity, sizeof *(v).items) < 0                    \
         ? -1                                                                                                        \
         : ((v).items[(v).count++] = (__VA_ARGS__), 0))

static void seal_free(Seal *seal, int nodes)
{
    for (int i = 0; i < seal->dicts.count; i++)
        dict_word_done(seal->dicts.items[i]);
    for (int i = 0; i < nodes && seal->values != NULL; i++)
        Py_XDECREF(seal->values[i]);
    for (int i = 0; i < seal->crowds.count; i++)
        PyMem_Free(seal->crowds.items[i].table);
    PyMem_Free(seal->values);
    PyMem_Free(seal->marks);
    PyMem_Free(seal->words.items);
    PyMem_Free(seal->owners.items);
    PyMem_Free(seal->versions.items);
    PyMem_Free(seal->version_owners.items);
    PyMem_Free(seal->dicts.items);
    PyMem_Free(seal->links.items);
    PyMem_Free(seal->link_owners.items);
    PyMem_Free(seal->tags.items);
    PyMem_Free(seal->tensors.items);
    PyMem_Free(seal->tensor_checks.items);
    PyMem_Free(seal->lists.items);
    PyMem_Free(seal->live.items);
    PyMem_Free(seal->tests.items);
    PyMem_Free(seal->loose.items);
    PyMem_Free(seal->fills.items);
    PyMem_Free(seal->crowds.items);
    PyMem_Free(seal);
}

static void seal_release(Guards *self, Seal *seal)
{
    if (--seal->users == 0)
        seal_free(seal, self->node_count);
}

static void seal_drop(Guards *self)
{
    Seal *seal = self->seal;
    self->seal = NULL;
    if (seal != NULL)
        seal_release(self, seal);
}

static int add_word(Seal *seal, int owner, const void *at)
{
    uint64_t now = *(const AnyWord *)at;
    return PUSH(seal->words, (Word){at, now}) < 0 || PUSH(seal->owners, owner) < 0 ? -1 : 0;
}

static int add_link(Seal *seal, int owner, const void *at)
{
    uint64_t now = *(const AnyWord *)at;
    return PUSH(seal->links, (Word){at, now}) < 0 || PUSH(seal->link_owners, owner) < 0 ? -1 : 0;
}

static int add_version(Seal *seal, int owner, PyObject *dict)
{
    if (seal->marks[owner] & VERSIONED)
        return 0;
    const AnyWord *at = dict_own_values(dict) < 0 ? NULL : dict_word(dict);
    if (at == NULL)
        return -1;
    if (PUSH(seal->dicts, dict) < 0) {
        dict_word_done(dict);
        return -1;
    }
    seal->marks[owner] |= VERSIONED | WORDED;
    return PUSH(seal->versions, (Word){at, *at}) < 0 || PUSH(seal->version_owners, owner) < 0 ? -1 : 0;
}

static int add_list(Seal *seal, int owner)
{
    if (seal->marks[owner] & LISTED)
        return 0;
    seal->marks[owner] |= LISTED | WORDED;
    return PUSH(seal->lists, owner);
}

static int add_type(Seal *seal, int owner, PyObject *value)
{
    if (seal->marks[owner] & TYPED || !(PyType_HasFeature(Py_TYPE(value), Py_TPFLAGS_HEAPTYPE) || PyModule_Check(value)))
        return 0;
    seal->marks[owner] |= TYPED | WORDED;
    return add_link(seal, owner, &value->ob_type);
}

/* The version of a class as a word; 1 when it has one, 0 when it cannot have one. */
static int add_tag(Seal *seal, PyTypeObject *type)
{
    for (int i = 0; i < seal->tags.count; i++)
        if (seal->tags.items[i].type == type)
            return 1;
    if (type->tp_version_tag == 0)
        return 0;
    return PUSH(seal->tags, (Tag){type, type->tp_version_tag}) < 0 ? -1 : 1;
}

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
    *failed = add_link(seal, node->parent, slot);
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
    return add_word(seal, number, &f->func_code) < 0 || add_word(seal, number, &f->func_defaults) < 0 ||
                   add_word(seal, number, &f->func_kwdefaults) < 0
               ? -1
               : 0;
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
        if (base != NULL && PUSH(seal->live, number) < 0)
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
    Crowd crowd = {check, NULL, 64};
    while (crowd.mask < (size_t)sealed * 2)
        crowd.mask *= 2;
    if ((crowd.table = PyMem_Calloc(crowd.mask--, sizeof *crowd.table)) == NULL || PUSH(seal->crowds, crowd) < 0) {
        PyMem_Free(crowd.table);
        return -1;
    }
    for (int i = 0; i < check->count; i++) {
        PyObject *value = seal->values[check->nodes[i]];
        if (value == NULL)
            continue;
        size_t slot = crowd_slot(&crowd, value);
        if (crowd.table[slot] != NULL)
            return -1;
        crowd.table[slot] = value;
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

/* A seal of the tree as it is now; NULL (without an error) when it does not hold or memory is short. */
static Seal *seal_make(Guards *self)
{
    Seal *seal = PyMem_Calloc(1, sizeof *seal);
    if (seal == NULL)
        return NULL;
    seal->users = 1;
    seal->epoch = dict_epoch();
    seal->values = PyMem_Calloc(self->node_count + 1, sizeof *seal->values);
    seal->marks = PyMem_Calloc(self->node_count + 1, 1);
    int failed = seal->values == NULL || seal->marks == NULL ? -1 : 0;
    for (int i = 0; failed == 0 && i < self->node_count; i++)
        failed = seal_node(self, seal, i);
    for (int i = 0; failed == 0 && i < self->loose_count; i++)
        failed = seal_loose(self, seal, self->loose[i]);
    if (failed == 0)
        return seal;
    PyErr_Clear();
    seal_free(seal, self->node_count);
    return NULL;
}

#endif
