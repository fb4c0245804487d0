/* Seal: the part of a guard tree that hangs on pinned objects, flattened to words of memory that must not have changed.

   A pinned object is a constant of the tree or a value with an identity check. What is reached from it through instance
   dicts, dict items, cells and tuples stays the same object as long as a few words do: the version of each dict, the
   slot of each instance dict, the contents of each cell. Each word is read before what it vouches for is checked, and
   every object whose memory is read is kept alive. When a word has changed, its node alone is looked at again. */
#ifndef KILN_HOOK_SEAL_H
#define KILN_HOOK_SEAL_H

#include "_hook_exchange.h"
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
    PyObject **table;
    size_t mask;
    VECTOR(int) strangers; /* the other nodes */
} Crowd;

struct Seal {
    int users;
    PyObject **values; /* by node: a strong reference, or NULL where the node is not sealed */
    char *marks;       /* by node */
    int *places;       /* by node: see Call */
    int register_count;
    VECTOR(Word) words;
    VECTOR(int) owners; /* by word: the node to look at again */
    VECTOR(Word) versions; /* of dicts, and the sizes of those that nothing else is asked of */
    VECTOR(int) version_owners;
    VECTOR(PyObject *) dicts; /* that have a word: borrowed from the values */
    uint64_t epoch;           /* of all dicts when these words were last right */
    VECTOR(Word) links;       /* types of objects, and where they keep their dicts: compared in a new exchange epoch */
    VECTOR(int) link_owners;
    uint64_t link_epoch;      /* of exchanges when these words were last right */
    VECTOR(Tag) tags;
    VECTOR(PinnedTensor) tensors;
    VECTOR(const Check *) tensor_checks;
    int free_tensors; /* these come first; the others are values of dicts */
    int turn;         /* which tensors a sample takes next */
    VECTOR(int) lists; /* nodes that are lists */
    VECTOR(int) roots; /* nodes that hang on the call alone */
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
    for (int i = 0; i < seal->crowds.count; i++) {
        PyMem_Free(seal->crowds.items[i].table);
        PyMem_Free(seal->crowds.items[i].strangers.items);
    }
    PyMem_Free(seal->values);
    PyMem_Free(seal->marks);
    PyMem_Free(seal->places);
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
    PyMem_Free(seal->roots.items);
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

/* A word that changes only with a new exchange epoch, where such changes are seen. */
static int add_link(Seal *seal, int owner, const void *at, bool seen)
{
    if (!seen)
        return add_word(seal, owner, at);
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
    return add_link(seal, owner, &value->ob_type, class_exchange_is_seen());
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

#endif
