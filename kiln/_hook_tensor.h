/* Tensors and torch's global state read as plain memory, by a layout that check/layout.py found and verified. */
#ifndef KILN_HOOK_TENSOR_H
#define KILN_HOOK_TENSOR_H

#include "_hook_compat.h"
#include <dlfcn.h>

/* Offsets in bytes: `impl` in the Python object, `meta` to `keys` in the TensorImpl, then in its autograd metadata. */
typedef struct {
    int impl, meta, dims, kind, keys;
    int requires_grad, grad_fn, view;
    int inline_dims; /* tensors of more dimensions keep sizes and strides in an array of their own */
    unsigned long long kind_mask;
    int ready;
} Layout;

static Layout layout;

/* The layout of torch 2.13: code that tests many tensors is compiled for it once more, with these as constants. */
static const Layout usual_layout = {16, 24, 56, 160, 168, 128, 48, 130, 5, 0xFFFFFFFFFF, 1};

static inline bool layout_is_usual(void)
{
    const Layout *a = &layout, *b = &usual_layout;
    return a->impl == b->impl && a->meta == b->meta && a->dims == b->dims && a->kind == b->kind && a->keys == b->keys &&
           a->requires_grad == b->requires_grad && a->grad_fn == b->grad_fn && a->view == b->view && a->inline_dims == b->inline_dims &&
           a->kind_mask == b->kind_mask;
}

/* What a tensor must be. `dims` holds the sizes, then the strides. */
typedef struct {
    PyTypeObject *type;
    uint64_t kind; /* dtype and device */
    uint64_t keys;
    int64_t rank;
    int requires_grad;
    int64_t dims[];
} TensorSpec;

static inline uint64_t word_at(const char *base, int offset)
{
    uint64_t word;
    memcpy(&word, base + offset, sizeof word);
    return word;
}

static inline char *pointer_at(const char *base, int offset)
{
    return (char *)(uintptr_t)word_at(base, offset);
}

static inline bool own_requires_grad(const char *meta, Layout at)
{
    return meta[at.requires_grad] || pointer_at(meta, at.grad_fn) != NULL;
}

/* A view follows its base, which may have come to require grad since: torch itself is asked. */
static inline bool tensor_requires_grad(PyObject *object, const char *meta)
{
    if (meta == NULL || own_requires_grad(meta, layout))
        return meta != NULL;
    if (!meta[layout.view])
        return false;
    PyObject *answer = PyObject_GetAttrString(object, "requires_grad");
    if (answer == NULL)
        PyErr_Clear();
    Py_XDECREF(answer);
    return answer == Py_True;
}

static inline bool same_dims(const char *impl, const int64_t *dims, int64_t rank)
{
    if ((int64_t)word_at(impl, layout.dims) != rank)
        return false;
    const int64_t *sizes = (const int64_t *)(impl + layout.dims + 8), *strides = sizes + layout.inline_dims;
    if (rank > layout.inline_dims) {
        sizes = (const int64_t *)pointer_at(impl, layout.dims + 8);
        strides = sizes + rank;
    }
    uint64_t differ = 0;
    for (int64_t i = 0; i < rank; i++)
        differ |= (uint64_t)(sizes[i] ^ dims[i]) | (uint64_t)(strides[i] ^ dims[rank + i]);
    return differ == 0;
}

static inline bool tensor_matches(PyObject *object, const TensorSpec *spec)
{
    if (Py_TYPE(object) != spec->type)
        return false;
    const char *impl = pointer_at((char *)object, layout.impl);
    return impl != NULL && (word_at(impl, layout.kind) & layout.kind_mask) == spec->kind &&
           word_at(impl, layout.keys) == spec->keys && same_dims(impl, spec->dims, spec->rank) &&
           tensor_requires_grad(object, pointer_at(impl, layout.meta)) == spec->requires_grad;
}

