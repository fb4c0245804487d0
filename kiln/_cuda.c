/* Starts kernels on a GPU: takes the memory of tensors, makes the outputs, calls the driver on torch's stream. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <structmember.h>

typedef int32_t (*DataPointer)(void *tensor, void **address);
typedef int (*Launch)(void *function, unsigned bx, unsigned by, unsigned bz, unsigned tx, unsigned ty, unsigned tz,
                      unsigned shared, void *stream, void **parameters, void **extra);
typedef int (*Context)(void *context);
typedef int (*CurrentContext)(void **context);
typedef int (*ErrorText)(int error, const char **text);

/* Found by launch/cuda.py in the driver and in torch's own libraries. */
static struct {
    Py_ssize_t offset; /* of the tensor's handle in its Python object */
    DataPointer data_pointer;
    Launch launch;
    CurrentContext current;
    Context push;
    CurrentContext pop;
    ErrorText text;
} driver;

enum { FEW = 192, MOST_PARAMETERS = 512, ALIGNMENT = 16, UNUSED = -1, FIRST_SIZE = -2 };

/* One function: what its parameters are is an input or output (0, 1, …), a size (-2, -3, …), or unused (-1). */
typedef struct {
    void *function;
    unsigned threads;
    int64_t blocks;
    int count;
    int32_t *given;
} Start;

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    Start *starts;
    int count;
    PyObject *owner;   /* keeps the code alive */
    PyObject *make;    /* torch.empty_strided */
    PyObject *outputs; /* for each output (args, kwargs) of `make`; args is None where the sizes vary */
    PyObject *name;
    PyObject *stream;  /* the device's number to the address of its current stream */
    PyObject *device;
    PyObject *other;   /* called instead where an input is not aligned; None where it need not be */
    void *context;
    int inputs, made, sizes, moving;
} Kernel;

static PyObject *
failed(int error)
{
    const char *text = NULL;
    if (driver.text == NULL || driver.text(error, &text) || text == NULL)
        text = "unknown error";
    return PyErr_Format(PyExc_RuntimeError, "CUDA error: %s", text);
}

static int
start_all(const Kernel *kernel, void **addresses, int64_t *numbers, void *stream)
{
    void *parameters[MOST_PARAMETERS];
    static int64_t nothing = 0;
    for (int i = 0; i < kernel->count; i++) {
        const Start *start = &kernel->starts[i];
        int64_t blocks = kernel->moving ? numbers[kernel->sizes + i] : start->blocks;
        if (blocks <= 0)
            continue;
        for (int k = 0; k < start->count; k++) {
            int32_t what = start->given[k];
            parameters[k] = what >= 0 ? (void *)&addresses[what] : what == UNUSED ? &nothing : &numbers[FIRST_SIZE - what];
        }
        int error = blocks > INT32_MAX ? 1
                                       : driver.launch(start->function, (unsigned)blocks, 1, 1, start->threads, 1, 1, 0,
                                                       stream, parameters, NULL);
        if (error)
            return error;
    }
    return 0;
}

/* Starts the functions with the device's own context in force. */
static int
start_in_context(const Kernel *kernel, void **addresses, int64_t *numbers, void *stream)
{
    void *now = NULL;
    driver.current(&now);
    if (now == kernel->context)
        return start_all(kernel, addresses, numbers, stream);
    int error = driver.push(kernel->context);
    if (error)
        return error;
    error = start_all(kernel, addresses, numbers, stream);
    driver.pop(&now);
    return error;
}

static PyObject *
make_output(Kernel *kernel, int i, PyObject *const *layout)
{
    PyObject *spec = PyTuple_GET_ITEM(kernel->outputs, i);
    PyObject *args = PyTuple_GET_ITEM(spec, 0), *kwargs = PyTuple_GET_ITEM(spec, 1);
    if (!kernel->moving)
        return PyObject_Call(kernel->make, args, kwargs);
    PyObject *given = PyTuple_Pack(2, layout[2 * i], layout[2 * i + 1]);
    if (given == NULL)
        return NULL;
    PyObject *made = PyObject_Call(kernel->make, given, kwargs);
    Py_DECREF(given);
    return made;
}

static int
address_of(PyObject *tensor, void **address)
{
    if (!driver.data_pointer((char *)tensor + driver.offset, address))
        return 0;
    PyErr_SetString(PyExc_RuntimeError, "a tensor's memory cannot be read");
    return -1;
}

/* kernel(*tensors) or, where sizes vary,
   kernel(*tensors, *(shape, stride of each output), *sizes, *(blocks of each function)). */
