/* Memory for intermediate values: blocks that calls borrow and give back. The GIL guards the list.

   Small blocks are kept, and large ones too: the system takes long to map them. Those between are torch's, which has
   them at hand for the tensors of others while no call needs them. */

#define _GNU_SOURCE
#include "_launch.h"
#include <stdlib.h>
#include <sys/mman.h>

enum { LINE = 64, PAGE = 4096, HUGE_PAGE = 2 << 20, SHARED = 64 << 10, MAPPED = 4 << 20, BYTES = 0 /* torch's number for uint8 */ };

static Block *idle;
static size_t kept, leased, limit = (size_t)1 << 32;

/* Has the system map what is whole huge pages of some memory as such. A page takes it about a microsecond, of 4 KB as
   of 2 MB, and large values are new memory in each call: glibc maps what has more than 32 MB anew. What a first call
   gets has been free for long, though: a host takes whole huge pages back then, and giving them again takes it as long
   as 500 faults, while remains of others, of 4 KB, have stayed. Later calls find what was freed just before. */
void
ask_for_huge_pages(void *memory, size_t size)
{
    uintptr_t first = ((uintptr_t)memory + HUGE_PAGE - 1) & -(uintptr_t)HUGE_PAGE;
    uintptr_t end = ((uintptr_t)memory + size) & -(uintptr_t)HUGE_PAGE;
    if (first < end)
        madvise((void *)first, end - first, MADV_HUGEPAGE);
}

static void
block_free(Block *block)
{
    if (block->size >= MAPPED)
        munmap(block->memory, block->size);
    else if (block->owner != NULL)
        torch.destroy(block->owner);
    else
        free(block->memory);
    free(block);
}

static Block *
block_new(size_t size)
{
    Block *block = malloc(sizeof(Block));
    if (block == NULL)
        return NULL;
    size_t page = size >= MAPPED ? PAGE : LINE;
    *block = (Block){.size = (size + page - 1) / page * page};
    int64_t shape = (int64_t)block->size, stride = 1;
    if (block->size >= MAPPED) {
        block->memory = mmap(NULL, block->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (block->memory == MAP_FAILED)
            block->memory = NULL;
        else
            ask_for_huge_pages(block->memory, block->size);
    } else if (block->size < SHARED)
        block->memory = aligned_alloc(LINE, block->size);
    else if (!torch.empty(1, &shape, &stride, BYTES, 0, 0, &block->owner))
        torch.data_pointer(block->owner, (void **)&block->memory);
    if (block->memory == NULL) {
        if (block->owner != NULL)
            torch.destroy(block->owner);
        free(block);
        return NULL;
    }
    block->serial = (uint64_t)(uintptr_t)block->memory;
    return block;
}

/* A block of at least this size: the wanted one if it is idle, else the smallest, else a new one in place of the
   largest that is too small, so that plans that take turns come to share one block. */
Block *
block_lease(size_t size, uint64_t wanted)
{
    Block **found = NULL, **small = NULL;
    for (Block **at = &idle; *at != NULL; at = &(*at)->next) {
        if ((*at)->size < size) {
            if (small == NULL || (*at)->size > (*small)->size)
                small = at;
        } else if ((*at)->serial == wanted) {
            found = at;
            break;
        } else if (found == NULL || (*at)->size < (*found)->size)
            found = at;
    }
    Block **taken = found != NULL ? found : small, *block = NULL;
    if (taken != NULL) {
        block = *taken;
        *taken = block->next;
        kept -= block->size;
    }
    if (found == NULL) {
        if (block != NULL)
            block_free(block);
        block = block_new(size);
        if (block == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
    }
    leased += block->size;
    return block;
}

void
block_return(Block *block)
{
    leased -= block->size;
    if (kept + block->size > limit || (block->size >= SHARED && block->size < MAPPED)) {
        block_free(block);
        return;
    }
    kept += block->size;
    block->next = idle;
    idle = block;
}

static void
trim(size_t left)
{
    while (idle != NULL && kept > left) {
        Block *block = idle;
        idle = block->next;
        kept -= block->size;
        block_free(block);
    }
}

PyObject *
arena_trim(PyObject *module, PyObject *none)
{
    trim(0);
    Py_RETURN_NONE;
}

PyObject *
arena_limit(PyObject *module, PyObject *bytes)
{
    size_t wanted = PyLong_AsSize_t(bytes);
    if (wanted == (size_t)-1 && PyErr_Occurred())
        return NULL;
    limit = wanted;
    trim(limit);
    Py_RETURN_NONE;
}

PyObject *
arena_sizes(PyObject *module, PyObject *none)
{
    return Py_BuildValue("nn", (Py_ssize_t)kept, (Py_ssize_t)leased);
}
