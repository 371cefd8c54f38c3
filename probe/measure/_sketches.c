/* Square the distances of paired sketches, in one pass over both.
 *
 * `probe/measure/distance.py` does the same with numpy where this was not built, in three passes. Both give the same bits:
 * numpy adds the squares of a row two by two, eight elements at a time from the last two to the first, and so does this.
 * A square of a difference in single precision is exact in double precision, so that only the order of the sums matters.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* How Python calls this module; `probe/measure/distance.py` uses no build that is called in another way. */
#define INTERFACE 1

typedef float f2 __attribute__((vector_size(8)));
typedef double d2 __attribute__((vector_size(16)));

static d2 square(f2 delta)
{
    d2 wide = __builtin_convertvector(delta, d2);
    return wide * wide;
}

/* Adds what is left of a row, from element k on, and the two halves of the sum. */
static double finish(const float *a, const float *b, int64_t k, int64_t width, d2 sum)
{
    for (; k < width; k += 2) {
        f2 delta = {a[k] - b[k], k + 1 < width ? a[k + 1] - b[k + 1] : 0};
        sum = square(delta) + sum;
    }
    return sum[0] + sum[1];
}

static void squares_any(const float *a, const float *b, int64_t rows, int64_t width, double *out)
{
    for (int64_t q = 0; q < rows; q++, a += width, b += width) {
        d2 sum = {0};
        int64_t k = 0;
        for (; k + 8 <= width; k += 8)
            for (int two = 6; two >= 0; two -= 2) {
                f2 x, y;
                memcpy(&x, a + k + two, sizeof x);
                memcpy(&y, b + k + two, sizeof y);
                sum = square(x - y) + sum;
            }
        out[q] = finish(a, b, k, width, sum);
    }
}

static void (*squares_best)(const float *, const float *, int64_t, int64_t, double *) = squares_any;

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

/* The sums of one row wait for each other: eight rows are summed side by side, two of them in one register. */
#define ROWS 8

__attribute__((target("avx2"))) static void squares_avx2(const float *a, const float *b, int64_t rows, int64_t width,
                                                         double *out)
{
    int64_t q = 0;
    for (; q + ROWS <= rows; q += ROWS, a += ROWS * width, b += ROWS * width) {
        __m256d sum[ROWS / 2];
        for (int pair = 0; pair < ROWS / 2; pair++)
            sum[pair] = _mm256_setzero_pd();
        int64_t k = 0;
        for (; k + 8 <= width; k += 8)
            for (int four = 4; four >= 0; four -= 4)
#pragma GCC unroll 4
                for (int pair = 0; pair < ROWS / 2; pair++) {
                    int64_t one = 2 * pair * width + k + four, two = one + width;
                    __m128 first = _mm_sub_ps(_mm_loadu_ps(a + one), _mm_loadu_ps(b + one));
                    __m128 second = _mm_sub_ps(_mm_loadu_ps(a + two), _mm_loadu_ps(b + two));
                    __m256d late = _mm256_cvtps_pd(_mm_movehl_ps(second, first));
                    __m256d early = _mm256_cvtps_pd(_mm_movelh_ps(first, second));
                    sum[pair] = _mm256_add_pd(_mm256_mul_pd(late, late), sum[pair]);
                    sum[pair] = _mm256_add_pd(_mm256_mul_pd(early, early), sum[pair]);
                }
        for (int row = 0; row < ROWS; row++) {
            __m256d both = sum[row / 2];
            d2 own = (d2)(row % 2 ? _mm256_extractf128_pd(both, 1) : _mm256_castpd256_pd128(both));
            out[q + row] = finish(a + row * width, b + row * width, k, width, own);
        }
    }
    squares_any(a, b, rows - q, width, out + q);
}
#endif

static PyObject *squared(PyObject *module, PyObject *args)
{
    Py_buffer a, b, out;
    if (!PyArg_ParseTuple(args, "y*y*w*:squared", &a, &b, &out))
        return NULL;
    int64_t rows = out.len / 8, width = rows ? a.len / 4 / rows : 0;
    int fits = a.len == b.len && out.len % 8 == 0 && a.len == rows * width * 4;
    if (fits) {
        PyThreadState *state = PyEval_SaveThread();
        squares_best(a.buf, b.buf, rows, width, out.buf);
        PyEval_RestoreThread(state);
    }
    PyBuffer_Release(&a);
    PyBuffer_Release(&b);
    PyBuffer_Release(&out);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "squared: the blocks have other sizes.");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"squared", squared, METH_VARARGS,
     "squared(a, b, out): square the distances of paired rows of two fp32 blocks of the same size.\n\n"
     "`out` is fp64, one for each row. Raises ValueError where the blocks have other sizes."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_sketches", NULL, 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__sketches(void)
{
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("avx2"))
        squares_best = squares_avx2;
#endif
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
