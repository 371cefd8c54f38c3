/* Compare two blocks of numbers element by element, in one pass over both.
 *
 * The definitions are those of `probe/measure/elementwise.py`, which computes the same without this module where it was
 * not built; only the order in which squares are added differs. Two elements are equal if their values are, or if both
 * are NaN. Differences are taken in double precision, and only of finite elements.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

/* How Python calls this module; `probe/measure/blocks.py` uses no build that is called in another way. */
#define INTERFACE 2

enum { FLOAT32 = 0, BFLOAT16 = 1 };
#define LANES 8

typedef float f4 __attribute__((vector_size(16)));
typedef float f8 __attribute__((vector_size(32)));
typedef int32_t i4 __attribute__((vector_size(16)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef uint32_t u8 __attribute__((vector_size(32)));
typedef uint16_t h8 __attribute__((vector_size(16)));
typedef double d4 __attribute__((vector_size(32)));
typedef int64_t l4 __attribute__((vector_size(32)));

union halves {
    i8 whole;
    f4 of[2];
};

struct found {
    int64_t different, nonfinite;
    double squares, largest;
    uint32_t ulps;
};

/* What compilers make of the plain forms on x86 is half as fast, so each has an intrinsic beside it.
 *
 * FLOAT32, BFLOAT16: load the bits of eight fp32 numbers.
 * UNSIGNED, DOUBLE: the larger of each pair; what the second has is never negative, nor NaN where it counts.
 * WIDEN: four of eight fp32 numbers in double precision.
 * ULPS: from one number to the next the bits count by one, down from zero where the sign is set: numbers of one sign are
 * as far apart as their bits, others as both are from zero. */
#define UNSIGNED_any(one, two) (((one) & (u8)((one) > (two))) | ((two) & ~(u8)((one) > (two))))
#define DOUBLE_any(one, two) ((d4)(((l4)(one) & ((one) > (two))) | ((l4)(two) & ~((one) > (two)))))
#define WIDEN_any(x, half) __builtin_convertvector(((union halves){x}).of[half], d4)
#define ULPS_any(x, y, size_x, size_y)                                                                                   \
    ({                                                                                                                   \
        i8 other = ((x) ^ (y)) >> 31, apart = (size_x) - (((size_y) ^ other) - other), flip = (apart >> 31) & ~other;    \
        (u8)((apart ^ flip) - flip);                                                                                     \
    })
#define FLOAT32_any(bits, data, i) memcpy(&bits, (const float *)(data) + (i), sizeof bits)
#define BFLOAT16_any(bits, data, i)                                                                                      \
    do {                                                                                                                 \
        h8 half;                                                                                                         \
        memcpy(&half, (const uint16_t *)(data) + (i), sizeof half);                                                      \
        bits = (i8)(__builtin_convertvector(half, u8) << 16);                                                            \
    } while (0)
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define FLOAT32_avx2 FLOAT32_any
#define BFLOAT16_avx2(bits, data, i)                                                                                     \
    bits = (i8)_mm256_slli_epi32(                                                                                        \
        _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)((const uint16_t *)(data) + (i)))), 16)
#define UNSIGNED_avx2(one, two) ((u8)_mm256_max_epu32((__m256i)(one), (__m256i)(two)))
#define DOUBLE_avx2(one, two) ((d4)_mm256_max_pd((__m256d)(one), (__m256d)(two)))
#define WIDEN_avx2(x, half) ((d4)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)(x), half)))
#define ULPS_avx2(x, y, size_x, size_y)                                                                                  \
    ((u8)_mm256_blendv_ps((__m256)_mm256_abs_epi32((__m256i)((size_x) - (size_y))), (__m256)((size_x) + (size_y)),       \
                          (__m256)((x) ^ (y))))
#endif

/* n is a multiple of LANES, and at most 2^30: lanes count in 32 bits. With ALL, every element is tested for being finite;
 * without, the numbers are right if `nonfinite` comes out zero. A macro, for a compiler lowers the vectors of an inline
 * function before it knows for which processor. */
