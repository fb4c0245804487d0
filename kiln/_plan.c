/* Plans: the steps of a compiled graph, taken from the description that launch/plan.py makes. */

#include "_launch.h"
#include <stdlib.h>
#include <structmember.h>

struct Piece {
    struct Piece *next;
    max_align_t data[];
};

/* Zeroed memory that goes with the plan. */
static void *
piece(Plan *plan, size_t count, size_t size)
{
    struct Piece *made = PyMem_Calloc(1, sizeof(struct Piece) + (count ? count : 1) * size);
    if (made == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    made->next = plan->pieces;
    plan->pieces = made;
    return made->data;
}

/* The parts of a tuple, with one more piece of memory for what they become; -1 on an error. */
#define PARTS(plan, tuple, field, count)                                                                              \
    (PyTuple_Check(tuple) ? ((count) = (int)PyTuple_GET_SIZE(tuple), (field) = piece(plan, count, sizeof(*(field))),   \
                             (field) == NULL ? -1 : 0)                                                                \
                          : (PyErr_SetString(PyExc_TypeError, "a plan is described by tuples"), -1))

static int
take_ints(Plan *plan, PyObject *tuple, int **field, int *count)
{
    if (PARTS(plan, tuple, *field, *count))
        return -1;
    for (int i = 0; i < *count; i++)
        (*field)[i] = (int)PyLong_AsLong(PyTuple_GET_ITEM(tuple, i));
    return PyErr_Occurred() ? -1 : 0;
}

static int
take_refs(Plan *plan, PyObject *tuple, Ref **field, int *count)
{
    if (PARTS(plan, tuple, *field, *count))
        return -1;
    for (int i = 0; i < *count; i++) {
        int kind;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(tuple, i), "ii", &kind, &(*field)[i].index))
            return -1;
        (*field)[i].kind = kind;
    }
    return 0;
}

static int
take_form(PyObject *tuple, Form *form)
{
    if (tuple == Py_None) {
        form->rank = -1;
        return 0;
    }
    return PyArg_ParseTuple(tuple, "iiii", &form->rank, &form->shape, &form->stride, &form->dtype) ? 0 : -1;
}

static int
take_arguments(Plan *plan, PyObject *tuple, Argument **field, int *count)
{
    if (PARTS(plan, tuple, *field, *count))
        return -1;
    for (int i = 0; i < *count; i++) {
        Argument *argument = &(*field)[i];
        const char *kind;
        PyObject *value;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(tuple, i), "sO", &kind, &value))
            return -1;
        argument->kind = *kind == 'o' ? OBJECT : *kind == 'c' ? COMPUTED : *kind == 'l' ? LIST : *kind == 't' ? TUPLE : TENSOR;
        if (argument->kind == OBJECT)
            argument->object = value;
        else if (argument->kind == LIST || argument->kind == TUPLE) {
            if (take_arguments(plan, value, &argument->items, &argument->count))
                return -1;
        } else {
            argument->index = argument->ref.index = (int)PyLong_AsLong(value);
            argument->ref.kind = *kind == 'p' ? PLACE : SLOT;
        }
    }
    return PyErr_Occurred() ? -1 : 0;
}

static int
take_words(Plan *plan, PyObject *tuple, Step *step)
{
    if (PARTS(plan, tuple, step->words, step->worded))
        return -1;
    for (int i = 0; i < step->worded; i++) {
        Word *word = &step->words[i];
        const char *kind;
        PyObject *value;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(tuple, i), "sO", &kind, &value))
            return -1;
        word->kind = *kind;
        switch (*kind) {
        case 'h': case 'o': case 'l':
            if (take_refs(plan, value, &word->refs, &word->count))
                return -1;
            break;
        case 'i': case 'p': case 'P': case 'q': case 'r':
            word->index = (int)PyLong_AsLong(value);
            break;
        case 'n':
            word->value = PyLong_AsLongLong(value);
            break;
        case 'd': case 'D':
            word->real = PyFloat_AsDouble(value);
            break;
        case 'b':
            word->bytes = value;
            break;
        }
    }
    return PyErr_Occurred() ? -1 : 0;
}

