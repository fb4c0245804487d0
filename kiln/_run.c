/* Runs a plan: one call from the inputs to the outputs. */

#include "_launch.h"

enum { FEW = 96, KNOWN_LAYOUTS = 64 };

/* Kernels */

/* What a kernel reported, as eager kernels raise it; the numbers stand in generate/values.py. */
static void
raise_fault(int64_t status)
{
    PyObject *kind = (status & 15) == 1 ? PyExc_IndexError : PyExc_RuntimeError;
    if (status >> 4) {
        long long index = status >> 8 & 0x3fffffff;
        PyErr_Format(kind, "index %lld is out of bounds for dimension %d with size %lld",
                     index >> 29 ? index - (1LL << 30) : index, (int)(status >> 4 & 15), (long long)status >> 38);
    }
    else if (status == 1)
        PyErr_SetString(kind, "index out of range in self");
    else if (status == 2)
        PyErr_SetString(PyExc_RuntimeError, "index out of bounds");
    else
        PyErr_SetString(PyExc_RuntimeError, status == 3 ? "ZeroDivisionError" : "value out of range");
}

/* Where the buffers of a kernel are. */
int
addresses_of(Run *run, const Step *step, void **buffers)
{
    for (int i = 0; i < step->buffered; i++) {
        Ref ref = step->buffers[i];
        if (ref.kind == PLACE)
            buffers[i] = run->block->memory + run->layout->numbers[ref.index];
        else if (torch.data_pointer(tensor_in(&run->slots[ref.index]), &buffers[i])) {
            failed("tell where a tensor's memory is");
            return -1;
        }
    }
    return 0;
}

static int
launch(Run *run, const Step *step)
{
    const int64_t *numbers = run->layout->numbers;
    void *buffers[step->buffered + 1];
    if (addresses_of(run, step, buffers))
        return -1;
    double work = 0;
    for (int i = 0; i < step->count; i++)
        work += step->stages[i].work * (double)numbers[step->stages[i].tasks];
    int64_t status = 0;
    if (work > RELEASE_WORK) {
        Py_BEGIN_ALLOW_THREADS
        run_stages(step, run->plan->grain, buffers, numbers, &status);
        Py_END_ALLOW_THREADS
    } else
        run_stages(step, run->plan->grain, buffers, numbers, &status);
    if (status)
        raise_fault(status);
    return status ? -1 : 0;
}

static int
show(Run *run, const Step *step)
{
    const int64_t *numbers = run->layout->numbers;
    Tensor source = tensor_in(&run->slots[step->source]);
    /* The offset counts from where the source starts. */
    if (source == NULL
        || torch.view(source, step->form.rank, numbers + step->form.shape, numbers + step->form.stride,
                      numbers[step->offset], &run->slots[step->slot].handle)) {
        failed("take a view");
        return -1;
    }
    return 0;
}

static int
run_step(Run *run, const Step *step)
{
    switch (step->kind) {
    case LAUNCH:
        return launch(run, step);
    case GRID:
        return grid_start(run, step);
    case MAKE:
        run->slots[step->slot].handle = empty(run, &step->form);
        return run->slots[step->slot].handle == NULL ? -1 : 0;
    case SHOW:
        return show(run, step);
    default:
        return call(run, step);
    }
}

/* Ends a range of the profile; an exception that is on its way stays the one that it is. */
static void
finish(PyObject *end)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *done = PyObject_CallNoArgs(end);
    if (done == NULL)
        PyErr_WriteUnraisable(end);
    Py_XDECREF(done);
    Py_DECREF(end);
    PyErr_Restore(type, value, trace);
}

/* Begins a range of the profile: what ends it, or NULL. */
static PyObject *
begin(Plan *plan, int step)
{
    if (marker == NULL)
        return NULL;
    PyObject *now = Py_NewRef(marker), *end = PyObject_CallFunction(now, "Oi", plan, step);
    if (end == NULL)
        PyErr_WriteUnraisable(now);
    else if (end == Py_None) /* nothing to end */
        Py_CLEAR(end);
    Py_DECREF(now);
    return end;
}

static int
run_marked(Run *run, int i)
{
    PyObject *end = begin(run->plan, i);
    int status = run_step(run, &run->plan->steps[i]);
    if (end != NULL)
        finish(end);
    return status;
}

/* Has the exception of a step say which line of the program it comes from. */
static void
blame(Plan *plan, int step)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace != NULL)
        PyException_SetTraceback(value, trace);
    PyObject *done = PyObject_CallFunction(plan->failing, "iO", step, value);
    if (done == NULL)
        PyErr_WriteUnraisable(plan->failing);
    Py_XDECREF(done);
    Py_XSETREF(trace, PyException_GetTraceback(value));
    PyErr_Restore(type, value, trace);
}

