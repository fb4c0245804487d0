/* Draws of torch's default generator on the CPU, many at once: the Mersenne Twister over the state that torch shows. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define WORDS 624
#define AHEAD 397

/* The state as torch.get_rng_state() lays it out, as far as it matters here. */
typedef struct {
    uint64_t seed;
    int32_t left, seeded; /* left - 1 words are not drawn yet */
    uint64_t next;
    uint64_t words[WORDS];
} State;

#if defined(__x86_64__) && defined(__GNUC__) && defined(__gnu_linux__)
#define WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDEST
#endif

static inline uint32_t
twisted(uint32_t a, uint32_t b)
{
    return (((a & 0x80000000u) | (b & 0x7fffffffu)) >> 1) ^ ((0u - (b & 1u)) & 0x9908b0dfu);
}

WIDEST static void
refill(uint32_t *words)
{
    for (int i = 0; i < WORDS - AHEAD; i++)
        words[i] = words[i + AHEAD] ^ twisted(words[i], words[i + 1]);
    for (int i = WORDS - AHEAD; i < WORDS - 1; i++)
        words[i] = words[i + AHEAD - WORDS] ^ twisted(words[i], words[i + 1]);
    words[WORDS - 1] = words[AHEAD - 1] ^ twisted(words[WORDS - 1], words[0]);
}

WIDEST static void
temper(const uint32_t *words, uint32_t *out, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        uint32_t y = words[i];
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c5680u;
        y ^= (y << 15) & 0xefc60000u;
        out[i] = y ^ (y >> 18);
    }
}

/* Two words are one number of 53 bits, the first of them above. */
WIDEST static void
compare(const uint32_t *pairs, int64_t count, uint64_t threshold, uint8_t *out)
{
    for (int64_t i = 0; i < count; i++) {
        uint64_t number = ((uint64_t)(pairs[2 * i] & 0x1fffffu) << 32) | pairs[2 * i + 1];
        out[i] = number < threshold;
    }
}

static void
draw(State *state, int64_t count, uint64_t threshold, uint8_t *out)
{
    uint32_t words[WORDS], drawn[WORDS + 1];
    int64_t left = state->left - 1, next = (int64_t)state->next, kept = 0;
    for (int i = 0; i < WORDS; i++)
        words[i] = (uint32_t)state->words[i];
    while (count > 0) {
        if (left == 0) {
            refill(words);
            left = WORDS;
            next = 0;
        }
        int64_t taken = 2 * count - kept < left ? 2 * count - kept : left;
        temper(words + next, drawn + kept, taken);
        int64_t pairs = (taken + kept) / 2;
        compare(drawn, pairs, threshold, out);
        out += pairs;
        count -= pairs;
        kept = (taken + kept) % 2;
        if (kept)
            drawn[0] = drawn[2 * pairs];
        left -= taken;
        next += taken;
    }
    for (int i = 0; i < WORDS; i++)
        state->words[i] = words[i];
    state->left = (int32_t)left + 1;
    state->next = (uint64_t)next;
}

static PyObject *
bernoulli(PyObject *module, PyObject *args)
{
    unsigned long long state, out, threshold;
    long long count;
    if (!PyArg_ParseTuple(args, "KLKK", &state, &count, &threshold, &out))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    draw((State *)(uintptr_t)state, count, threshold, (uint8_t *)(uintptr_t)out);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"bernoulli", bernoulli, METH_VARARGS,
     "bernoulli(state, count, threshold, out): write for each of `count` draws of 53 bits whether it is below "
     "the threshold, and move the state on. `state` and `out` are addresses."},
    {NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "kiln._mersenne", NULL, 0, methods};

PyMODINIT_FUNC
PyInit__mersenne(void)
{
    return PyModule_Create(&definition);
}
