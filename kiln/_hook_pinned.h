/* Checking through a seal: the words first, then what they do not cover. */
#ifndef KILN_HOOK_PINNED_H
#define KILN_HOOK_PINNED_H

#include "_hook_sealing.h"

static inline bool words_same(const Word *words, int count)
{
    uint64_t differ = 0;
    for (const Word *word = words, *end = words + count; word < end; word++)
        differ |= *word->at ^ word->want;
    return differ == 0;
}

static inline bool tags_same(const Tag *tags, int count)
{
    unsigned differ = 0;
    for (const Tag *tag = tags, *end = tags + count; tag < end; tag++)
        differ |= tag->type->tp_version_tag ^ tag->want;
    return differ == 0;
}

enum { AHEAD = 6 };

#define ALWAYS_INLINE inline __attribute__((always_inline))

static ALWAYS_INLINE void pinned_prefetch(const PinnedTensor *t, Layout at)
{
    __builtin_prefetch(t->object);
    __builtin_prefetch(t->impl + at.meta);
    __builtin_prefetch(t->impl + at.dims + 48);
    __builtin_prefetch(t->impl + at.kind);
    if (t->meta != NULL)
        __builtin_prefetch(t->meta + at.requires_grad);
}

static ALWAYS_INLINE bool pinned_same(const PinnedTensor *t, Layout at)
{
    if (pointer_at((char *)t->object, at.impl) != t->impl || pointer_at(t->impl, at.meta) != t->meta)
        return false;
    uint64_t differ = ((uintptr_t)Py_TYPE(t->object) ^ (uintptr_t)t->type) |
                      ((word_at(t->impl, at.kind) & at.kind_mask) ^ t->kind) | (word_at(t->impl, at.keys) ^ t->keys) |
                      (word_at(t->impl, at.dims) ^ (uint64_t)t->rank);
    const int sizes = at.dims + 8, strides = sizes + 8 * at.inline_dims;
    const int64_t *dims = t->dims;
    if (t->rank == 2)
        differ |= (word_at(t->impl, sizes) ^ dims[0]) | (word_at(t->impl, sizes + 8) ^ dims[1]) |
                  (word_at(t->impl, strides) ^ dims[2]) | (word_at(t->impl, strides + 8) ^ dims[3]);
    else if (t->rank == 1)
        differ |= (word_at(t->impl, sizes) ^ dims[0]) | (word_at(t->impl, strides) ^ dims[1]);
    else
        differ |= !same_dims(t->impl, dims, t->rank);
    bool requires_grad = t->meta != NULL && own_requires_grad(t->meta, at);
    if (!requires_grad && t->meta != NULL && t->meta[at.view])
        return false; /* a view: its base has a say, and the exact check asks it */
    return (differ | (requires_grad ^ (t->requires_grad != 0))) == 0;
}

static int mend_tensor(Seal *seal, int number)
{
    PinnedTensor *t = &seal->tensors.items[number];
    if (!tensor_matches(t->object, seal->tensor_checks.items[number]->spec))
        return 0;
    t->impl = pointer_at((char *)t->object, layout.impl);
    t->meta = pointer_at(t->impl, layout.meta);
    return 1;
}

static ALWAYS_INLINE int check_tensors(Seal *seal, int first, int n, Layout at)
{
    const PinnedTensor *tensors = seal->tensors.items;
    for (int i = first; i < n; i++) {
        if (i + AHEAD < n)
            pinned_prefetch(&tensors[i + AHEAD], at);
        if (!pinned_same(&tensors[i], at) && !mend_tensor(seal, i))
            return 0;
    }
    return 1;
}

/* Whether a sealed node is still what its path leads to. */
static bool is_current(Guards *self, Seal *seal, int number)
{
    Call call = {0};
    bool same = true;
    for (const Node *node = &self->nodes[number]; same && node->parent >= 0 && seal->values[node->parent] != NULL;
         number = node->parent, node = &self->nodes[number]) {
        PyObject *base = Py_NewRef(seal->values[node->parent]);
        PyObject *now = fetch(node, base, &call);
        if (now == NULL)
            PyErr_Clear();
        same = now == seal->values[number];
        Py_XDECREF(now);
        Py_DECREF(base);
    }
    return same;
}