static int
take_launch(Plan *plan, PyObject *tuple, Step *step)
{
    PyObject *stages, *buffers, *drops;
    const char *kind;
    if (!PyArg_ParseTuple(tuple, "sOOiO", &kind, &stages, &buffers, &step->sizes, &drops)
        || take_refs(plan, buffers, &step->buffers, &step->buffered)
        || take_ints(plan, drops, &step->drops, &step->dropped) || PARTS(plan, stages, step->stages, step->count))
        return -1;
    for (int i = 0; i < step->count; i++) {
        unsigned long long address;
        Stage *stage = &step->stages[i];
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(stages, i), "Kid", &address, &stage->tasks, &stage->work))
            return -1;
        stage->entry = (Entry)(uintptr_t)address;
    }
    return 0;
}

static int
take_grid(Plan *plan, PyObject *tuple, Step *step)
{
    PyObject *starts, *buffers, *drops;
    const char *kind;
    if (!PyArg_ParseTuple(tuple, "sOOOO", &kind, &starts, &buffers, &step->unaligned, &drops)
        || take_refs(plan, buffers, &step->buffers, &step->buffered)
        || take_ints(plan, drops, &step->drops, &step->dropped) || PARTS(plan, starts, step->starts, step->count))
        return -1;
    for (int i = 0; i < step->count; i++) {
        unsigned long long function;
        Start *start = &step->starts[i];
        PyObject *given;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(starts, i), "KIIiOpp", &function, &start->threads, &start->shared,
                              &start->blocks, &given, &start->table, &start->early)
            || take_ints(plan, given, &start->parameters, &start->given))
            return -1;
        start->function = (void *)(uintptr_t)function;
    }
    return 0;
}

static int
take_call(Plan *plan, PyObject *tuple, Step *step)
{
    PyObject *arguments, *results, *words, *drops;
    unsigned long long native;
    const char *kind;
    if (!PyArg_ParseTuple(tuple, "sOOOOpKOdO", &kind, &step->function, &arguments, &step->names, &results,
                          &step->packed, &native, &words, &step->work, &drops)
        || take_arguments(plan, arguments, &step->arguments, &step->argued) || take_words(plan, words, step)
        || take_ints(plan, drops, &step->drops, &step->dropped) || PARTS(plan, results, step->results, step->resulted))
        return -1;
    step->native = (Native)(uintptr_t)native;
    if (step->names == Py_None)
        step->names = NULL;
    for (int i = 0; i < step->resulted; i++) {
        Result *result = &step->results[i];
        PyObject *form;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(results, i), "ipO", &result->slot, &result->shares, &form)
            || take_form(form, &result->form))
            return -1;
    }
    plan->pure = 0;
    return 0;
}

static int
take_step(Plan *plan, PyObject *tuple, Step *step)
{
    const char *kind = PyUnicode_AsUTF8(PyTuple_GET_ITEM(tuple, 0));
    PyObject *form, *drops;
    if (kind == NULL)
        return -1;
    switch (*kind) {
    case 'l':
        step->kind = LAUNCH;
        return take_launch(plan, tuple, step);
    case 'g':
        step->kind = GRID;
        return take_grid(plan, tuple, step);
    case 'm':
        step->kind = MAKE;
        if (!PyArg_ParseTuple(tuple, "siOO", &kind, &step->slot, &form, &drops))
            return -1;
        break;
    case 's':
        step->kind = SHOW;
        if (!PyArg_ParseTuple(tuple, "siiOiO", &kind, &step->slot, &step->source, &form, &step->offset, &drops))
            return -1;
        break;
    default:
        step->kind = CALL;
        return take_call(plan, tuple, step);
    }
    return take_form(form, &step->form) || take_ints(plan, drops, &step->drops, &step->dropped) ? -1 : 0;
}

