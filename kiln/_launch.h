/* What the files of the launcher share: torch's functions, memory, plans and what they are made of. */

#ifndef KILN_LAUNCH_H
#define KILN_LAUNCH_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef void *Tensor; /* torch's handle: the address of an at::Tensor */
typedef void (*Entry)(void **buffers, const int64_t *sizes, int64_t *status, int64_t begin, int64_t end);
/* Any of torch's C functions: numbers and addresses in the order given, floating-point numbers in theirs. On the
   machines named in launch/native.py either kind has registers of its own, and more arguments than a function takes
   are not looked at. */
#define W int64_t
typedef int32_t (*Native)(W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, double, double,
                          double, double, double, double, double, double);
#undef W

/* An object of torch's that takes two words. */
typedef struct {
    uint64_t words[4];
} Hidden;

/* Found by launch/native.py in torch's own libraries. */
typedef struct {
    int32_t (*data_pointer)(Tensor, void **);
    int32_t (*sizes)(Tensor, int64_t **);
    int32_t (*strides)(Tensor, int64_t **);
    int32_t (*storage_offset)(Tensor, int64_t *);
    int32_t (*dim)(Tensor, int64_t *);
    int32_t (*dtype)(Tensor, int32_t *);
    int32_t (*empty)(int64_t rank, const int64_t *, const int64_t *, int32_t dtype, int32_t device, int32_t index,
                     Tensor *);
    int32_t (*from_memory)(void *, int64_t rank, const int64_t *, const int64_t *, int64_t offset, int32_t dtype,
                           int32_t device, int32_t index, Tensor *, int32_t layout, const uint8_t *, int64_t);
    int32_t (*view)(Tensor, int64_t rank, const int64_t *, const int64_t *, int64_t offset, Tensor *);
    int32_t (*copy)(Tensor, Tensor, int32_t);
    int32_t (*clone)(Tensor, Tensor *);
    int32_t (*destroy)(Tensor);
    int32_t (*storage_size)(Tensor, int64_t *); /* in bytes */
    PyObject *(*wrap)(Tensor);
    void (*parallel)(void (*body)(void *), void *data, unsigned threads, unsigned flags);
    int (*max_threads)(void);
    int (*thread_number)(void);
    int (*team_size)(void);
    Py_ssize_t offset;   /* of the tensor's handle in its Python object */
    PyTypeObject *type;  /* torch.Tensor */
    int ready;
    int32_t (*defined)(Tensor, bool *);
    void (*hide)(Hidden *, uint64_t keys); /* ops of this thread leave parts of calls out, up to `show` */
    void (*show)(Hidden *);
} Torch;

extern Torch torch;

/* Memory that calls borrow for their intermediate values. Equal serials mean equal addresses. */
typedef struct Block {
    struct Block *next;
    char *memory;
    size_t size;
    uint64_t serial;
    Tensor owner; /* of the memory, where it is torch's */
} Block;

void ask_for_huge_pages(void *memory, size_t size);
Block *block_lease(size_t size, uint64_t wanted);
void block_return(Block *);
PyObject *arena_trim(PyObject *, PyObject *);
PyObject *arena_limit(PyObject *, PyObject *);
PyObject *arena_sizes(PyObject *, PyObject *);
PyObject *set_products(PyObject *, PyObject *);

/* Numbers stand in a table of the layout; shapes and strides are `rank` numbers from a place in it. */
typedef struct {
    int rank, shape, stride, dtype;
} Form;

/* A tensor: a slot, or the tensor at a place in the arena. */
typedef struct {
    enum { SLOT, PLACE } kind;
    int index;
} Ref;

/* Tasks that may run at once; a stage starts when the one before it has ended. */
typedef struct {
    Entry entry;
    int tasks;   /* where their number stands */
    double work; /* operations of one task */
} Stage;

/* A function on a GPU. What its parameters are: a buffer of the step (0, 1, …), the number at a place (-2, -3, …), or
   nothing (-1). All of them are words of one parameter where it takes a table. */
typedef struct {
    void *function;
    void *other; /* for buffers that are not aligned; NULL until one is met */
    unsigned threads, shared; /* of a block, and bytes of its memory */
    int blocks; /* where their number stands */
    int given, *parameters, table;
    int early; /* whether it may be started before what is before it has ended: it waits for that itself */
} Start;

/* Where the memory of a plan is: torch's numbers for the device, and the driver's context there; type 0: the CPU. */
typedef struct {
    int type, index;
    void *context;
} Device;