/* operand: (type, kind word, keys, requires_grad, sizes, strides) */
static TensorSpec *tensor_spec(PyObject *operand)
{
    PyObject *type, *sizes, *strides;
    unsigned long long kind, keys;
    int requires_grad;
    if (!PyArg_ParseTuple(operand, "O!KKpO!O!", &PyType_Type, &type, &kind, &keys, &requires_grad, &PyTuple_Type,
                          &sizes, &PyTuple_Type, &strides))
        return NULL;
    Py_ssize_t rank = PyTuple_GET_SIZE(sizes);
    if (!layout.ready || PyTuple_GET_SIZE(strides) != rank) {
        PyErr_SetString(PyExc_ValueError, "no tensor layout is set, or sizes and strides differ in number");
        return NULL;
    }
    TensorSpec *spec = PyMem_Malloc(sizeof *spec + 2 * rank * sizeof(int64_t));
    if (spec == NULL)
        return (TensorSpec *)PyErr_NoMemory();
    *spec = (TensorSpec){(PyTypeObject *)type, kind & layout.kind_mask, keys, rank, requires_grad};
    for (Py_ssize_t i = 0; i < rank; i++) {
        spec->dims[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(sizes, i));
        spec->dims[rank + i] = PyLong_AsLongLong(PyTuple_GET_ITEM(strides, i));
    }
    if (PyErr_Occurred()) {
        PyMem_Free(spec);
        return NULL;
    }
    return spec;
}

/* What a tensor must be whose sizes may vary within bounds. `dims` holds the least sizes, the greatest sizes, then the
   strides: a number, FREE_STRIDE, or -1 - j where it is the stride of dimension j times its size. */
enum { FREE_STRIDE = INT32_MIN };

static inline const int64_t *tensor_sizes(const char *impl, int64_t rank)
{
    return rank > layout.inline_dims ? (const int64_t *)pointer_at(impl, layout.dims + 8) : (const int64_t *)(impl + layout.dims + 8);
}

static inline const int64_t *tensor_strides(const char *impl, int64_t rank)
{
    return tensor_sizes(impl, rank) + (rank > layout.inline_dims ? rank : layout.inline_dims);
}

static bool shape_fits(const char *impl, const int64_t *dims, int64_t rank)
{
    if ((int64_t)word_at(impl, layout.dims) != rank)
        return false;
    const int64_t *sizes = tensor_sizes(impl, rank), *strides = tensor_strides(impl, rank);
    for (int64_t i = 0; i < rank; i++) {
        int64_t want = dims[2 * rank + i];
        if (sizes[i] < dims[i] || sizes[i] > dims[rank + i])
            return false;
        if (want < 0 && want != FREE_STRIDE)
            want = sizes[-1 - want] * strides[-1 - want];
        if (want != FREE_STRIDE && strides[i] != want)
            return false;
    }
    return true;
}

static bool shaped_matches(PyObject *object, const TensorSpec *spec)
{
    if (Py_TYPE(object) != spec->type)
        return false;
    const char *impl = pointer_at((char *)object, layout.impl);
    return impl != NULL && (word_at(impl, layout.kind) & layout.kind_mask) == spec->kind &&
           word_at(impl, layout.keys) == spec->keys && shape_fits(impl, spec->dims, spec->rank) &&
           tensor_requires_grad(object, pointer_at(impl, layout.meta)) == spec->requires_grad;
}

/* operand: (type, kind word, keys, requires_grad, least sizes, greatest sizes, strides) */
static TensorSpec *shaped_spec(PyObject *operand)
{
    PyObject *type, *parts[3];
    unsigned long long kind, keys;
    int requires_grad;
    if (!PyArg_ParseTuple(operand, "O!KKpO!O!O!", &PyType_Type, &type, &kind, &keys, &requires_grad, &PyTuple_Type,
                          &parts[0], &PyTuple_Type, &parts[1], &PyTuple_Type, &parts[2]))
        return NULL;
    Py_ssize_t rank = PyTuple_GET_SIZE(parts[0]);
    if (!layout.ready || PyTuple_GET_SIZE(parts[1]) != rank || PyTuple_GET_SIZE(parts[2]) != rank) {
        PyErr_SetString(PyExc_ValueError, "no tensor layout is set, or bounds and strides differ in number");
        return NULL;
    }
    TensorSpec *spec = PyMem_Malloc(sizeof *spec + 3 * rank * sizeof(int64_t));
    if (spec == NULL)
        return (TensorSpec *)PyErr_NoMemory();
    *spec = (TensorSpec){(PyTypeObject *)type, kind & layout.kind_mask, keys, rank, requires_grad};
    for (Py_ssize_t i = 0; i < 3 * rank && !PyErr_Occurred(); i++)
        spec->dims[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(parts[i / rank], i % rank));
    for (Py_ssize_t i = 0; i < rank && !PyErr_Occurred(); i++)
        if (spec->dims[2 * rank + i] < -rank && spec->dims[2 * rank + i] != FREE_STRIDE)
            PyErr_SetString(PyExc_ValueError, "a stride follows a dimension that is not there");
    if (PyErr_Occurred()) {
        PyMem_Free(spec);
        return NULL;
    }
    return spec;
}

