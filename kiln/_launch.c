/* Runs kernels: takes the memory of tensors, makes the outputs, spreads tasks over torch's threads. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <structmember.h>

typedef void (*Entry)(void **buffers, const int64_t *sizes, int64_t *status, int64_t begin, int64_t end);
typedef int32_t (*DataPointer)(void *tensor, void **address);
typedef void (*Parallel)(void (*body)(void *), void *data, unsigned threads, unsigned flags);
typedef int (*Number)(void);

/* Found by launch/native.py in torch's own libraries. */
static struct {
    DataPointer data_pointer;
    Parallel parallel;
    Number max_threads, thread_number, team_size;
    Py_ssize_t offset; /* of the tensor's handle in its Python object */
} torch;

enum { FEW = 192 }; /* addresses and sizes of most kernels */
static const double RELEASE_WORK = 200000.0; /* operations worth more than letting go of the GIL */

/* Tasks that may run at once; a stage starts when the one before it has ended. */
typedef struct {
    Entry entry;
    int64_t tasks;
    double work; /* operations of one task */
} Stage;

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    Stage *stages;
    int count;
    PyObject *owner;   /* keeps the code alive */
    PyObject *make;    /* torch.empty_strided */
    PyObject *outputs; /* for each output (args, kwargs) of `make`; args is None where the sizes vary */
    PyObject *name;
    int inputs, made, sizes, moving;
    int32_t *order; /* which of inputs and outputs each buffer is */
    int buffers;
    double grain; /* operations worth a thread */
} Kernel;

typedef struct {
    Entry entry;
    void **buffers;
    const int64_t *sizes;
    int64_t *status;
    int64_t tasks;
} Job;

static void
work_share(void *data)
{
    const Job *job = data;
    int64_t me = torch.thread_number(), team = torch.team_size();
    int64_t begin = job->tasks * me / team, end = job->tasks * (me + 1) / team;
    if (begin < end)
        job->entry(job->buffers, job->sizes, job->status, begin, end);
}

static void
run_stage(const Stage *stage, double grain, void **buffers, const int64_t *sizes, int64_t *status, int64_t tasks)
{
    double worth = stage->work * (double)tasks / grain;
    int64_t threads = torch.max_threads != NULL ? torch.max_threads() : 1;
    if (threads > tasks)
        threads = tasks;
    if ((double)threads > worth)
        threads = (int64_t)worth;
    if (threads <= 1) {
        stage->entry(buffers, sizes, status, 0, tasks);
        return;
    }
    Job job = {stage->entry, buffers, sizes, status, tasks};
    torch.parallel(work_share, &job, (unsigned)threads, 0);
}

static void
run_stages(const Kernel *kernel, void **buffers, const int64_t *sizes, int64_t *status)
{
    for (int i = 0; i < kernel->count && !*status; i++) {
        const Stage *stage = &kernel->stages[i];
        run_stage(stage, kernel->grain, buffers, sizes, status, kernel->moving ? sizes[kernel->sizes + i] : stage->tasks);
    }
}

static PyObject *
make_output(Kernel *kernel, int i, PyObject *shape, PyObject *stride)
{
    PyObject *spec = PyTuple_GET_ITEM(kernel->outputs, i);
    PyObject *args = PyTuple_GET_ITEM(spec, 0), *kwargs = PyTuple_GET_ITEM(spec, 1);
    if (!kernel->moving)
        return PyObject_Call(kernel->make, args, kwargs);
    PyObject *given = PyTuple_Pack(2, shape, stride);
    if (given == NULL)
        return NULL;
    PyObject *made = PyObject_Call(kernel->make, given, kwargs);
    Py_DECREF(given);
    return made;
}

/* What a kernel reported, as eager kernels raise it; the numbers stand in generate/values.py. */
static void
raise_fault(int64_t status)
{
    if (status == 1)
        PyErr_SetString(PyExc_IndexError, "index out of range in self");
    else if (status == 2)
        PyErr_SetString(PyExc_RuntimeError, "index out of bounds");
    else
        PyErr_SetString(PyExc_RuntimeError, "ZeroDivisionError");
}

/* kernel(*tensors) or, where sizes vary,
   kernel(*tensors, *(shape, stride of each output), *sizes, *(tasks of each stage)). */