/* An argument of a Python call: an object of the plan or of the layout, a tensor, or a list or tuple of these. */
typedef struct Argument {
    enum { OBJECT, COMPUTED, TENSOR, LIST, TUPLE } kind;
    PyObject *object;
    Ref ref;
    int index, count;
    struct Argument *items;
} Argument;

/* An argument of a C function. */
typedef struct {
    char kind; /* see launch/shims.py */
    int index, count;
    Ref *refs;
    int64_t value;
    double real;
    PyObject *bytes;
} Word;

/* A result of a call: where it goes, and the layout that kernels take for granted; rank -1 where none do. */
typedef struct {
    int slot; /* -1: nobody wants it */
    int shares; /* whether it may lie in the memory of an argument */
    Form form;
} Result;

typedef struct {
    enum { LAUNCH, GRID, MAKE, SHOW, CALL } kind;
    int *drops; /* slots whose values nobody needs after this step */
    int dropped;
    /* LAUNCH */
    Stage *stages;
    Ref *buffers; /* PLACE: the index is the number of an offset in the arena */
    int count, buffered, sizes;
    /* GRID: with buffers as above */
    Start *starts;
    PyObject *unaligned; /* gives the functions for buffers that are not aligned */
    /* MAKE, SHOW */
    int slot, source, offset;
    Form form;
    /* CALL */
    PyObject *function, *names;
    Native native; /* NULL: through Python */
    Word *words;
    Argument *arguments;
    Result *results;
    int worded, argued, resulted, packed; /* packed: the results come as a sequence */
    double work;
} Step;

/* A tensor in the arena that C functions read or write. */
typedef struct {
    int offset;
    Form form;
} Lodged;

/* The numbers of a plan for one set of sizes, and its tensors in one block of memory. */
typedef struct {
    PyObject_HEAD
    int64_t *numbers;
    PyObject *objects;
    Tensor *tensors;
    int lodged, busy;
    uint64_t serial; /* of the block in which the tensors lie */
} Layout;

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *description; /* what it was made of: owns all objects that the steps name */
    PyObject *owner, *resolve, *layouts;
    Layout *fixed; /* where no size varies */
    Step *steps;
    Lodged *lodged;
    Argument *outputs;
    Ref *symbols; /* kind: a size of an input, by dimension; -1: the input itself; less: a stride */
    PyObject *constants; /* in the slots after the inputs */
    PyObject *title;     /* of its graph, for people */
    PyObject *failing;   /* failing(step, error) is told of the exception of a step; or NULL */
    struct Piece *pieces; /* memory of the above */
    int steps_count, lodged_count, outputs_count, symbols_count, inputs, slots, arena;
    double grain;
    Device device;
    char called; /* its first call has ended */
    char pure;   /* no step calls an eager kernel, or what those leave out is hidden from them */
    unsigned long long hidden;
} Plan;

extern PyTypeObject PlanType, LayoutType;

/* marker(plan, step) is called before a step, and before the first with -1, and gives what is called after it; NULL
   while no profile is on. */
extern PyObject *marker;

int run_stages(const Step *, double grain, void **buffers, const int64_t *numbers, int64_t *status);
Layout *layout_new(PyObject *given, const Plan *);
void layout_forget(Tensor *tensors, int count);
PyObject *plan_call(PyObject *, PyObject *const *, size_t, PyObject *);

/* A call of a plan */

static const double RELEASE_WORK = 200000.0; /* operations worth more than letting go of the GIL */

typedef struct {
    PyObject *object; /* a tensor, or another value of Python's */
    Tensor handle;    /* a tensor that Python does not know, in place of an object */
} Value;

typedef struct {
    Plan *plan;
    Layout *layout;
    Block *block;
    Value *slots;
    Tensor *tensors; /* those in the arena that were asked for */
    Block own;       /* the arena on a GPU */
    Tensor arena;    /* what owns its memory */
    void *stream;
} Run;

PyObject *failed(const char *what);
void drop(Value *);
Tensor tensor_in(const Value *);
Tensor tensor_at(Run *, Ref);
PyObject *built(Run *, const Argument *);
Tensor empty(const Run *, const Form *);
int call(Run *, const Step *);
Layout *layout_for(Plan *, const Value *slots);
int addresses_of(Run *, const Step *, void **buffers);

/* Plans on a GPU */

int grid_enter(Run *);
int grid_start(Run *, const Step *);
int grid_borrow(Run *, size_t size);
PyObject *grid_set_driver(PyObject *, PyObject *);
PyObject *grid_lend(PyObject *, PyObject *);
PyObject *grid_addresses(PyObject *, PyObject *);
PyObject *grid_aliases(PyObject *, PyObject *);

#endif