/* Looks again at what hangs on one node: its own checks, and whether its children are still the same objects. A child
   that is nothing but a constant may have been replaced by another that passes. What fails on a node that is no longer
   what the path leads to says nothing. */
static int look_again(Guards *self, Seal *seal, int number)
{
    const Node *node = &self->nodes[number];
    PyObject *value = Py_NewRef(seal->values[number]);
    Call call = {0};
    int holds = 1;
    for (int i = 0; holds == 1 && i < node->check_count; i++) {
        const Check *check = &self->checks[self->placed[node->first_check + i]];
        if (check->kind != CHECK_TENSOR && check->kind != CHECK_TEST)
            holds = check_value(check, value);
    }
    for (int i = 0; holds == 1 && i < node->child_count; i++) {
        int child = self->children[node->first_child + i];
        const Node *below = &self->nodes[child];
        if (!(seal->marks[child] & COVERED))
            continue;
        PyObject *now = fetch(below, value, &call);
        if (now == NULL)
            holds = PyErr_Occurred() ? -1 : 0;
        else if (now != seal->values[child]) {
            if (seal->marks[child] & WORDED || below->child_count > 0 || below->register_ >= 0)
                holds = BROKEN;
            for (int j = 0; holds == 1 && j < below->check_count; j++)
                holds = check_value(&self->checks[self->placed[below->first_check + j]], now);
            if (holds == 1) {
                PyObject *old = seal->values[child];
                seal->values[child] = Py_NewRef(now);
                Py_DECREF(old);
            }
        }
        Py_XDECREF(now);
    }
    Py_DECREF(value);
    return holds == 0 && !is_current(self, seal, number) ? BROKEN : holds;
}

static int mend_words(Guards *self, Seal *seal, Word *words, const int *owners, int count)
{
    int holds = 1;
    for (int i = 0; holds == 1 && i < count; i++) {
        uint64_t now = *words[i].at;
        if (now == words[i].want)
            continue;
        holds = look_again(self, seal, owners[i]);
        if (holds == 1)
            words[i].want = now;
    }
    return holds;
}

static int check_words(Guards *self, Seal *seal, Word *words, const int *owners, int count)
{
    return words_same(words, count) ? 1 : mend_words(self, seal, words, owners, count);
}

/* The dicts: 1 also sets *mended when one of them had changed. */
static int check_dicts(Guards *self, Seal *seal, bool *mended)
{
    uint64_t epoch = dict_epoch();
    int holds = 1;
    if (!words_same(seal->versions.items, seal->versions.count)) {
        *mended = true;
        holds = mend_words(self, seal, seal->versions.items, seal->version_owners.items, seal->versions.count);
    }
    if (holds == 1)
        seal->epoch = epoch;
    return holds;
}

/* The classes and dicts of objects. */
static int check_links(Guards *self, Seal *seal)
{
    uint64_t epoch = exchange_epoch();
    int holds = check_words(self, seal, seal->links.items, seal->link_owners.items, seal->links.count);
    if (holds == 1)
        seal->link_epoch = epoch;
    return holds;
}

static int mend_tags(Guards *self, Seal *seal)
{
    for (int i = 0; i < seal->tags.count; i++) {
        Tag *tag = &seal->tags.items[i];
        if (tag->type->tp_version_tag == tag->want)
            continue;
        unsigned now = 0;
        for (int j = 0; j < self->loose_count; j++) {
            const Check *check = &self->checks[self->loose[j]];
            if (check->kind != CHECK_CLASS || PyTuple_GET_ITEM(check->operand, 0) != (PyObject *)tag->type)
                continue;
            if (same_class_attr(check->operand) != 1)
                return 0;
            now = now == 0 ? tag->type->tp_version_tag : now;
        }
        if (now == 0) /* slots hang on this class, or it can have no version any more */
            return BROKEN;
        tag->want = now;
    }
    return 1;
}

static int check_tensor_range(Seal *seal, int first, int end)
{
    return layout_is_usual() ? check_tensors(seal, first, end, usual_layout) : check_tensors(seal, first, end, layout);
}

enum { SAMPLE = 8 };