/* The layout for the sizes of these inputs; a new reference. */
Layout *
layout_for(Plan *plan, const Value *slots)
{
    if (plan->fixed != NULL)
        return (Layout *)Py_NewRef(plan->fixed);
    PyObject *key = PyTuple_New(plan->symbols_count);
    int known = 1; /* -0.0 is equal to 0.0, and another number */
    for (int i = 0; key != NULL && i < plan->symbols_count; i++) {
        const Value *value = &slots[plan->symbols[i].index];
        int dim = (int)plan->symbols[i].kind;
        int64_t *found;
        PyObject *number = NULL;
        if (dim == -1)
            number = Py_NewRef(value->object);
        else if (dim < 0 ? torch.strides(tensor_in(value), &found) : torch.sizes(tensor_in(value), &found))
            failed("tell the sizes of a tensor");
        else
            number = PyLong_FromLongLong(found[dim < 0 ? -2 - dim : dim]);
        if (number == NULL)
            Py_CLEAR(key);
        else
            PyTuple_SET_ITEM(key, i, number);
        if (number != NULL && PyFloat_CheckExact(number) && PyFloat_AS_DOUBLE(number) == 0 &&
            signbit(PyFloat_AS_DOUBLE(number)))
            known = 0;
    }
    if (key == NULL)
        return NULL;
    Layout *layout = known ? (Layout *)Py_XNewRef(PyDict_GetItemWithError(plan->layouts, key)) : NULL;
    if (layout == NULL && !PyErr_Occurred()) {
        PyObject *given = PyObject_CallOneArg(plan->resolve, key);
        layout = given != NULL ? layout_new(given, plan) : NULL;
        Py_XDECREF(given);
        if (PyDict_GET_SIZE(plan->layouts) >= KNOWN_LAYOUTS)
            PyDict_Clear(plan->layouts);
        if (known && layout != NULL && PyDict_SetItem(plan->layouts, key, (PyObject *)layout))
            Py_CLEAR(layout);
    }
    Py_DECREF(key);
    return layout;
}

/* Borrows memory, and the tensors in it where no other call has them. */
static int
borrow(Run *run, Tensor **own)
{
    Layout *layout = run->layout;
    int64_t size = layout->numbers[run->plan->arena];
    run->tensors = layout->tensors;
    if (size == 0)
        return 0;
    if (!run->plan->device.type)
        run->block = block_lease((size_t)size, layout->busy ? 0 : layout->serial);
    else if (grid_borrow(run, (size_t)size))
        return -1;
    if (run->block == NULL)
        return -1;
    if (layout->busy) {
        run->tensors = *own = PyMem_Calloc(layout->lodged + 1, sizeof(Tensor));
        if (*own == NULL) {
            PyErr_NoMemory();
            return -1;
        }
    } else {
        layout->busy = 1;
        if (layout->serial != run->block->serial)
            layout_forget(layout->tensors, layout->lodged);
        layout->serial = run->block->serial;
    }
    return 0;
}

static void
give_back(Run *run, Tensor *own)
{
    if (run->block == NULL)
        return;
    if (own != NULL) {
        layout_forget(own, run->layout->lodged);
        PyMem_Free(own);
    } else if (run->tensors == run->layout->tensors)
        run->layout->busy = 0;
    if (run->block != &run->own)
        block_return(run->block);
    else if (run->arena != NULL)
        torch.destroy(run->arena);
}

/* plan(values), a list that is emptied, or plan(*values). */
PyObject *
plan_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    Plan *plan = (Plan *)self;
    Py_ssize_t given = PyVectorcall_NARGS(nargsf);
    PyObject *list = given == 1 && PyList_CheckExact(args[0]) ? args[0] : NULL;
    if (list != NULL) {
        given = PyList_GET_SIZE(list);
        args = ((PyListObject *)list)->ob_item;
    }
    if (given != plan->inputs || names != NULL)
        return PyErr_Format(PyExc_TypeError, "the compiled graph takes %d values, got %zd", plan->inputs, given);
    Value few[FEW], *slots = few;
    if (plan->slots > FEW) {
        slots = PyMem_Calloc(plan->slots, sizeof(Value));
        if (slots == NULL)
            return PyErr_NoMemory();
    } else
        memset(few, 0, sizeof(Value) * (plan->slots ? plan->slots : 1));
    for (Py_ssize_t i = 0; i < given; i++)
        slots[i].object = Py_NewRef(args[i]);
    Py_ssize_t constants = PyTuple_GET_SIZE(plan->constants);
    for (Py_ssize_t i = 0; i < constants; i++)
        slots[given + i].object = Py_NewRef(PyTuple_GET_ITEM(plan->constants, i));
    if (list != NULL && PyList_SetSlice(list, 0, given, NULL))
        PyErr_Clear();
    Py_INCREF(plan);
    Run run = {.plan = plan, .layout = layout_for(plan, slots), .slots = slots};
    Tensor *own = NULL;
    PyObject *result = NULL;
    PyObject *end = begin(plan, -1);
    Hidden hidden;
    if (plan->hidden)
        torch.hide(&hidden, plan->hidden);
    int going = run.layout != NULL && (!plan->device.context || !grid_enter(&run)) && !borrow(&run, &own);
    for (int i = 0; going && i < plan->steps_count; i++) {
        const Step *step = &plan->steps[i];
        going = !(end == NULL ? run_step(&run, step) : run_marked(&run, i));
        if (!going && plan->failing != NULL && plan->failing != Py_None)
            blame(plan, i);
        for (int k = 0; going && k < step->dropped; k++)
            drop(&slots[step->drops[k]]);
    }
    if (going && (result = PyTuple_New(plan->outputs_count)) != NULL)
        for (int i = 0; result != NULL && i < plan->outputs_count; i++) {
            PyObject *output = built(&run, &plan->outputs[i]);
            if (output == NULL) {
                failed("make an output");
                Py_CLEAR(result);
            } else
                PyTuple_SET_ITEM(result, i, output);
        }
    if (plan->hidden)
        torch.show(&hidden);
    if (end != NULL)
        finish(end);
    /* The destructors of values may run code of Python's, which may not see an exception that is on its way. */
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    for (int i = 0; i < plan->slots; i++)
        drop(&slots[i]);
    if (run.layout != NULL) {
        give_back(&run, own);
        Py_DECREF(run.layout);
        plan->called = 1;
    }
    if (slots != few)
        PyMem_Free(slots);
    Py_DECREF(plan);
    PyErr_Restore(type, value, trace);
    return result;
}
