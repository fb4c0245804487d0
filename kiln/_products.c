/* Large products of float32 by oneDNN, whose function for them torch's library has beside those of `mm`: it writes where
   it is told to, and takes matrices that lie either way. The arguments are those of torch's C functions, which get all
   other products; those of vectors, too, for which oneDNN frees memory of its own that it wrote beyond. */

#include "_launch.h"

/* Torch's number for float32; rows, columns and summands at least; multiplications from which it gains. */
enum { FLOAT = 6, FEWEST = 16, LEAST = 1 << 22 };

typedef struct {
    const int64_t *sizes, *strides;
} Matrix;

static struct {
    int32_t (*mm)(Tensor, Tensor, Tensor);
    int32_t (*addmm)(Tensor, Tensor, Tensor, Tensor, double, double);
    void (*multiply)(Tensor, Tensor, Tensor, float, float); /* a, b, what a x b is written or added to, the last by how much */
} torchs;

/* Whether a tensor is a matrix of float32 without gaps, by rows or, if it may be, by columns. */
static int
is_dense(Tensor tensor, Matrix *matrix, int either_way)
{
    int64_t rank, *sizes, *strides;
    int32_t dtype;
    if (torch.dtype(tensor, &dtype) || dtype != FLOAT || torch.dim(tensor, &rank) || rank != 2 ||
        torch.sizes(tensor, &sizes) || torch.strides(tensor, &strides))
        return 0;
    *matrix = (Matrix){sizes, strides};
    return (strides[1] == 1 && strides[0] == sizes[1]) || (either_way && strides[0] == 1 && strides[1] == sizes[0]);
}

static int
is_large(Tensor out, Tensor a, Tensor b, Matrix *result)
{
    Matrix left, right;
    if (!is_dense(out, result, 0) || !is_dense(a, &left, 1) || !is_dense(b, &right, 1))
        return 0;
    int64_t rows = result->sizes[0], columns = result->sizes[1], summed = right.sizes[0];
    return left.sizes[0] == rows && left.sizes[1] == summed && right.sizes[1] == columns && rows >= FEWEST &&
           columns >= FEWEST && summed >= FEWEST && (double)rows * (double)columns * (double)summed >= LEAST;
}

static int32_t
mm(Tensor out, Tensor a, Tensor b)
{
    Matrix result;
    if (!is_large(out, a, b, &result))
        return torchs.mm(out, a, b);
    torchs.multiply(a, b, out, 0, 1);
    return 0;
}

static int32_t
addmm(Tensor out, Tensor to, Tensor a, Tensor b, double beta, double alpha)
{
    Matrix result, before;
    void *there, *here;
    if (beta != 1 || alpha != 1 || !is_large(out, a, b, &result) || !is_dense(to, &before, 1) ||
        before.sizes[0] != result.sizes[0] || before.sizes[1] != result.sizes[1] ||
        torch.data_pointer(to, &there) || torch.data_pointer(out, &here))
        return torchs.addmm(out, to, a, b, beta, alpha);
    if (here != there && torch.copy(out, to, 0))
        return 1;
    torchs.multiply(a, b, out, 1, 1);
    return 0;
}

/* set_products(mm, addmm, multiply): addresses in torch's library, for those of what stands for the first two. */
PyObject *
set_products(PyObject *module, PyObject *args)
{
    unsigned long long given[3];
    if (!PyArg_ParseTuple(args, "KKK", given, given + 1, given + 2))
        return NULL;
    torchs.mm = (void *)(uintptr_t)given[0];
    torchs.addmm = (void *)(uintptr_t)given[1];
    torchs.multiply = (void *)(uintptr_t)given[2];
    return Py_BuildValue("KK", (unsigned long long)(uintptr_t)mm, (unsigned long long)(uintptr_t)addmm);
}