static PyObject *
kernel_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Kernel *kernel = (Kernel *)self;
    Py_ssize_t given = PyVectorcall_NARGS(nargsf);
    int numbers = kernel->moving ? kernel->sizes + kernel->count : 0, tensors = kernel->inputs + kernel->made;
    Py_ssize_t wanted = kernel->inputs + (kernel->moving ? 2 * kernel->made : 0) + numbers;
    if (given != wanted || (names != NULL && PyTuple_GET_SIZE(names))) {
        PyErr_Format(PyExc_TypeError, "a kernel takes %zd arguments, got %zd", wanted, given);
        return NULL;
    }
    void *few[FEW], **addresses = few;
    int64_t status = 0;
    PyObject *result = PyTuple_New(kernel->made);
    if (result == NULL)
        return NULL;
    if (2 * tensors + numbers > FEW) {
        addresses = PyMem_Calloc(2 * tensors + numbers, sizeof(void *));
        if (addresses == NULL) {
            Py_DECREF(result);
            return PyErr_NoMemory();
        }
    }
    void **buffers = addresses + tensors;
    int64_t *sizes = (int64_t *)(buffers + tensors);
    PyObject *const *rest = args + kernel->inputs;
    for (int i = 0; i < kernel->made; i++) {
        PyObject *out = make_output(kernel, i, kernel->moving ? rest[2 * i] : NULL, kernel->moving ? rest[2 * i + 1] : NULL);
        if (out == NULL)
            goto fail;
        PyTuple_SET_ITEM(result, i, out);
    }
    for (int i = 0; i < tensors; i++) {
        PyObject *tensor = i < kernel->inputs ? args[i] : PyTuple_GET_ITEM(result, i - kernel->inputs);
        if (torch.data_pointer((char *)tensor + torch.offset, &addresses[i])) {
            PyErr_SetString(PyExc_RuntimeError, "a tensor's memory cannot be read");
            goto fail;
        }
    }
    rest += 2 * kernel->made;
    double work = 0;
    for (int i = 0; i < numbers; i++) {
        if (PyFloat_CheckExact(rest[i])) { /* a number that a kernel computes with */
            double number = PyFloat_AS_DOUBLE(rest[i]);
            memcpy(&sizes[i], &number, sizeof number);
            continue;
        }
        sizes[i] = PyLong_AsLongLong(rest[i]);
        if (sizes[i] == -1 && PyErr_Occurred())
            goto fail;
    }
    for (int i = 0; i < kernel->count; i++)
        work += kernel->stages[i].work * (double)(numbers ? sizes[kernel->sizes + i] : kernel->stages[i].tasks);
    for (int i = 0; i < kernel->buffers; i++)
        buffers[i] = addresses[kernel->order[i]];
    if (work > RELEASE_WORK) {
        Py_BEGIN_ALLOW_THREADS
        run_stages(kernel, buffers, sizes, &status);
        Py_END_ALLOW_THREADS
    } else
        run_stages(kernel, buffers, sizes, &status);
    if (status) {
        raise_fault(status);
        goto fail;
    }
    goto end;
fail:
    Py_CLEAR(result);
end:
    if (addresses != few)
        PyMem_Free(addresses);
    return result;
}

/* Takes the stages from a tuple of (address, tasks, work). */
static int
take_stages(Kernel *kernel, PyObject *stages)
{
    kernel->count = (int)PyTuple_GET_SIZE(stages);
    kernel->stages = PyMem_Calloc(kernel->count + 1, sizeof(Stage));
    if (kernel->stages == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int i = 0; i < kernel->count; i++) {
        unsigned long long address;
        long long tasks;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(stages, i), "KLd", &address, &tasks, &kernel->stages[i].work))
            return -1;
        kernel->stages[i].entry = (Entry)(uintptr_t)address;
        kernel->stages[i].tasks = tasks;
    }
    return 0;
}

