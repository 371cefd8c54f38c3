/* Reduce a tensor in host memory in one pass: sums, the sketch, the samples and the count of what is not finite.
 *
 * The definitions are those of `probe/capture/summary.py`, which computes the same without this module where it was not
 * built: S_j = sum over i = j (mod k) of sign(i / k) x_i, one sign per row of k elements (SplitMix64's finaliser).
 * Products and sums are in single precision within a block of 16 rows and in double precision across blocks; double
 * throughout for double input. An element is read once from memory, and a block stays in the first-level cache; where a
 * copy is wanted too, it is written while the block is there, past the caches, which the training needs for itself.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#define K 251

/* What `summary.py` expects; counted up when `reduce` is called in another way, for a build may be older than it. */
#define INTERFACE 3
/* Rows whose sums are kept in single precision: 16 cost 10 % of time against 64, and halve the rounding. */
#define BLOCK 16

enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT64 = 2 };

typedef float f8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef double d4 __attribute__((vector_size(32)));
typedef int64_t l4 __attribute__((vector_size(32)));

/* Copy a block; `to` may be NULL. Streaming stores need 16-byte places, which all blocks but the last fill. */
static inline void copy_block(void *to, const void *from, size_t nbytes)
{
    if (to == NULL)
        return;
#if defined(__SSE2__)
    if ((uintptr_t)to % 16 == 0) {
        size_t whole = nbytes / 16;
        for (size_t i = 0; i < whole; i++)
            _mm_stream_si128((__m128i *)to + i, _mm_loadu_si128((const __m128i *)from + i));
        memcpy((char *)to + whole * 16, (const char *)from + whole * 16, nbytes % 16);
        return;
    }
#endif
    memcpy(to, from, nbytes);
}

static inline void *after(void *place, size_t nbytes)
{
    return place == NULL ? NULL : (char *)place + nbytes;
}

struct sums {
    double total, squares, absolute, largest;
};