static PyObject *
kernel_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Kernel *kernel = (Kernel *)self;
    Py_ssize_t given = PyVectorcall_NARGS(nargsf);
    int many = kernel->moving ? kernel->sizes + kernel->count : 0, tensors = kernel->inputs + kernel->made;
    Py_ssize_t wanted = kernel->inputs + (kernel->moving ? 2 * kernel->made : 0) + many;
    if (given != wanted || (names != NULL && PyTuple_GET_SIZE(names)))
        return PyErr_Format(PyExc_TypeError, "a kernel takes %zd arguments, got %zd", wanted, given);
    void *few[FEW], **addresses = few;
    if (tensors + many > FEW && (addresses = PyMem_Calloc(tensors + many, sizeof(void *))) == NULL)
        return PyErr_NoMemory();
    int64_t *numbers = (int64_t *)(addresses + tensors);
    PyObject *result = NULL, *stream = NULL;
    for (int i = 0; i < kernel->inputs; i++) {
        if (address_of(args[i], &addresses[i]))
            goto fail;
        if ((uintptr_t)addresses[i] % ALIGNMENT && kernel->other != Py_None) {
            result = PyObject_Vectorcall(kernel->other, args, given, NULL);
            goto end;
        }
    }
    result = PyTuple_New(kernel->made);
    if (result == NULL)
        goto fail;
    PyObject *const *rest = args + kernel->inputs;
    for (int i = 0; i < kernel->made; i++) {
        PyObject *out = make_output(kernel, i, rest);
        if (out == NULL)
            goto fail;
        PyTuple_SET_ITEM(result, i, out);
        if (address_of(out, &addresses[kernel->inputs + i]))
            goto fail;
    }
    rest += 2 * kernel->made;
    for (int i = 0; i < many; i++) {
        if (PyFloat_Check(rest[i])) { /* comes as its bits */
            double number = PyFloat_AS_DOUBLE(rest[i]);
            memcpy(&numbers[i], &number, sizeof number);
            continue;
        }
        numbers[i] = PyLong_AsLongLong(rest[i]);
        if (numbers[i] == -1 && PyErr_Occurred())
            goto fail;
    }
    stream = PyObject_CallOneArg(kernel->stream, kernel->device);
    if (stream == NULL)
        goto fail;
    void *where = PyLong_AsVoidPtr(stream);
    if (where == NULL && PyErr_Occurred())
        goto fail;
    int error = start_in_context(kernel, addresses, numbers, where);
    if (error) {
        failed(error);
        goto fail;
    }
    goto end;
fail:
    Py_CLEAR(result);
end:
    Py_XDECREF(stream);
    if (addresses != few)
        PyMem_Free(addresses);
    return result;
}

/* Takes one start from (function, threads, blocks, given). */
static int
take_start(Kernel *kernel, Start *start, PyObject *item)
{
    unsigned long long function;
    long long blocks;
    PyObject *given;
    if (!PyArg_ParseTuple(item, "KILO!", &function, &start->threads, &blocks, &PyTuple_Type, &given))
        return -1;
    start->function = (void *)(uintptr_t)function;
    start->blocks = blocks;
    start->count = (int)PyTuple_GET_SIZE(given);
    if (start->count > MOST_PARAMETERS) {
        PyErr_SetString(PyExc_ValueError, "a kernel of too many parameters");
        return -1;
    }
    start->given = PyMem_Calloc(start->count + 1, sizeof(int32_t));
    if (start->given == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int k = 0; k < start->count; k++) {
        long what = PyLong_AsLong(PyTuple_GET_ITEM(given, k));
        if (PyErr_Occurred())
            return -1;
        if (what >= kernel->inputs + kernel->made || what <= FIRST_SIZE - kernel->sizes) {
            PyErr_SetString(PyExc_ValueError, "a parameter is none of the tensors and sizes");
            return -1;
        }
        start->given[k] = (int32_t)what;
    }
    return 0;
}

