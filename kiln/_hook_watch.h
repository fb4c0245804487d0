/* A word for each dict that changes whenever the dict does, and one epoch that changes whenever any of them may have.

   On 3.11 the word is the dict's own version, and the epoch is the counter that all versions are drawn from: the
   interpreter keeps it to itself, so it is looked for in its memory. From 3.12 on dicts can be watched: the words and
   the epoch are counters of ours. (3.13 no longer moves the version on every change.) */
#ifndef KILN_HOOK_WATCH_H
#define KILN_HOOK_WATCH_H

#include "_hook_compat.h"
#include <link.h>

/* Makes an instance dict the only place of its values. On 3.13 they may lie in the object, and storing an attribute
   there is seen neither by the dict's version nor by its watchers. Taking out the last item and putting it back gives
   the dict a table of its own; nothing else changes. */
static int dict_own_values(PyObject *dict)
{
#if PY_VERSION_HEX >= 0x030D0000
    if (((PyDictObject *)dict)->ma_values == NULL)
        return 0;
    if (PyDict_GET_SIZE(dict) == 0) {
        PyObject *key = PyLong_FromLong(0); /* not a name: the shared keys of the class stay as they are */
        int failed = key == NULL || PyDict_SetItem(dict, key, Py_None) < 0 || PyDict_DelItem(dict, key) < 0;
        Py_XDECREF(key);
        if (failed)
            return -1;
    }
    else {
        PyObject *item = PyObject_CallMethod(dict, "popitem", NULL);
        if (item == NULL || PyDict_SetItem(dict, PyTuple_GET_ITEM(item, 0), PyTuple_GET_ITEM(item, 1)) < 0) {
            Py_XDECREF(item);
            return -1;
        }
        Py_DECREF(item);
    }
    return ((PyDictObject *)dict)->ma_values == NULL ? 0 : -1;
#else
    return 0;
#endif
}

#if PY_VERSION_HEX < 0x030C0000

enum { WATCHING = 0 };
static const volatile uint64_t *version_counter; /* NULL when it was not found */

static inline bool dicts_quiet(uint64_t since)
{
    return version_counter != NULL && *version_counter == since;
}

static inline uint64_t dict_epoch(void)
{
    return version_counter != NULL ? *version_counter : 0;
}

static const void *dict_word(PyObject *dict)
{
    return &((PyDictObject *)dict)->ma_version_tag;
}

static void dict_word_done(PyObject *dict)
{
}

/* The latest version drawn: that of a dict just made. */
static uint64_t latest_version(void)
{
    PyObject *dict = PyDict_New();
    if (dict == NULL) {
        PyErr_Clear();
        return 0;
    }
    uint64_t version = ((PyDictObject *)dict)->ma_version_tag;
    Py_DECREF(dict);
    return version;
}

enum { CANDIDATES = 32 };

typedef struct {
    const volatile uint64_t *found[CANDIDATES];
    int count;
} Search;

/* Notes where the writable memory of the program or library with CPython's data holds the latest version. */
static int search_segments(struct dl_phdr_info *info, size_t size, void *argument)
{
    Search *search = argument;
    bool here = false;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        uintptr_t start = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr, end = start + info->dlpi_phdr[i].p_memsz;
        here |= info->dlpi_phdr[i].p_type == PT_LOAD && (uintptr_t)&PyDict_Type >= start && (uintptr_t)&PyDict_Type < end;
    }
    for (int i = 0; here && i < info->dlpi_phnum; i++) {
        if (info->dlpi_phdr[i].p_type != PT_LOAD || !(info->dlpi_phdr[i].p_flags & PF_W))
            continue;
        uintptr_t start = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
        uint64_t version = latest_version();
        for (uintptr_t at = (start + 7) & ~(uintptr_t)7; at + 8 <= start + info->dlpi_phdr[i].p_memsz; at += 8)
            if (*(const volatile uint64_t *)at == version && search->count < CANDIDATES)
                search->found[search->count++] = (const volatile uint64_t *)at;
    }
    return here;
}

