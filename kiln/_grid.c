/* Plans on a GPU: kernels started through the driver on torch's current stream, memory from torch's allocator. */

#include "_launch.h"

/* What the driver is told of a start, and one attribute of it, as the driver has them. */
typedef struct {
    int name, unused, value[16];
} Attribute;

typedef struct {
    unsigned blocks[3], threads[3], shared;
    void *stream;
    Attribute *attributes;
    unsigned count;
} Configuration;

enum { SERIALIZED_BY_ITSELF = 6 /* the driver's name for it */ };

/* Found by launch/cuda.py in torch's libraries and in the driver. */
static struct {
    int32_t (*stream)(int32_t index, void **);
    int (*launch)(void *function, unsigned bx, unsigned by, unsigned bz, unsigned tx, unsigned ty, unsigned tz,
                  unsigned shared, void *stream, void **parameters, void **extra);
    int (*current)(void **context);
    int (*push)(void *context);
    int (*pop)(void **context);
    int (*text)(int error, const char **);
    int (*launch_by)(const Configuration *, void *function, void **parameters, void **extra);
} driver;

enum { ALIGNMENT = 16, BYTES = 0 /* torch's number for uint8 */ };

/* Memory for arenas in place of torch's allocator: what is recorded on this thread uses it in each replay. */
static _Thread_local struct {
    char *memory;
    size_t size;
} lent;

static int
refused(int error)
{
    const char *text = NULL;
    if (driver.text(error, &text) || text == NULL)
        text = "unknown error";
    PyErr_Format(PyExc_RuntimeError, "CUDA error: %s", text);
    return -1;
}

int
grid_enter(Run *run)
{
    if (driver.launch == NULL || driver.stream(run->plan->device.index, &run->stream)) {
        failed("tell the stream of a GPU");
        return -1;
    }
    return 0;
}

/* The arena of a call: the memory that was lent if it is large enough, else torch's. */
int
grid_borrow(Run *run, size_t size)
{
    const Device *device = &run->plan->device;
    int64_t shape = (int64_t)size, stride = 1;
    void *memory = lent.memory;
    if (lent.size < size
        && (torch.empty(1, &shape, &stride, BYTES, device->type, device->index, &run->arena)
            || torch.data_pointer(run->arena, &memory))) {
        failed("find memory on the GPU");
        return -1;
    }
    /* Tensors in the arena of the last call serve again where it is at the same address. */
    run->own = (Block){NULL, memory, size, (uint64_t)(uintptr_t)memory};
    run->block = &run->own;
    return 0;
}

/* Finds the functions of a step for buffers that are not aligned; they are compiled when they are first asked for. */
static int
find_others(const Step *step)
{
    PyObject *found = PyObject_CallNoArgs(step->unaligned);
    if (found == NULL)
        return -1;
    int right = PyTuple_Check(found) && PyTuple_GET_SIZE(found) == step->count;
    for (int i = 0; right && i < step->count; i++)
        step->starts[i].other = PyLong_AsVoidPtr(PyTuple_GET_ITEM(found, i));
    Py_DECREF(found);
    if (!right && !PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, "a function is missing for buffers that are not aligned");
    return PyErr_Occurred() ? -1 : 0;
}

static int
start_one(const Run *run, const Start *start, void *function, unsigned blocks, void **parameters)
{
    if (!start->early || driver.launch_by == NULL)
        return driver.launch(function, blocks, 1, 1, start->threads, 1, 1, start->shared, run->stream, parameters, NULL);
    Attribute early = {SERIALIZED_BY_ITSELF, 0, {1}};
    Configuration how = {{blocks, 1, 1}, {start->threads, 1, 1}, start->shared, run->stream, &early, 1};
    return driver.launch_by(&how, function, parameters, NULL);
}

static int
start_all(const Run *run, const Step *step, void **buffers, int aligned)
{
    int64_t *numbers = run->layout->numbers;
    static int64_t nothing;
    for (int i = 0; i < step->count; i++) {
        const Start *start = &step->starts[i];
        int64_t blocks = numbers[start->blocks];
        if (blocks <= 0)
            continue;
        void *parameters[start->given + 1];
        int64_t words[start->table ? start->given : 1];
        for (int k = 0; k < start->given; k++) {
            int what = start->parameters[k];
            parameters[k] = what >= 0 ? (void *)&buffers[what] : what == -1 ? &nothing : &numbers[-2 - what];
            if (start->table)
                memcpy(&words[k], parameters[k], sizeof *words);
        }
        if (start->table)
            parameters[0] = words;
        void *function = aligned ? start->function : start->other;
        int error = blocks > INT32_MAX ? 1 /* invalid value */
                                       : start_one(run, start, function, (unsigned)blocks, parameters);
        if (error)
            return error;
    }
    return 0;
}