static PyObject *
kernel_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"starts", "owner",  "make",   "outputs", "name",  "inputs",  "sizes",
                            "moving", "device", "stream", "context", "other", NULL};
    PyObject *starts, *owner, *make, *outputs, *name, *device, *stream, *other;
    int inputs, sizes, moving;
    unsigned long long context;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OOO!UiipO!OKO", names, &PyTuple_Type, &starts, &owner, &make,
                                     &PyTuple_Type, &outputs, &name, &inputs, &sizes, &moving, &PyLong_Type, &device,
                                     &stream, &context, &other))
        return NULL;
    if (driver.launch == NULL)
        return PyErr_Format(PyExc_RuntimeError, "set_driver has not been called");
    Kernel *kernel = (Kernel *)type->tp_alloc(type, 0);
    if (kernel == NULL)
        return NULL;
    kernel->call = kernel_call;
    kernel->owner = Py_NewRef(owner);
    kernel->make = Py_NewRef(make);
    kernel->outputs = Py_NewRef(outputs);
    kernel->name = Py_NewRef(name);
    kernel->stream = Py_NewRef(stream);
    kernel->device = Py_NewRef(device);
    kernel->other = Py_NewRef(other);
    kernel->context = (void *)(uintptr_t)context;
    kernel->inputs = inputs, kernel->made = (int)PyTuple_GET_SIZE(outputs);
    kernel->sizes = sizes, kernel->moving = moving;
    kernel->starts = PyMem_Calloc(PyTuple_GET_SIZE(starts) + 1, sizeof(Start));
    if (kernel->starts == NULL) {
        Py_DECREF(kernel);
        return PyErr_NoMemory();
    }
    kernel->count = (int)PyTuple_GET_SIZE(starts);
    for (int i = 0; i < kernel->count; i++)
        if (take_start(kernel, &kernel->starts[i], PyTuple_GET_ITEM(starts, i))) {
            Py_DECREF(kernel);
            return NULL;
        }
    return (PyObject *)kernel;
}

static int
kernel_traverse(Kernel *kernel, visitproc visit, void *arg)
{
    Py_VISIT(kernel->owner);
    Py_VISIT(kernel->make);
    Py_VISIT(kernel->outputs);
    Py_VISIT(kernel->stream);
    Py_VISIT(kernel->other);
    return 0;
}

static int
kernel_clear(Kernel *kernel)
{
    Py_CLEAR(kernel->owner);
    Py_CLEAR(kernel->make);
    Py_CLEAR(kernel->outputs);
    Py_CLEAR(kernel->name);
    Py_CLEAR(kernel->stream);
    Py_CLEAR(kernel->device);
    Py_CLEAR(kernel->other);
    return 0;
}

static void
kernel_dealloc(Kernel *kernel)
{
    PyObject_GC_UnTrack(kernel);
    kernel_clear(kernel);
    for (int i = 0; i < kernel->count; i++)
        PyMem_Free(kernel->starts[i].given);
    PyMem_Free(kernel->starts);
    Py_TYPE(kernel)->tp_free((PyObject *)kernel);
}

static PyMemberDef kernel_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Kernel, call), READONLY, NULL},
    {"__name__", T_OBJECT, offsetof(Kernel, name), READONLY, "what the kernel is called in programs"},
    {"owner", T_OBJECT, offsetof(Kernel, owner), READONLY, "what it was made of"},
    {NULL},
};

static PyTypeObject KernelType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kiln._cuda.Kernel",
    .tp_doc = "A kernel on a GPU as a callable: tensors in, a tuple of new tensors out.",
    .tp_basicsize = sizeof(Kernel),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Kernel, call),
    .tp_call = PyVectorcall_Call,
    .tp_new = kernel_new,
    .tp_traverse = (traverseproc)kernel_traverse,
    .tp_clear = (inquiry)kernel_clear,
    .tp_dealloc = (destructor)kernel_dealloc,
    .tp_members = kernel_members,
};

static PyObject *
set_driver(PyObject *module, PyObject *args)
{
    unsigned long long data_pointer, launch, current, push, pop, text;
    if (!PyArg_ParseTuple(args, "nKKKKKK:set_driver", &driver.offset, &data_pointer, &launch, &current, &push, &pop,
                          &text))
        return NULL;
    driver.data_pointer = (DataPointer)(uintptr_t)data_pointer;
    driver.launch = (Launch)(uintptr_t)launch;
    driver.current = (CurrentContext)(uintptr_t)current;
    driver.push = (Context)(uintptr_t)push;
    driver.pop = (CurrentContext)(uintptr_t)pop;
    driver.text = (ErrorText)(uintptr_t)text;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"set_driver", set_driver, METH_VARARGS,
     "set_driver(offset, data_pointer, launch, current, push, pop, text): addresses in torch and in the driver"},
    {NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "kiln._cuda", NULL, -1, functions};

PyMODINIT_FUNC
PyInit__cuda(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL || PyModule_AddType(module, &KernelType) < 0) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