/* Of the tensors in dicts the first, which changes when a whole model is converted, and others in turn. */
static int check_sample(Seal *seal)
{
    int first = seal->free_tensors, n = seal->tensors.count;
    if (n - first <= SAMPLE)
        return check_tensor_range(seal, 0, n);
    if (seal->turn <= first || seal->turn >= n)
        seal->turn = first + 1;
    int end = seal->turn + SAMPLE < n ? seal->turn + SAMPLE : n;
    int holds = check_tensor_range(seal, 0, first + 1) && check_tensor_range(seal, seal->turn, end);
    seal->turn = end;
    return holds;
}

/* The sealed part: 1, 0, BROKEN, or -1 with an error. Guards that are settled take it that as long as no dict has
   changed, no tensor in a dict has changed in place; they look at a sample of the tensors all the same. */
static int check_pinned(Guards *self, Seal *seal)
{
    bool mended = false;
    int holds = dicts_quiet(seal->epoch) ? 1 : check_dicts(self, seal, &mended);
    bool settled = self->settled && !mended;
    if (holds == 1)
        holds = check_words(self, seal, seal->words.items, seal->owners.items, seal->words.count);
    if (holds == 1 && exchange_epoch() != seal->link_epoch)
        holds = check_links(self, seal);
    if (holds == 1 && !tags_same(seal->tags.items, seal->tags.count))
        holds = mend_tags(self, seal);
    for (int i = 0; holds == 1 && i < seal->lists.count; i++)
        holds = look_again(self, seal, seal->lists.items[i]);
    if (holds == 1 && seal->tensors.count)
        holds = settled ? check_sample(seal) : check_tensor_range(seal, 0, seal->tensors.count);
    return holds;
}

static int check_crowd(const Crowd *crowd, Call *call)
{
    for (int i = 0; i < crowd->strangers.count; i++) {
        PyObject *value = call->registers[call->places[crowd->strangers.items[i]]];
        if (value == NULL)
            continue;
        if (crowd->table[crowd_slot(crowd, value)] != NULL)
            return 0;
        for (int j = 0; j < i; j++)
            if (call->registers[call->places[crowd->strangers.items[j]]] == value)
                return 0;
    }
    return 1;
}

/* What a seal leaves to be done each time. */
static int check_live(Guards *self, Seal *seal, Call *call)
{
    int holds = 1;
    for (int i = 0; holds == 1 && i < seal->live.count; i++) {
        const Node *node = &self->nodes[seal->live.items[i]];
        PyObject *base = Py_NewRef(seal->values[node->parent]);
        holds = walk(self, node, base, call);
        Py_DECREF(base);
    }
    for (int i = 0; holds == 1 && i < seal->tests.count; i++) {
        const Check *check = &self->checks[seal->tests.items[i]];
        PyObject *value = Py_NewRef(seal->values[check->nodes[0]]);
        holds = check_value(check, value);
        Py_DECREF(value);
    }
    for (int i = 0; i < seal->fills.count; i++) {
        PyObject **place = &call->registers[call->places[seal->fills.items[i]]];
        if (*place == NULL)
            *place = Py_NewRef(seal->values[seal->fills.items[i]]);
    }
    for (int i = 0; holds == 1 && i < seal->loose.count; i++)
        holds = check_relation(self, &self->checks[seal->loose.items[i]], call);
    for (int i = 0; holds == 1 && i < seal->crowds.count; i++)
        holds = check_crowd(&seal->crowds.items[i], call);
    return holds;
}

/* All guards, through the seal: arguments first, because they differ most often. Drops the seal when it is broken. */
static int check_sealed(Guards *self, Call *call)
{
    Seal *seal = self->seal;
    int holds = 1;
    seal->users++;
    call->sealed = seal->values;
    call->places = seal->places;
    for (int i = 0; holds == 1 && i < seal->roots.count; i++)
        holds = walk(self, &self->nodes[seal->roots.items[i]], NULL, call);
    if (holds == 1)
        holds = check_pinned(self, seal);
    if (holds == 1)
        holds = check_live(self, seal, call);
    if (holds == BROKEN) {
        self->restless = self->restless < 512 ? self->restless * 2 + 1 : 1023;
        if (self->seal == seal)
            seal_drop(self);
    }
    else if (holds == 1 && self->restless)
        self->restless >>= 1;
    call->sealed = NULL;
    call->places = NULL;
    seal_release(self, seal);
    return holds;
}

#endif