static PyObject *
kernel_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"stages", "owner", "make", "outputs", "name", "inputs", "order", "sizes", "moving", "grain",
                            NULL};
    PyObject *stages, *owner, *make, *outputs, *name, *order;
    int inputs, sizes, moving;
    double grain;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OOO!UiO!ipd", names, &PyTuple_Type, &stages, &owner, &make,
                                     &PyTuple_Type, &outputs, &name, &inputs, &PyTuple_Type, &order, &sizes, &moving,
                                     &grain))
        return NULL;
    int made = (int)PyTuple_GET_SIZE(outputs), buffers = (int)PyTuple_GET_SIZE(order);
    if (buffers > inputs + made)
        return PyErr_Format(PyExc_ValueError, "a kernel has at most as many buffers as tensors");
    if (torch.data_pointer == NULL)
        return PyErr_Format(PyExc_RuntimeError, "set_torch has not been called");
    Kernel *kernel = (Kernel *)type->tp_alloc(type, 0);
    if (kernel == NULL)
        return NULL;
    kernel->order = PyMem_Calloc(buffers ? buffers : 1, sizeof(int32_t));
    if (kernel->order == NULL) {
        Py_DECREF(kernel);
        return PyErr_NoMemory();
    }
    if (take_stages(kernel, stages)) {
        Py_DECREF(kernel);
        return NULL;
    }
    for (int i = 0; i < buffers; i++) {
        long place = PyLong_AsLong(PyTuple_GET_ITEM(order, i));
        if (place < 0 || place >= inputs + made) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "a buffer is none of the tensors");
            Py_DECREF(kernel);
            return NULL;
        }
        kernel->order[i] = (int32_t)place;
    }
    kernel->call = kernel_call;
    kernel->owner = Py_NewRef(owner);
    kernel->make = Py_NewRef(make);
    kernel->outputs = Py_NewRef(outputs);
    kernel->name = Py_NewRef(name);
    kernel->inputs = inputs, kernel->made = made, kernel->sizes = sizes, kernel->moving = moving;
    kernel->buffers = buffers, kernel->grain = grain;
    return (PyObject *)kernel;
}

static int
kernel_traverse(Kernel *kernel, visitproc visit, void *arg)
{
    Py_VISIT(kernel->owner);
    Py_VISIT(kernel->make);
    Py_VISIT(kernel->outputs);
    return 0;
}

static int
kernel_clear(Kernel *kernel)
{
    Py_CLEAR(kernel->owner);
    Py_CLEAR(kernel->make);
    Py_CLEAR(kernel->outputs);
    Py_CLEAR(kernel->name);
    return 0;
}

static void
kernel_dealloc(Kernel *kernel)
{
    PyObject_GC_UnTrack(kernel);
    kernel_clear(kernel);
    PyMem_Free(kernel->order);
    PyMem_Free(kernel->stages);
    Py_TYPE(kernel)->tp_free((PyObject *)kernel);
}

static PyMemberDef kernel_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Kernel, call), READONLY, NULL},
    {"__name__", T_OBJECT, offsetof(Kernel, name), READONLY, "what the kernel is called in programs"},
    {"owner", T_OBJECT, offsetof(Kernel, owner), READONLY, "what it was made of"},
    {NULL},
};

static PyTypeObject KernelType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kiln._launch.Kernel",
    .tp_doc = "A kernel in machine code as a callable: tensors in, a tuple of new tensors out.",
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
set_torch(PyObject *module, PyObject *args)
{
    unsigned long long data_pointer, parallel, max_threads, thread_number, team_size;
    if (!PyArg_ParseTuple(args, "nKKKKK:set_torch", &torch.offset, &data_pointer, &parallel, &max_threads,
                          &thread_number, &team_size))
        return NULL;
    torch.data_pointer = (DataPointer)(uintptr_t)data_pointer;
    torch.parallel = (Parallel)(uintptr_t)parallel;
    torch.max_threads = (Number)(uintptr_t)max_threads;
    torch.thread_number = (Number)(uintptr_t)thread_number;
    torch.team_size = (Number)(uintptr_t)team_size;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"set_torch", set_torch, METH_VARARGS,
     "set_torch(offset, data_pointer, parallel, max_threads, thread_number, team_size): addresses in torch's libraries"},
    {NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "kiln._launch", NULL, -1, functions};

PyMODINIT_FUNC
PyInit__launch(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL || PyModule_AddType(module, &KernelType) < 0) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