static PyObject *
plan_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"steps", "lodged", "outputs", "symbols", "constants", "inputs", "slots",
                            "arena", "numbers", "resolve", "owner", "grain", "device", NULL};
    PyObject *steps, *lodged, *outputs, *symbols, *constants, *numbers, *resolve, *owner;
    int inputs, slots, arena;
    double grain;
    Device device = {0};
    unsigned long long context = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!O!O!iiiOOOd|(iiK)", names, &PyTuple_Type, &steps, &PyTuple_Type,
                                     &lodged, &PyTuple_Type, &outputs, &PyTuple_Type, &symbols, &PyTuple_Type,
                                     &constants, &inputs, &slots, &arena, &numbers, &resolve, &owner, &grain,
                                     &device.type, &device.index, &context))
        return NULL;
    if (!torch.ready)
        return PyErr_Format(PyExc_RuntimeError, "set_torch has not been called");
    Plan *plan = (Plan *)type->tp_alloc(type, 0);
    if (plan == NULL)
        return NULL;
    device.context = (void *)(uintptr_t)context;
    plan->device = device;
    plan->call = plan_call;
    plan->inputs = inputs, plan->slots = slots, plan->arena = arena, plan->grain = grain, plan->pure = 1;
    plan->owner = Py_NewRef(owner), plan->resolve = Py_NewRef(resolve), plan->constants = Py_NewRef(constants);
    plan->description = PyTuple_Pack(2, steps, outputs);
    plan->layouts = PyDict_New();
    if (plan->description == NULL || plan->layouts == NULL
        || take_arguments(plan, outputs, &plan->outputs, &plan->outputs_count)
        || take_refs(plan, symbols, &plan->symbols, &plan->symbols_count)
        || PARTS(plan, lodged, plan->lodged, plan->lodged_count) || PARTS(plan, steps, plan->steps, plan->steps_count))
        goto fail;
    for (int i = 0; i < plan->lodged_count; i++) {
        PyObject *form;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(lodged, i), "iO", &plan->lodged[i].offset, &form)
            || take_form(form, &plan->lodged[i].form))
            goto fail;
    }
    for (int i = 0; i < plan->steps_count; i++)
        if (take_step(plan, PyTuple_GET_ITEM(steps, i), &plan->steps[i]))
            goto fail;
    if (numbers != Py_None && (plan->fixed = layout_new(numbers, plan)) == NULL)
        goto fail;
    return (PyObject *)plan;
fail:
    Py_DECREF(plan);
    return NULL;
}

static int
plan_traverse(Plan *plan, visitproc visit, void *arg)
{
    Py_VISIT(plan->description);
    Py_VISIT(plan->owner);
    Py_VISIT(plan->resolve);
    Py_VISIT(plan->constants);
    Py_VISIT(plan->layouts);
    Py_VISIT(plan->failing);
    return 0;
}

static int
plan_clear(Plan *plan)
{
    plan->steps_count = 0; /* the steps name objects that go */
    Py_CLEAR(plan->description);
    Py_CLEAR(plan->owner);
    Py_CLEAR(plan->resolve);
    Py_CLEAR(plan->layouts);
    Py_CLEAR(plan->fixed);
    Py_CLEAR(plan->failing);
    return 0;
}

static void
plan_dealloc(Plan *plan)
{
    PyObject_GC_UnTrack(plan);
    plan_clear(plan);
    Py_CLEAR(plan->constants);
    Py_CLEAR(plan->title);
    for (struct Piece *next, *at = plan->pieces; at != NULL; at = next) {
        next = at->next;
        PyMem_Free(at);
    }
    Py_TYPE(plan)->tp_free((PyObject *)plan);
}

/* plan.bytes(values): what the arena takes for inputs of these sizes. */
static PyObject *
plan_bytes(Plan *plan, PyObject *values)
{
    if (!PyList_CheckExact(values) || PyList_GET_SIZE(values) != plan->inputs)
        return PyErr_Format(PyExc_TypeError, "bytes takes a list of %d values", plan->inputs);
    Value *slots = PyMem_Calloc(plan->inputs + 1, sizeof(Value));
    if (slots == NULL)
        return PyErr_NoMemory();
    for (int i = 0; i < plan->inputs; i++)
        slots[i].object = PyList_GET_ITEM(values, i);
    Layout *layout = layout_for(plan, slots);
    PyMem_Free(slots);
    if (layout == NULL)
        return NULL;
    PyObject *bytes = PyLong_FromLongLong(layout->numbers[plan->arena]);
    Py_DECREF(layout);
    return bytes;
}

