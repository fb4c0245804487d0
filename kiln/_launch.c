/* Runs compiled graphs: kernels over torch's threads, eager kernels, memory that is planned ahead. */

#include "_launch.h"
#include <structmember.h>

Torch torch;
PyObject *marker;

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
    if (worth < 2 || tasks < 2 || torch.parallel == NULL) {
        stage->entry(buffers, sizes, status, 0, tasks);
        return;
    }
    int64_t threads = torch.max_threads();
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

int
run_stages(const Step *step, double grain, void **buffers, const int64_t *numbers, int64_t *status)
{
    for (int i = 0; i < step->count && !*status; i++) {
        const Stage *stage = &step->stages[i];
        run_stage(stage, grain, buffers, numbers + step->sizes, status, numbers[stage->tasks]);
    }
    return *status != 0;
}

/* set_torch(offset, type, *addresses): the addresses in the order of the fields. */
static PyObject *
set_torch(PyObject *module, PyObject *args)
{
    void **fields[] = {
        (void **)&torch.data_pointer, (void **)&torch.sizes, (void **)&torch.strides, (void **)&torch.storage_offset,
        (void **)&torch.dim, (void **)&torch.dtype, (void **)&torch.empty, (void **)&torch.from_memory, (void **)&torch.view,
        (void **)&torch.copy, (void **)&torch.clone, (void **)&torch.destroy, (void **)&torch.storage_size, (void **)&torch.wrap,
        (void **)&torch.parallel, (void **)&torch.max_threads, (void **)&torch.thread_number,
        (void **)&torch.team_size, (void **)&torch.defined, (void **)&torch.hide, (void **)&torch.show,
    };
    Py_ssize_t count = sizeof(fields) / sizeof(*fields);
    if (PyTuple_GET_SIZE(args) != count + 2)
        return PyErr_Format(PyExc_TypeError, "set_torch takes %zd arguments", count + 2);
    torch.offset = PyLong_AsSsize_t(PyTuple_GET_ITEM(args, 0));
    torch.type = (PyTypeObject *)Py_NewRef(PyTuple_GET_ITEM(args, 1));
    for (Py_ssize_t i = 0; i < count; i++)
        *fields[i] = PyLong_AsVoidPtr(PyTuple_GET_ITEM(args, i + 2));
    if (PyErr_Occurred())
        return NULL;
    torch.ready = 1;
    Py_RETURN_NONE;
}

static PyObject *
set_marker(PyObject *module, PyObject *given)
{
    Py_XSETREF(marker, given == Py_None ? NULL : Py_NewRef(given));
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"set_marker", set_marker, METH_O, "set_marker(marker): marker(plan, step) -> end(), called around steps; or None"},
    {"set_torch", set_torch, METH_VARARGS, "set_torch(offset, type, *addresses): what is used of torch's libraries"},
    {"set_products", set_products, METH_VARARGS,
     "set_products(mm, addmm, multiply): addresses in torch's library; those of what stands for the first two"},
    {"trim", arena_trim, METH_NOARGS, "trim(): gives the memory that no call uses back to the system"},
    {"set_limit", arena_limit, METH_O, "set_limit(bytes): how much memory stays mapped between calls"},
    {"set_driver", grid_set_driver, METH_VARARGS,
     "set_driver(stream, launch, current, push, pop, text, launch_by): addresses in torch and in a GPU's driver"},
    {"lend", grid_lend, METH_VARARGS, "lend(address, bytes): memory for arenas on the GPU in this thread; 0: torch's"},
    {"addresses", grid_addresses, METH_VARARGS,
     "addresses(values, left_out): bytes of where tensors lie, 0 for what is no tensor or is left out"},
    {"aliases", grid_aliases, METH_O, "aliases(tensors): a tuple of new tensors in the same memory"},
    {"memory", arena_sizes, METH_NOARGS, "memory(): the bytes that are kept between calls, and those in use"},
    {NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "kiln._launch", NULL, -1, functions};

PyMODINIT_FUNC
PyInit__launch(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL || PyModule_AddType(module, &PlanType) < 0 || PyType_Ready(&LayoutType) < 0) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