static inline double sign_of_row(uint64_t row)
{
    uint64_t z = (row + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return (z ^ (z >> 31)) >> 63 ? -1.0 : 1.0;
}

/* The sums of one block, which lies in cache: four pairs of registers run along it, the remainder goes one by one. */
#define DEFINE_BLOCK_SUMS(NAME, TARGET, REAL, VECTOR, MASK, LANES, ABSOLUTE)                                             \
    TARGET static inline void NAME(const REAL *x, int64_t n, struct sums *out)                                                 \
    {                                                                                                                   \
        VECTOR total[2] = {{0}}, squares[2] = {{0}}, absolute[2] = {{0}}, largest[2] = {{0}};                           \
        int64_t i = 0;                                                                                                  \
        for (; i + 2 * LANES <= n; i += 2 * LANES) {                                                                    \
            for (int half = 0; half < 2; half++) {                                                                      \
                VECTOR v;                                                                                               \
                memcpy(&v, x + i + half * LANES, sizeof v);                                                             \
                VECTOR size = (VECTOR)((MASK)v & ABSOLUTE);                                                             \
                total[half] += v;                                                                                       \
                squares[half] += v * v;                                                                                 \
                absolute[half] += size;                                                                                 \
                MASK keep = size <= largest[half];                                                                      \
                largest[half] = (VECTOR)(((MASK)largest[half] & keep) | ((MASK)size & ~keep));                          \
            }                                                                                                           \
        }                                                                                                               \
        double all = 0, square = 0, sum = 0, most = 0;                                                                  \
        for (int half = 0; half < 2; half++)                                                                            \
            for (int lane = 0; lane < LANES; lane++) {                                                                  \
                all += total[half][lane];                                                                               \
                square += squares[half][lane];                                                                          \
                sum += absolute[half][lane];                                                                            \
                most = largest[half][lane] <= most ? most : largest[half][lane];                                        \
            }                                                                                                           \
        for (; i < n; i++) {                                                                                            \
            double v = x[i], size = fabs(v);                                                                            \
            all += v;                                                                                                   \
            square += v * v;                                                                                            \
            sum += size;                                                                                                \
            most = size <= most ? most : size;                                                                          \
        }                                                                                                               \
        out->total += all;                                                                                              \
        out->squares += square;                                                                                         \
        out->absolute += sum;                                                                                           \
        out->largest = most <= out->largest ? out->largest : most;                                                      \
    }

#define ABSOLUTE8 ((i8){0} + (int32_t)0x7FFFFFFF)
#define ABSOLUTE4 ((l4){0} + (int64_t)0x7FFFFFFFFFFFFFFF)

/* Sketch and sums of n elements that begin at row `first`; `partial` holds k and a few. */
#define DEFINE_REDUCE(NAME, TARGET, REAL, BLOCK_SUMS)                                                                          \
    TARGET static inline void NAME(const REAL *x, int64_t n, uint64_t first, double *sketch, struct sums *out, void *copy)     \
    {                                                                                                                   \
        REAL partial[K];                                                                                                \
        for (int64_t begin = 0; begin < n; begin += BLOCK * K) {                                                        \
            int64_t end = begin + BLOCK * K < n ? begin + BLOCK * K : n;                                                \
            int64_t rows = (end - begin) / K, at = begin;                                                               \
            memset(partial, 0, sizeof partial);                                                                         \
            for (int64_t row = 0; row < rows; row++, at += K) {                                                         \
                REAL sign = (REAL)sign_of_row(first + (uint64_t)(begin / K + row));                                     \
                for (int j = 0; j < K; j++)                                                                             \
                    partial[j] += sign * x[at + j];                                                                     \
            }                                                                                                           \
            REAL sign = (REAL)sign_of_row(first + (uint64_t)(begin / K + rows));                                        \
            for (int64_t j = 0; at + j < end; j++)                                                                      \
                partial[j] += sign * x[at + j];                                                                         \
            for (int j = 0; j < K; j++)                                                                                 \
                sketch[j] += partial[j];                                                                                \
            BLOCK_SUMS(x + begin, end - begin, out);                                                                    \
            copy_block(after(copy, (size_t)begin * sizeof *x), x + begin, (size_t)(end - begin) * sizeof *x);           \
        }                                                                                                               \
    }

DEFINE_BLOCK_SUMS(block_sums_float_any, , float, f8, i8, 8, ABSOLUTE8)
DEFINE_REDUCE(reduce_float_any, , float, block_sums_float_any)

#if defined(__x86_64__) && defined(__GNUC__)
#define HAVE_AVX2
#define AVX2 __attribute__((target("avx2,fma")))

/* Elements that are asked for ahead of being read: four rows at once are too much for what the processor guesses by
 * itself (0.46 ns an element of 128 MB without, 0.22 to 0.25 with 1,024 to 8,192). */
#define AHEAD 2048

/* Sums of two times eight lanes, which take turns: an addition begins while the one before is not done. */
struct lanes {
    __m256 total[2], squares[2], absolute[2], largest[2];
};

/* One vector: into the sums, and with its sign to what was collected of its column. A NaN may get lost in the largest;
 * the sum of the absolutes has it, and whoever finds it there looks again. */
AVX2 static inline __m256 take(struct lanes *sums, int turn, __m256 v, __m256 sign, __m256 column)
{
    __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v);
    sums->total[turn] = _mm256_add_ps(sums->total[turn], v);
    sums->squares[turn] = _mm256_fmadd_ps(v, v, sums->squares[turn]);
    sums->absolute[turn] = _mm256_add_ps(sums->absolute[turn], size);
    sums->largest[turn] = _mm256_max_ps(sums->largest[turn], size);
    return _mm256_fmadd_ps(sign, v, column);
}

AVX2 static inline double across(__m256 one, __m256 two)
{
    float lane[16];
    _mm256_storeu_ps(lane, one);
    _mm256_storeu_ps(lane + 8, two);
    double sum = 0;
    for (int i = 0; i < 16; i++)
        sum += lane[i];
    return sum;
}

