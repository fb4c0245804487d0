/* Values of a call of a plan, and eager kernels: through torch's C functions, or through Python. */

#include "_launch.h"

enum { WORDS = 24, REALS = 8, HELD = 64, LARGE = 1 << 19 };

PyObject *
failed(const char *what)
{
    if (!PyErr_Occurred())
        PyErr_Format(PyExc_RuntimeError, "torch cannot %s", what);
    return NULL;
}

void
drop(Value *value)
{
    if (value->handle != NULL) {
        torch.destroy(value->handle);
        value->handle = NULL;
    }
    Py_CLEAR(value->object);
}

Tensor
tensor_in(const Value *value)
{
    if (value->handle != NULL || value->object == NULL || value->object == Py_None)
        return value->handle;
    return (char *)value->object + torch.offset;
}

static Tensor
lodge(const Run *run, int index)
{
    const Lodged *lodged = &run->plan->lodged[index];
    const int64_t *numbers = run->layout->numbers;
    const Form *form = &lodged->form;
    Tensor made = NULL;
    const Device *device = &run->plan->device;
    if (torch.from_memory(run->block->memory + numbers[lodged->offset], form->rank, numbers + form->shape,
                          numbers + form->stride, 0, form->dtype, device->type, device->index, &made, 0, NULL, 0))
        failed("make a tensor of memory");
    return made;
}

/* The tensor that a C function gets: NULL without an error for None. */
Tensor
tensor_at(Run *run, Ref ref)
{
    if (ref.kind == SLOT)
        return tensor_in(&run->slots[ref.index]);
    if (run->tensors[ref.index] == NULL)
        run->tensors[ref.index] = lodge(run, ref.index);
    return run->tensors[ref.index];
}

/* A handle as an object of Python's; the handle is used up. */
static PyObject *
wrapped(Tensor handle)
{
    PyObject *object = torch.wrap(handle);
    torch.destroy(handle);
    return object;
}

/* The object that a Python function gets; a new reference. */
static PyObject *
object_at(Run *run, Ref ref)
{
    if (ref.kind == PLACE) {
        /* One of its own: Python keeps the object of a tensor for as long as anybody holds the tensor. */
        Tensor made = lodge(run, ref.index);
        return made == NULL ? NULL : wrapped(made);
    }
    Value *value = &run->slots[ref.index];
    if (value->handle != NULL) {
        value->object = wrapped(value->handle);
        value->handle = NULL;
    }
    return Py_XNewRef(value->object);
}

PyObject *
built(Run *run, const Argument *argument)
{
    switch (argument->kind) {
    case OBJECT:
        return Py_NewRef(argument->object);
    case COMPUTED:
        return Py_NewRef(PyTuple_GET_ITEM(run->layout->objects, argument->index));
    case TENSOR:
        return object_at(run, argument->ref);
    default:
        break;
    }
    int list = argument->kind == LIST;
    PyObject *made = list ? PyList_New(argument->count) : PyTuple_New(argument->count);
    for (int i = 0; made != NULL && i < argument->count; i++) {
        PyObject *item = built(run, &argument->items[i]);
        if (item == NULL)
            Py_CLEAR(made);
        else if (list)
            PyList_SET_ITEM(made, i, item);
        else
            PyTuple_SET_ITEM(made, i, item);
    }
    return made;
}

Tensor
empty(const Run *run, const Form *form)
{
    const int64_t *numbers = run->layout->numbers;
    Tensor made = NULL;
    const Device *device = &run->plan->device;
    if (torch.empty(form->rank, numbers + form->shape, numbers + form->stride, form->dtype, device->type,
                    device->index, &made))
        failed("make a tensor");
    else if (!device->type && run->plan->called) {
        int64_t elements = 1, bytes;
        void *memory;
        for (int i = 0; i < form->rank; i++)
            elements *= numbers[form->shape + i];
        if (elements >= LARGE && !torch.storage_size(made, &bytes) && !torch.data_pointer(made, &memory))
            ask_for_huge_pages(memory, (size_t)bytes);
    }
    return made;
}

/* Eager kernels */

/* Whether elements lie elsewhere than the plan has it, or are of another dtype. */
static int
lies_elsewhere(const Run *run, Tensor tensor, const Form *form)
{
    const int64_t *shape = run->layout->numbers + form->shape, *stride = run->layout->numbers + form->stride;
    int64_t rank, *sizes, *strides;
    int32_t dtype;
    if (torch.dtype(tensor, &dtype))
        return 0;
    int elsewhere = dtype != form->dtype;
    if (torch.dim(tensor, &rank) || rank != form->rank || torch.sizes(tensor, &sizes) || torch.strides(tensor, &strides))
        return 0;
    for (int i = 0; i < rank; i++) {
        if (sizes[i] != shape[i] || sizes[i] == 0)
            return 0;
        elsewhere |= sizes[i] != 1 && strides[i] != stride[i];
    }
    return elsewhere;
}

/* A result of an eager kernel as the plan has it: where it lies otherwise, or where an eager kernel gave back what
   lies in the arena, it is copied. */