static PyMethodDef plan_methods[] = {
    {"bytes", (PyCFunction)plan_bytes, METH_O, "bytes(values): what the arena takes for a list of inputs"},
    {NULL},
};

static PyMemberDef plan_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Plan, call), READONLY, NULL},
    {"owner", T_OBJECT, offsetof(Plan, owner), READONLY, "what it was made of"},
    {"title", T_OBJECT, offsetof(Plan, title), 0, "what its graph is called"},
    {"failing", T_OBJECT, offsetof(Plan, failing), 0, "failing(step, error): told of the exception of a step; or None"},
    {"pure", T_BOOL, offsetof(Plan, pure), 0, "whether it hides from eager kernels what they leave out, or calls none"},
    {"hidden", T_ULONGLONG, offsetof(Plan, hidden), 0, "the keys that are hidden from its steps"},
    {NULL},
};

static PyObject *
plan_str(Plan *plan)
{
    return plan->owner != NULL ? PyObject_Str(plan->owner) : PyUnicode_FromString("a plan");
}

PyTypeObject PlanType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kiln._launch.Plan",
    .tp_doc = "A compiled graph as a callable: takes the inputs, or one list of them that it empties; gives a tuple.",
    .tp_basicsize = sizeof(Plan),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Plan, call),
    .tp_call = PyVectorcall_Call,
    .tp_str = (reprfunc)plan_str,
    .tp_new = plan_new,
    .tp_traverse = (traverseproc)plan_traverse,
    .tp_clear = (inquiry)plan_clear,
    .tp_dealloc = (destructor)plan_dealloc,
    .tp_members = plan_members,
    .tp_methods = plan_methods,
};

/* The numbers of one set of sizes: given as (numbers, objects). */
Layout *
layout_new(PyObject *given, const Plan *plan)
{
    PyObject *numbers, *objects;
    if (!PyTuple_Check(given) || !PyArg_ParseTuple(given, "O!O!", &PyTuple_Type, &numbers, &PyTuple_Type, &objects))
        return NULL;
    Layout *layout = (Layout *)LayoutType.tp_alloc(&LayoutType, 0);
    if (layout == NULL)
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(numbers);
    layout->objects = Py_NewRef(objects);
    layout->lodged = plan->lodged_count;
    layout->numbers = PyMem_Calloc(count + 1, sizeof(int64_t));
    layout->tensors = PyMem_Calloc(layout->lodged + 1, sizeof(Tensor));
    if (layout->numbers == NULL || layout->tensors == NULL)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count && !PyErr_Occurred(); i++) {
        PyObject *number = PyTuple_GET_ITEM(numbers, i);
        if (PyFloat_CheckExact(number)) { /* kernels take it as the bits of a double */
            double real = PyFloat_AS_DOUBLE(number);
            memcpy(&layout->numbers[i], &real, sizeof real);
            continue;
        }
        layout->numbers[i] = PyLong_AsLongLong(number);
    }
    if (PyErr_Occurred())
        Py_CLEAR(layout);
    return layout;
}

void
layout_forget(Tensor *tensors, int count)
{
    for (int i = 0; i < count; i++)
        if (tensors[i] != NULL) {
            torch.destroy(tensors[i]);
            tensors[i] = NULL;
        }
}

static void
layout_dealloc(Layout *layout)
{
    if (layout->tensors != NULL)
        layout_forget(layout->tensors, layout->lodged);
    PyMem_Free(layout->tensors);
    PyMem_Free(layout->numbers);
    Py_CLEAR(layout->objects);
    Py_TYPE(layout)->tp_free((PyObject *)layout);
}

PyTypeObject LayoutType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "kiln._launch.Layout",
    .tp_doc = "The sizes and places of a plan for one set of sizes of its inputs.",
    .tp_basicsize = sizeof(Layout),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_dealloc = (destructor)layout_dealloc,
};