/* Up to k elements of one row. */
AVX2 static inline void take_row(struct lanes *sums, const float *x, int64_t count, double sign, float *partial)
{
    __m256 signs = _mm256_set1_ps((float)sign);
    int64_t j = 0;
    for (; j + 8 <= count; j += 8) {
        __m256 column = _mm256_load_ps(partial + j);
        _mm256_store_ps(partial + j, take(sums, (int)(j / 8) & 1, _mm256_loadu_ps(x + j), signs, column));
    }
    if (j < count) {
        __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        __m256i inside = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(count - j)), lane);
        __m256 column = _mm256_load_ps(partial + j);
        _mm256_store_ps(partial + j, take(sums, 0, _mm256_maskload_ps(x + j, inside), signs, column));
    }
}

/* The same sums as `reduce_float_any`, each element loaded once: four rows at a time share the columns' loads. */
AVX2 static void reduce_float_avx2(const float *x, int64_t n, uint64_t first, double *sketch, struct sums *out, void *copy)
{
    _Alignas(32) float partial[(K + 7) / 8 * 8];
    const int whole = K / 8 * 8;
    const __m256i inside = _mm256_cmpgt_epi32(_mm256_set1_epi32(K - whole), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    for (int64_t begin = 0; begin < n; begin += BLOCK * K) {
        int64_t count = n - begin < BLOCK * K ? n - begin : BLOCK * K, rows = count / K, row = 0;
        const float *at = x + begin;
        uint64_t number = first + (uint64_t)(begin / K);
        struct lanes sums;
        memset(&sums, 0, sizeof sums);
        memset(partial, 0, sizeof partial);
        for (; row + 4 <= rows; row += 4, at += 4 * K) {
            __m256 sign[4];
            for (int r = 0; r < 4; r++)
                sign[r] = _mm256_set1_ps((float)sign_of_row(number + (uint64_t)(row + r)));
            for (int j = 0; j < whole; j += 8) {
                /* Two cache lines for the two that four vectors make. */
                for (int line = 0; line < 2; line++)
                    _mm_prefetch((const char *)(at + 4 * j + 16 * line + AHEAD), _MM_HINT_T0);
                __m256 column = _mm256_load_ps(partial + j);
                for (int r = 0; r < 4; r++)
                    column = take(&sums, r & 1, _mm256_loadu_ps(at + r * K + j), sign[r], column);
                _mm256_store_ps(partial + j, column);
            }
            __m256 column = _mm256_load_ps(partial + whole);
            for (int r = 0; r < 4; r++)
                column = take(&sums, r & 1, _mm256_maskload_ps(at + r * K + whole, inside), sign[r], column);
            _mm256_store_ps(partial + whole, column);
        }
        for (; row < rows; row++, at += K)
            take_row(&sums, at, K, sign_of_row(number + (uint64_t)row), partial);
        take_row(&sums, at, count - rows * K, sign_of_row(number + (uint64_t)rows), partial);
        for (int j = 0; j < K; j++)
            sketch[j] += partial[j];
        out->total += across(sums.total[0], sums.total[1]);
        out->squares += across(sums.squares[0], sums.squares[1]);
        out->absolute += across(sums.absolute[0], sums.absolute[1]);
        float lane[8];
        _mm256_storeu_ps(lane, _mm256_max_ps(sums.largest[0], sums.largest[1]));
        for (int i = 0; i < 8; i++)
            out->largest = lane[i] > out->largest ? lane[i] : out->largest;
        copy_block(after(copy, (size_t)begin * sizeof *x), x + begin, (size_t)count * sizeof *x);
    }
}
#endif

/* All of it for one instruction set. Vectors are lowered for the function that holds them, so each set has its own. */
#define DEFINE_FOR(SET, TARGET)                                                                                         \
    DEFINE_BLOCK_SUMS(block_sums_double_##SET, TARGET, double, d4, l4, 4, ABSOLUTE4)                                    \
    DEFINE_REDUCE(reduce_double_##SET, TARGET, double, block_sums_double_##SET)                                         \
    TARGET static void reduce_bfloat16_##SET(const uint16_t *x, int64_t n, double *sketch, struct sums *out, void *copy)   \
    {                                                                                                                   \
        float wide[BLOCK * K];                                                                                          \
        for (int64_t begin = 0; begin < n; begin += BLOCK * K) {                                                        \
            int64_t count = n - begin < BLOCK * K ? n - begin : BLOCK * K;                                              \
            for (int64_t i = 0; i < count; i++) {                                                                       \
                uint32_t bits = (uint32_t)x[begin + i] << 16;                                                           \
                memcpy(wide + i, &bits, sizeof bits);                                                                   \
            }                                                                                                           \
            reduce_float_##SET(wide, count, (uint64_t)(begin / K), sketch, out, NULL);                                  \
            copy_block(after(copy, (size_t)begin * sizeof *x), x + begin, (size_t)count * sizeof *x);                   \
        }                                                                                                               \
    }                                                                                                                   \
    static void reduce_##SET(const void *x, int64_t n, int type, double *sketch, struct sums *out, void *copy)          \
    {                                                                                                                   \
        if (type == FLOAT32)                                                                                            \
            reduce_float_##SET(x, n, 0, sketch, out, copy);                                                             \
        else if (type == FLOAT64)                                                                                       \
            reduce_double_##SET(x, n, 0, sketch, out, copy);                                                            \
        else                                                                                                            \
            reduce_bfloat16_##SET(x, n, sketch, out, copy);                                                             \
    }

DEFINE_FOR(any, )
#if defined(HAVE_AVX2)
DEFINE_FOR(avx2, AVX2)
#endif

static void (*reduce_best)(const void *, int64_t, int, double *, struct sums *, void *) = reduce_any;

static double value_at(const void *data, int64_t index, int type)
{
    if (type == FLOAT32)
        return ((const float *)data)[index];
    if (type == FLOAT64)
        return ((const double *)data)[index];
    uint32_t bits = (uint32_t)((const uint16_t *)data)[index] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* A matrix of the step's rows: what `reduce` writes one row of. */
struct matrix {
    Py_buffer view;
    int held;
};

static int hold(struct matrix *matrix, PyObject *array, int flags)
{
    matrix->held = PyObject_GetBuffer(array, &matrix->view, flags) == 0;
    return matrix->held;
}

static void let_go(struct matrix *matrices, int count)
{
    for (int i = 0; i < count; i++)
        if (matrices[i].held)
            PyBuffer_Release(&matrices[i].view);
}

static int all_inside(const struct matrix *index, int64_t n)
{
    const int64_t *place = index->view.buf;
    int64_t samples = index->view.len / (Py_ssize_t)sizeof(int64_t);
    for (int64_t i = 0; i < samples; i++)
        if (place[i] < 0 || place[i] >= n)
            return 0;
    return 1;
}

enum { INDEX, SUMS, COUNTS, SKETCH, SAMPLE, MATRICES };

static PyObject *reduce(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (count != 10) {
        PyErr_SetString(PyExc_TypeError, "reduce(address, numel, type, copy, row, index, sums, counts, sketch, sample)");
        return NULL;
    }
    const void *data = PyLong_AsVoidPtr(args[0]);
    int64_t n = PyLong_AsLongLong(args[1]);
    int type = (int)PyLong_AsLong(args[2]);
    void *copy = PyLong_AsVoidPtr(args[3]);
    int64_t row = PyLong_AsLongLong(args[4]);
    if (PyErr_Occurred())
        return NULL;
    struct matrix m[MATRICES] = {{{0}}};
    for (int i = 0; i < MATRICES; i++)
        if (!hold(&m[i], args[5 + i], i == INDEX ? PyBUF_SIMPLE : PyBUF_WRITABLE)) {
            let_go(m, MATRICES);
            return NULL;
        }
    int64_t samples = m[INDEX].view.len / (Py_ssize_t)sizeof(int64_t);
    int64_t rows = m[SKETCH].view.len / (Py_ssize_t)(K * sizeof(float));
    int64_t width = rows > 0 ? m[SAMPLE].view.len / (Py_ssize_t)sizeof(float) / rows : 0;
    int fits = data != NULL && type >= FLOAT32 && type <= FLOAT64 && row >= 0 && row < rows && samples <= width &&
               m[SKETCH].view.len % (Py_ssize_t)(K * sizeof(float)) == 0 &&
               m[SUMS].view.len == rows * 4 * (Py_ssize_t)sizeof(double) &&
               m[COUNTS].view.len == rows * 2 * (Py_ssize_t)sizeof(int64_t) && all_inside(&m[INDEX], n);
    if (fits) {
        const int64_t *index = m[INDEX].view.buf;
        double *sums = (double *)m[SUMS].view.buf + row * 4;
        int64_t *counts = (int64_t *)m[COUNTS].view.buf + row * 2;
        float *sketch = (float *)m[SKETCH].view.buf + row * K, *sample = (float *)m[SAMPLE].view.buf + row * width;
        struct sums found = {0, 0, 0, 0};
        int64_t nonfinite = 0;
        double wide[K] = {0};
        PyThreadState *state = n > 32768 ? PyEval_SaveThread() : NULL;
        reduce_best(data, n, type, wide, &found, copy);
#if defined(__SSE2__)
        if (copy != NULL)
            _mm_sfence(); /* another thread will read the copy */
#endif
        if (!isfinite(found.absolute)) {
            /* A comparison loses a NaN that a larger number follows: count, and look again. */
            found.largest = 0;
            for (int64_t i = 0; i < n; i++) {
                double size = fabs(value_at(data, i, type));
                nonfinite += !isfinite(size);
                if (isnan(size) || size > found.largest)
                    found.largest = isnan(found.largest) ? found.largest : size;
            }
        }
        sums[0] = found.total;
        sums[1] = sqrt(found.squares);
        sums[2] = found.absolute;
        sums[3] = found.largest;
        counts[0] = nonfinite;
        counts[1] = n;
        for (int j = 0; j < K; j++)
            sketch[j] = (float)wide[j];
        for (int64_t i = 0; i < samples; i++)
            sample[i] = (float)value_at(data, index[i], type);
        if (state != NULL)
            PyEval_RestoreThread(state);
    }
    let_go(m, MATRICES);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError,
                        "reduce: a buffer has another size, an index is outside the tensor, or it has no memory.");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *samples_are(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "samples_are(address, numel, type, index, sample)");
        return NULL;
    }
    const void *data = PyLong_AsVoidPtr(args[0]);
    int64_t n = PyLong_AsLongLong(args[1]);
    int type = (int)PyLong_AsLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    struct matrix m[2] = {{{0}}};
    if (!hold(&m[0], args[3], PyBUF_SIMPLE) || !hold(&m[1], args[4], PyBUF_SIMPLE)) {
        let_go(m, 2);
        return NULL;
    }
    int64_t samples = m[0].view.len / (Py_ssize_t)sizeof(int64_t);
    int fits = data != NULL && type >= FLOAT32 && type <= FLOAT64 &&
               m[1].view.len >= samples * (Py_ssize_t)sizeof(float) && all_inside(&m[0], n);
    int same = 1;
    for (int64_t i = 0; fits && same && i < samples; i++) {
        float now = (float)value_at(data, ((const int64_t *)m[0].view.buf)[i], type), then = ((const float *)m[1].view.buf)[i];
        same = now == then || (isnan(now) && isnan(then));
    }
    let_go(m, 2);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError,
                        "samples_are: a buffer has another size, an index is outside the tensor, or it has no memory.");
        return NULL;
    }
    return PyBool_FromLong(same);
}

static PyMethodDef methods[] = {
    {"reduce", (PyCFunction)(void (*)(void))reduce, METH_FASTCALL,
     "reduce(address, numel, type, copy, row, index, sums, counts, sketch, sample)\n\n"
     "Reduce contiguous elements (type 0: fp32, 1: bf16, 2: fp64) at an address, and write one row of the last four:\n"
     "sums [Q, 4] sum, l2, sum |x|, max |x|; counts [Q, 2] non-finite elements, elements; sketch [Q, K]; sample [Q, at\n"
     "least len(index)]. The elements are copied to the address `copy`, which must have room for them, unless it is 0.\n"
     "Raises ValueError where a buffer has another size, an index is outside the tensor, or it has no memory."},
    {"samples_are", (PyCFunction)(void (*)(void))samples_are, METH_FASTCALL,
     "samples_are(address, numel, type, index, sample): tell whether these elements have these values."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_reduce", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__reduce(void)
{
#if defined(HAVE_AVX2)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        reduce_best = reduce_avx2;
#endif
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