typedef enum { READ_SIZE, READ_STRIDE, READ_VALUE } Read;

/* The size or stride of a tensor in one dimension, or the object itself, as a new reference. */
static PyObject *read_symbol(PyObject *object, Read what, Py_ssize_t dim)
{
    if (what == READ_VALUE)
        return Py_NewRef(object);
    const char *impl = pointer_at((char *)object, layout.impl);
    int64_t rank = (int64_t)word_at(impl, layout.dims);
    if (dim >= rank)
        return NULL;
    return PyLong_FromLongLong((what == READ_SIZE ? tensor_sizes : tensor_strides)(impl, rank)[dim]);
}

static PyObject *set_tensor_layout(PyObject *module, PyObject *args)
{
    layout.ready = 0;
    if (args == NULL || PyTuple_GET_SIZE(args) == 0)
        Py_RETURN_NONE;
    if (!PyArg_ParseTuple(args, "iiiiiiiiiK:set_tensor_layout", &layout.impl, &layout.meta, &layout.dims, &layout.kind,
                          &layout.keys, &layout.requires_grad, &layout.grad_fn, &layout.view, &layout.inline_dims,
                          &layout.kind_mask))
        return NULL;
    layout.ready = 1;
    Py_RETURN_NONE;
}

/* The raw words that a layout finds in a tensor: for its verification. */
static PyObject *tensor_words(PyObject *module, PyObject *tensor)
{
    if (!layout.ready) {
        PyErr_SetString(PyExc_RuntimeError, "no tensor layout is set");
        return NULL;
    }
    const char *impl = pointer_at((char *)tensor, layout.impl);
    const char *meta = pointer_at(impl, layout.meta);
    return Py_BuildValue("KKN", (unsigned long long)(word_at(impl, layout.kind) & layout.kind_mask),
                         (unsigned long long)word_at(impl, layout.keys), PyBool_FromLong(tensor_requires_grad(tensor, meta)));
}

/* Functions of libc10 and libtorch that read global state. Those that return the address of thread-local state are
   asked once a thread. */
static struct {
    int ready;
    unsigned char *(*autograd)(void);
    void *library; /* with the thread-local symbol of the dispatch key sets */
    const char *keys_symbol;
    unsigned short (*default_dtype)(void);
    void *context;
    bool (*deterministic)(void *);
    bool (*deterministic_warn_only)(void *);
    int64_t (*function_modes)(void);
    int (*function_state)(void);
    int64_t (*dispatch_modes)(void);
    int8_t (*autocast_dtype)(int8_t);
    bool (*autocast_cache)(void);
    int autograd_offset;
    unsigned char autograd_mask;
    uint64_t included_default, excluded_default;
} torch_state;

typedef struct {
    unsigned long long included, excluded;
    unsigned char autograd;
    unsigned char function_state;
    unsigned short default_dtype;
    unsigned char deterministic; /* 1: on, 2: warn only */
    unsigned char cache;         /* of autocast: 0, 1, or 2 when it does not matter */
    short autocast[2];           /* dtype by device type (cpu, cuda), or -1 when it is off */
} StateSpec;

typedef struct {
    unsigned char *autograd;
    uint64_t *keys;
} ThreadState;

static __thread ThreadState thread_state;

static bool find_thread_state(ThreadState *state)
{
    state->autograd = torch_state.autograd() + torch_state.autograd_offset;
    state->keys = dlsym(torch_state.library, torch_state.keys_symbol);
    return state->keys != NULL;
}

static bool state_matches(const StateSpec *spec)
{
    ThreadState *state = &thread_state;
    if (state->keys == NULL && !find_thread_state(state))
        return false;
    if ((*state->autograd & torch_state.autograd_mask) != spec->autograd || state->keys[0] != spec->included ||
        state->keys[1] != spec->excluded || torch_state.default_dtype() != spec->default_dtype ||
        torch_state.function_modes() != 0 || (torch_state.function_state() & 0xff) != spec->function_state ||
        torch_state.dispatch_modes() != 0)
        return false;
    int deterministic = torch_state.deterministic(torch_state.context) |
                        torch_state.deterministic_warn_only(torch_state.context) << 1;
    if (deterministic != spec->deterministic)
        return false;
    for (int device = 0; device < 2; device++)
        if (spec->autocast[device] >= 0 && torch_state.autocast_dtype(device) != spec->autocast[device])
            return false;
    return spec->cache == 2 || torch_state.autocast_cache() == spec->cache;
}