static int
settle(const Run *run, const Result *result, Value *value)
{
    if (value->handle == NULL && (value->object == NULL || !PyObject_TypeCheck(value->object, torch.type)))
        return 0;
    Tensor tensor = tensor_in(value), made = NULL;
    void *address;
    int elsewhere = result->form.rank >= 0 && lies_elsewhere(run, tensor, &result->form), inside = 0;
    if (run->block != NULL && !result->shares && !torch.data_pointer(tensor, &address))
        inside = (char *)address >= run->block->memory && (char *)address < run->block->memory + run->block->size;
    if (!elsewhere && !inside)
        return 0;
    if (elsewhere) {
        made = empty(run, &result->form);
        if (made == NULL || torch.copy(made, tensor, 0))
            failed("copy a tensor");
    } else if (torch.clone(tensor, &made))
        failed("copy a tensor");
    drop(value);
    value->handle = made;
    return PyErr_Occurred() ? -1 : 0;
}

static int
call_python(Run *run, const Step *step)
{
    PyObject *arguments[step->argued + 1], *result = NULL;
    arguments[0] = NULL;
    int count = 0, status = -1;
    for (; count < step->argued; count++)
        if ((arguments[count] = built(run, &step->arguments[count])) == NULL) {
            failed("make an argument");
            goto end;
        }
    Py_ssize_t named = step->names != NULL ? PyTuple_GET_SIZE(step->names) : 0;
    result = PyObject_Vectorcall(step->function, arguments, step->argued - named, step->names);
end:
    for (int i = 0; i < count; i++)
        Py_DECREF(arguments[i]);
    if (result == NULL)
        return -1;
    for (int i = 0; i < step->resulted; i++) {
        if (step->results[i].slot < 0)
            continue;
        Value *value = &run->slots[step->results[i].slot];
        value->object = step->packed ? PySequence_GetItem(result, i) : Py_NewRef(result);
        if (value->object == NULL || settle(run, &step->results[i], value))
            goto done;
    }
    status = 0;
done:
    Py_DECREF(result);
    return status;
}

/* A result of a C function, as a value. */
static int
take(Run *run, const Result *result, Tensor made, int number)
{
    bool defined = true;
    Value *value = result->slot < 0 ? NULL : &run->slots[result->slot];
    if (number) {
        if (value != NULL)
            value->object = PyLong_FromLongLong((int64_t)(intptr_t)made);
        return value != NULL && value->object == NULL ? -1 : 0;
    }
    if (made == NULL)
        return 0;
    if (value == NULL || torch.defined(made, &defined) || !defined) {
        torch.destroy(made);
        if (value != NULL)
            value->object = Py_NewRef(Py_None);
        return 0;
    }
    value->handle = made;
    return settle(run, result, value);
}

static int
call_native(Run *run, const Step *step)
{
    unsigned numbered = 0; /* results that are numbers, as bits */
    int64_t given[WORDS] = {0}, *numbers = run->layout->numbers;
    double reals[REALS] = {0};
    Tensor held[HELD], made[WORDS] = {0};
    void *pointers[WORDS];
    int floating = 0, taken = 0;
    for (int i = 0, place = 0; i < step->worded; i++) {
        const Word *word = &step->words[i];
        int64_t value = 0;
        switch (word->kind) {
        case 'h': case 'o': case 'l':
            value = (int64_t)(uintptr_t)(held + taken);
            for (int k = 0; k < word->count; k++) {
                held[taken] = tensor_at(run, word->refs[k]);
                if (held[taken] == NULL && PyErr_Occurred())
                    return -1;
                if (held[taken] == NULL && word->kind != 'o') /* None for a tensor: Python knows what is meant */
                    return call_python(run, step);
                taken++;
            }
            if (word->kind == 'h')
                value = (int64_t)(uintptr_t)held[taken - 1];
            else if (word->kind == 'o' && (word->count == 0 || held[taken - 1] == NULL))
                value = 0;
            break;
        case 'i':
            value = numbers[word->index];
            break;
        case 'p':
            value = (int64_t)(uintptr_t)(numbers + word->index);
            break;
        case 'P':
            pointers[place] = numbers + word->index;
            value = (int64_t)(uintptr_t)(pointers + place);
            break;
        case 'n':
            value = word->value;
            break;
        case 'b':
            value = (int64_t)(uintptr_t)PyBytes_AS_STRING(word->bytes);
            break;
        case 'D':
            value = (int64_t)(uintptr_t)&word->real;
            break;
        case 'q':
            numbered |= 1u << word->index; /* fall through */
        case 'r':
            value = (int64_t)(uintptr_t)(made + word->index);
            break;
        case 'd':
            reals[floating++] = word->real;
            continue;
        }
        given[place++] = value;
    }
    int32_t status;
    PyThreadState *state = step->work > RELEASE_WORK ? PyEval_SaveThread() : NULL;
    int64_t *g = given;
    double *r = reals;
    status = step->native(g[0], g[1], g[2], g[3], g[4], g[5], g[6], g[7], g[8], g[9], g[10], g[11], g[12], g[13],
                          g[14], g[15], g[16], g[17], g[18], g[19], g[20], g[21], g[22], g[23], r[0], r[1], r[2],
                          r[3], r[4], r[5], r[6], r[7]);
    if (state != NULL)
        PyEval_RestoreThread(state);
    if (status) { /* the exception as eager has it */
        if (!call_python(run, step))
            PyErr_SetString(PyExc_RuntimeError, "an eager kernel failed that works when it is called again");
        return -1;
    }
    for (int i = 0; i < WORDS; i++) {
        int number = numbered >> i & 1;
        if (i < step->resulted && take(run, &step->results[i], made[i], number))
            status = -1;
        else if (i >= step->resulted && made[i] != NULL && !number)
            torch.destroy(made[i]);
    }
    return status;
}

int
call(Run *run, const Step *step)
{
    return step->native != NULL ? call_native(run, step) : call_python(run, step);
}