static int watch_start(void)
{
    Search search = {.count = 0};
    dl_iterate_phdr(search_segments, &search);
    for (int round = 0; round < 16; round++) {
        uint64_t version = 0;
        for (int i = 0; i <= round; i++)
            version = latest_version();
        int left = 0;
        for (int i = 0; i < search.count; i++)
            if (*search.found[i] == version)
                search.found[left++] = search.found[i];
        search.count = left;
    }
    version_counter = search.count == 1 ? search.found[0] : NULL;
    return 0;
}

#else

enum { WATCHING = 1 };

static uint64_t watch_epoch;

static inline bool dicts_quiet(uint64_t since)
{
    return watch_epoch == since;
}

static inline uint64_t dict_epoch(void)
{
    return watch_epoch;
}

typedef struct Watched {
    uint64_t version;
    PyObject *dict; /* borrowed: whoever has the word keeps the dict */
    Py_ssize_t users;
    struct Watched *next;
} Watched;

static int watcher = -1;
static struct {
    Watched **buckets;
    size_t mask, count;
} watched;

static inline size_t watch_bucket(PyObject *dict)
{
    return ((uintptr_t)dict >> 4) * 0x9E3779B97F4A7C15u >> 32 & watched.mask;
}

static Watched *watch_find(PyObject *dict)
{
    Watched *w = watched.buckets == NULL ? NULL : watched.buckets[watch_bucket(dict)];
    while (w != NULL && w->dict != dict)
        w = w->next;
    return w;
}

static int dict_changed(PyDict_WatchEvent event, PyObject *dict, PyObject *key, PyObject *value)
{
    Watched *w = watch_find(dict);
    if (w != NULL) {
        w->version++;
        watch_epoch++;
    }
    return 0;
}

static int watch_grow(void)
{
    size_t size = watched.buckets == NULL ? 256 : (watched.mask + 1) * 2, old = watched.buckets ? watched.mask + 1 : 0;
    Watched **buckets = PyMem_RawCalloc(size, sizeof *buckets), **before = watched.buckets;
    if (buckets == NULL)
        return -1;
    watched.buckets = buckets;
    watched.mask = size - 1;
    for (size_t i = 0; i < old; i++)
        for (Watched *w = before[i], *next; w != NULL; w = next) {
            next = w->next;
            w->next = buckets[watch_bucket(w->dict)];
            buckets[watch_bucket(w->dict)] = w;
        }
    PyMem_RawFree(before);
    return 0;
}

/* The word of a dict, to be given back with dict_word_done; NULL when the dict cannot be watched. */
static const void *dict_word(PyObject *dict)
{
    Watched *w = watch_find(dict);
    if (w == NULL) {
        if (watcher < 0 || ((watched.buckets == NULL || watched.count > watched.mask) && watch_grow() < 0))
            return NULL;
        if ((w = PyMem_RawCalloc(1, sizeof *w)) == NULL)
            return NULL;
        if (PyDict_Watch(watcher, dict) < 0) {
            PyErr_Clear();
            PyMem_RawFree(w);
            return NULL;
        }
        w->dict = dict;
        w->next = watched.buckets[watch_bucket(dict)];
        watched.buckets[watch_bucket(dict)] = w;
        watched.count++;
    }
    w->users++;
    return &w->version;
}

static void dict_word_done(PyObject *dict)
{
    if (watched.buckets == NULL)
        return;
    for (Watched **place = &watched.buckets[watch_bucket(dict)]; *place != NULL; place = &(*place)->next) {
        Watched *w = *place;
        if (w->dict != dict)
            continue;
        if (--w->users == 0) {
            *place = w->next;
            watched.count--;
            PyDict_Unwatch(watcher, dict);
            PyErr_Clear();
            PyMem_RawFree(w);
        }
        return;
    }
}

static int watch_start(void)
{
    watcher = PyDict_AddWatcher(dict_changed);
    PyErr_Clear(); /* without a watcher dicts are looked at each time */
    return 0;
}

#endif

/* dict_epoch() for Python: None where it is not known. */
static PyObject *hook_dict_epoch(PyObject *module, PyObject *unused)
{
    if (!dicts_quiet(dict_epoch()))
        Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(dict_epoch());
}

#endif