/* operand: (autograd, included, excluded, default dtype, function state, deterministic, cpu dtype, cuda dtype, cache) */
static StateSpec *state_spec(PyObject *operand)
{
    if (!torch_state.ready) {
        PyErr_SetString(PyExc_ValueError, "the functions that read torch's state are not set");
        return NULL;
    }
    StateSpec *spec = PyMem_Calloc(1, sizeof *spec);
    if (spec == NULL)
        return (StateSpec *)PyErr_NoMemory();
    if (!PyArg_ParseTuple(operand, "bKKHbbhhb", &spec->autograd, &spec->included, &spec->excluded,
                          &spec->default_dtype, &spec->function_state, &spec->deterministic, &spec->autocast[0],
                          &spec->autocast[1], &spec->cache)) {
        PyMem_Free(spec);
        return NULL;
    }
    spec->autograd &= torch_state.autograd_mask;
    spec->included ^= torch_state.included_default;
    spec->excluded ^= torch_state.excluded_default;
    return spec;
}

/* set_state_functions(library, symbol, autograd offset and mask, included default, excluded default, addresses…), or nothing to unset. */
static PyObject *set_state_functions(PyObject *module, PyObject *args)
{
    const char *library, *symbol;
    unsigned long long included, excluded, f[10];
    int offset;
    unsigned char mask;
    torch_state.ready = 0;
    if (args == NULL || PyTuple_GET_SIZE(args) == 0)
        Py_RETURN_NONE;
    if (!PyArg_ParseTuple(args, "ssibKKKKKKKKKKKK:set_state_functions", &library, &symbol, &offset, &mask, &included, &excluded,
                          &f[0], &f[1], &f[2], &f[3], &f[4], &f[5], &f[6], &f[7], &f[8], &f[9]))
        return NULL;
    torch_state.library = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
    torch_state.keys_symbol = strdup(symbol);
    if (torch_state.library == NULL || dlsym(torch_state.library, symbol) == NULL) {
        PyErr_Format(PyExc_LookupError, "%s has no symbol %s", library, symbol);
        return NULL;
    }
    for (int i = 0; i < 10; i++)
        if (f[i] == 0) {
            PyErr_SetString(PyExc_ValueError, "a function's address is 0");
            return NULL;
        }
    torch_state.autograd_offset = offset;
    torch_state.autograd_mask = mask;
    torch_state.included_default = included;
    torch_state.excluded_default = excluded;
    torch_state.autograd = (unsigned char *(*)(void))(uintptr_t)f[0];
    torch_state.default_dtype = (unsigned short (*)(void))(uintptr_t)f[1];
    torch_state.context = ((void *(*)(void))(uintptr_t)f[2])();
    torch_state.deterministic = (bool (*)(void *))(uintptr_t)f[3];
    torch_state.deterministic_warn_only = (bool (*)(void *))(uintptr_t)f[4];
    torch_state.function_modes = (int64_t (*)(void))(uintptr_t)f[5];
    torch_state.function_state = (int (*)(void))(uintptr_t)f[6];
    torch_state.dispatch_modes = (int64_t (*)(void))(uintptr_t)f[7];
    torch_state.autocast_dtype = (int8_t (*)(int8_t))(uintptr_t)f[8];
    torch_state.autocast_cache = (bool (*)(void))(uintptr_t)f[9];
    thread_state = (ThreadState){0};
    torch_state.ready = 1;
    Py_RETURN_NONE;
}

/* (autograd byte, included, excluded, default dtype, function modes, function state, dispatch modes, deterministic,
   cpu autocast dtype, cache) as C reads them: for verification. */
static PyObject *state_words(PyObject *module, PyObject *unused)
{
    if (!torch_state.ready || !find_thread_state(&thread_state)) {
        PyErr_SetString(PyExc_RuntimeError, "the functions that read torch's state are not set");
        return NULL;
    }
    return Py_BuildValue("iKKiLiLiii", *thread_state.autograd, (unsigned long long)thread_state.keys[0],
                         (unsigned long long)thread_state.keys[1], torch_state.default_dtype(),
                         (long long)torch_state.function_modes(), torch_state.function_state() & 0xff,
                         (long long)torch_state.dispatch_modes(),
                         torch_state.deterministic(torch_state.context) |
                             torch_state.deterministic_warn_only(torch_state.context) << 1,
                         torch_state.autocast_dtype(0), torch_state.autocast_cache());
}

#endif