#define DEFINE_COMPARE(NAME, TARGET, SET, LOAD, ALL)                                                                     \
    TARGET static void NAME(const void *a, const void *b, int64_t n, struct found *out)                                  \
    {                                                                                                                    \
        const i8 magnitude = (i8){0} + 0x7fffffff, infinite = (i8){0} + 0x7f800000;                                      \
        const l4 positive = (l4){0} + INT64_MAX;                                                                         \
        i8 different = {0}, nonfinite = {0};                                                                             \
        u8 ulps = {0}, most_size = {0};                                                                                  \
        d4 squares[2] = {{0}}, largest[2] = {{0}};                                                                       \
        for (int64_t i = 0; i < n; i += LANES) {                                                                         \
            i8 x, y;                                                                                                     \
            LOAD(x, a, i);                                                                                               \
            LOAD(y, b, i);                                                                                               \
            i8 size_x = x & magnitude, size_y = y & magnitude;                                                           \
            i8 finite = (size_x < infinite) & (size_y < infinite);                                                       \
            if (ALL) {                                                                                                   \
                i8 equal = ((f8)x == (f8)y) | ((size_x > infinite) & (size_y > infinite));                               \
                different -= ~equal;                                                                                     \
                nonfinite -= ~equal & ~finite;                                                                           \
            } else {                                                                                                     \
                different -= (i8)((f8)x != (f8)y);                                                                       \
                most_size = UNSIGNED_##SET(UNSIGNED_##SET(most_size, (u8)size_x), (u8)size_y);                           \
            }                                                                                                            \
            u8 apart = ULPS_##SET(x, y, size_x, size_y);                                                                 \
            ulps = UNSIGNED_##SET(ulps, ALL ? apart & (u8)finite : apart);                                               \
            d4 delta[2] = {WIDEN_##SET(x, 0) - WIDEN_##SET(y, 0), WIDEN_##SET(x, 1) - WIDEN_##SET(y, 1)};                \
            i4 keep[2];                                                                                                  \
            memcpy(keep, &finite, sizeof keep);                                                                          \
            for (int half = 0; half < 2; half++) {                                                                       \
                l4 size = (l4)delta[half] & positive; /* in the order of the numbers, for none has a sign */             \
                if (ALL)                                                                                                 \
                    size &= __builtin_convertvector(keep[half], l4);                                                     \
                squares[half] += (d4)size * (d4)size;                                                                    \
                largest[half] = DOUBLE_##SET(largest[half], (d4)size);                                                   \
            }                                                                                                            \
        }                                                                                                                \
        for (int lane = 0; lane < LANES; lane++) {                                                                       \
            double most = largest[lane / 4][lane % 4];                                                                   \
            out->different += different[lane];                                                                           \
            out->nonfinite += ALL ? nonfinite[lane] : most_size[lane] >= 0x7f800000;                                     \
            out->squares += squares[lane / 4][lane % 4];                                                                 \
            out->largest = most > out->largest ? most : out->largest;                                                    \
            out->ulps = ulps[lane] > out->ulps ? ulps[lane] : out->ulps;                                                 \
        }                                                                                                                \
    }

#define DEFINE_FOR(SET, TARGET)                                                                                          \
    DEFINE_COMPARE(finite_float32_##SET, TARGET, SET, FLOAT32_##SET, 0)                                                  \
    DEFINE_COMPARE(finite_bfloat16_##SET, TARGET, SET, BFLOAT16_##SET, 0)                                                \
    DEFINE_COMPARE(all_float32_##SET, TARGET, SET, FLOAT32_##SET, 1)                                                     \
    DEFINE_COMPARE(all_bfloat16_##SET, TARGET, SET, BFLOAT16_##SET, 1)                                                   \
    static void compare_##SET(const void *a, const void *b, int64_t n, int type, struct found *out)                      \
    {                                                                                                                    \
        struct found before = *out;                                                                                      \
        (type == BFLOAT16 ? finite_bfloat16_##SET : finite_float32_##SET)(a, b, n, out);                                 \
        if (out->nonfinite == before.nonfinite)                                                                          \
            return;                                                                                                      \
        *out = before;                                                                                                   \
        (type == BFLOAT16 ? all_bfloat16_##SET : all_float32_##SET)(a, b, n, out);                                       \
    }

DEFINE_FOR(any, )
static void (*compare_best)(const void *, const void *, int64_t, int, struct found *) = compare_any;
#if defined(__x86_64__) && defined(__GNUC__)
DEFINE_FOR(avx2, __attribute__((target("avx2"))))
#endif

static uint32_t bits_at(const void *data, int64_t i, int type)
{
    return type == BFLOAT16 ? (uint32_t)((const uint16_t *)data)[i] << 16 : ((const uint32_t *)data)[i];
}

/* The difference of two elements, 0 where one of them is not finite. */
static double delta_at(const void *a, const void *b, int64_t i, int type)
{
    uint32_t bits[2] = {bits_at(a, i, type), bits_at(b, i, type)};
    float x, y;
    memcpy(&x, &bits[0], sizeof x);
    memcpy(&y, &bits[1], sizeof y);
    if ((bits[0] & 0x7f800000) == 0x7f800000 || (bits[1] & 0x7f800000) == 0x7f800000)
        return 0;
    return fabs((double)x - (double)y);
}

static int unequal_at(const void *a, const void *b, int64_t i, int type)
{
    uint32_t bits[2] = {bits_at(a, i, type), bits_at(b, i, type)};
    float x, y;
    memcpy(&x, &bits[0], sizeof x);
    memcpy(&y, &bits[1], sizeof y);
    return x != y && !(x != x && y != y);
}

/* The first element that differs by the largest difference; where that is 0, the first that is not equal. */
static int64_t place(const void *a, const void *b, int64_t n, int type, double largest)
{
    enum { PART = 4096 };
    int64_t i = 0, item = type == BFLOAT16 ? 2 : 4;
    if (largest == 0) {
        while (i < n && !unequal_at(a, b, i, type))
            i++;
        return i;
    }
    for (; i + PART <= n; i += PART) {
        struct found part = {0, 0, 0, 0, 0};
        compare_best((const char *)a + i * item, (const char *)b + i * item, PART, type, &part);
        if (part.largest == largest)
            break;
    }
    while (i < n && delta_at(a, b, i, type) != largest)
        i++;
    return i;
}

static PyObject *elementwise(PyObject *module, PyObject *args)
{
    Py_buffer a, b;
    int type;
    double known;
    if (!PyArg_ParseTuple(args, "y*y*id:compare", &a, &b, &type, &known))
        return NULL;
    int item = type == BFLOAT16 ? 2 : 4;
    int fits = a.len == b.len && a.len % item == 0 && a.len / item <= 1 << 30 && (type == FLOAT32 || type == BFLOAT16);
    struct found found = {0, 0, 0, 0, 0};
    int64_t at = -1;
    if (fits) {
        PyThreadState *state = PyEval_SaveThread();
        if (memcmp(a.buf, b.buf, a.len) != 0) {
            int64_t n = a.len / item, most = n / LANES * LANES;
            compare_best(a.buf, b.buf, most, type, &found);
            if (most < n) {
                char rest[2][4 * LANES] = {{0}};
                memcpy(rest[0], (const char *)a.buf + most * item, (n - most) * item);
                memcpy(rest[1], (const char *)b.buf + most * item, (n - most) * item);
                compare_best(rest[0], rest[1], LANES, type, &found);
            }
            if (found.different && found.largest > known)
                at = place(a.buf, b.buf, n, type, found.largest);
        }
        PyEval_RestoreThread(state);
    }
    PyBuffer_Release(&a);
    PyBuffer_Release(&b);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "compare: the blocks have other sizes, or the type is unknown.");
        return NULL;
    }
    return Py_BuildValue("LLddIL", (long long)found.different, (long long)found.nonfinite, found.squares, found.largest,
                         type == BFLOAT16 ? found.ulps >> 16 : found.ulps, (long long)at);
}

static PyMethodDef methods[] = {
    {"compare", elementwise, METH_VARARGS, 
     "compare(a, b, type, known) -> (different, non-finite, squares, largest, ulps, at)\n\n"
     "Compare two blocks of fp32 (type 0) or bf16 (1) of the same size: number of elements that differ, of those that are\n"
     "not finite among them, sum of squared differences, largest difference, largest distance in units in the last place;\n"
     "and, if the largest difference is above `known`, the place of the first element that has it, or of the first unequal\n"
     "one where it is 0; else -1. Raises ValueError where the blocks have other sizes, or the type is unknown."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_elementwise", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__elementwise(void)
{
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("avx2"))
        compare_best = compare_avx2;
#endif
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