int
grid_start(Run *run, const Step *step)
{
    void *buffers[step->buffered + 1], *now = NULL, *context = run->plan->device.context;
    if (addresses_of(run, step, buffers))
        return -1;
    uintptr_t bits = 0;
    for (int i = 0; i < step->buffered; i++)
        bits |= (uintptr_t)buffers[i];
    int aligned = bits % ALIGNMENT == 0 || step->unaligned == Py_None;
    if (!aligned && step->starts[0].other == NULL && find_others(step))
        return -1;
    driver.current(&now);
    int error = now == context ? 0 : driver.push(context);
    if (!error) {
        error = start_all(run, step, buffers, aligned);
        if (now != context)
            driver.pop(&now);
    }
    return error ? refused(error) : 0;
}

/* Functions for Python */

PyObject *
grid_set_driver(PyObject *module, PyObject *args)
{
    void **fields[] = {
        (void **)&driver.stream, (void **)&driver.launch, (void **)&driver.current,
        (void **)&driver.push, (void **)&driver.pop, (void **)&driver.text, (void **)&driver.launch_by,
    };
    Py_ssize_t count = sizeof(fields) / sizeof(*fields);
    if (PyTuple_GET_SIZE(args) != count)
        return PyErr_Format(PyExc_TypeError, "set_driver takes %zd addresses", count);
    for (Py_ssize_t i = 0; i < count; i++)
        *fields[i] = PyLong_AsVoidPtr(PyTuple_GET_ITEM(args, i));
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

PyObject *
grid_lend(PyObject *module, PyObject *args)
{
    unsigned long long address;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "Kn:lend", &address, &size))
        return NULL;
    lent.memory = (char *)(uintptr_t)address;
    lent.size = (size_t)size;
    Py_RETURN_NONE;
}

static Tensor
handle_of(PyObject *object)
{
    return PyObject_TypeCheck(object, torch.type) ? (char *)object + torch.offset : NULL;
}

PyObject *
grid_addresses(PyObject *module, PyObject *args)
{
    PyObject *values;
    const char *left_out;
    Py_ssize_t length;
    if (!PyArg_ParseTuple(args, "O!y#:addresses", &PyList_Type, &values, &left_out, &length))
        return NULL;
    Py_ssize_t count = PyList_GET_SIZE(values);
    PyObject *made = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(void *));
    for (Py_ssize_t i = 0; made != NULL && i < count; i++) {
        Tensor tensor = i < length && left_out[i] ? NULL : handle_of(PyList_GET_ITEM(values, i));
        void *address = NULL;
        if (tensor != NULL && torch.data_pointer(tensor, &address)) {
            failed("tell where a tensor's memory is");
            Py_CLEAR(made);
        } else
            memcpy(PyBytes_AS_STRING(made) + i * (Py_ssize_t)sizeof(void *), &address, sizeof address);
    }
    return made;
}

PyObject *
grid_aliases(PyObject *module, PyObject *tensors)
{
    if (!PyTuple_Check(tensors))
        return PyErr_Format(PyExc_TypeError, "aliases takes a tuple");
    Py_ssize_t count = PyTuple_GET_SIZE(tensors);
    PyObject *made = PyTuple_New(count);
    for (Py_ssize_t i = 0; made != NULL && i < count; i++) {
        PyObject *object = PyTuple_GET_ITEM(tensors, i), *alias = NULL;
        Tensor tensor = handle_of(object), fresh = NULL;
        int64_t rank, *shape, *stride;
        if (tensor == NULL)
            alias = Py_NewRef(object);
        else if (torch.dim(tensor, &rank) || torch.sizes(tensor, &shape) || torch.strides(tensor, &stride)
                 || torch.view(tensor, rank, shape, stride, 0, &fresh))
            failed("take a view");
        else {
            alias = torch.wrap(fresh);
            torch.destroy(fresh);
        }
        if (alias == NULL)
            Py_CLEAR(made);
        else
            PyTuple_SET_ITEM(made, i, alias);
    }
    return made;
}
