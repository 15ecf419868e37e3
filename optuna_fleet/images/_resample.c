/* A crop of an RGB image, resized (bilinear, antialiased), mirrored and laid out by channel.
 *
 * The arithmetic is that of PyTorch's kernel for uint8 images, so that the bits are the same:
 * weights in double precision, rounded to 16 bits; the rows first, rounded to bytes, then the
 * columns. What is saved is everything around it: the copy of the crop, the mirrored copy, the
 * change of layout, and half of the shuffling.
 *
 * Needs AVX2, which is asked for when it runs: this file is compiled for any machine.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAVE_KERNEL 1
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define AVX2 __attribute__((target("avx2")))
#define TILE 32 /* bytes of an AVX2 register */
#define LINE 64 /* of a cache */
#define AHEAD 10 /* rows */

typedef struct {
    int size, padded; /* outputs, and those that there is room for */
    int taps, precision;
    int *first;       /* of each output: its first input */
    int16_t *weight;  /* [padded][taps] */
} Filter;

static int rounded_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

static double triangle(double x) {
    x = x < 0 ? -x : x;
    return x < 1 ? 1 - x : 0;
}

static void drop(Filter *filter) {
    free(filter->first);
    free(filter->weight);
}

/* Weights of the inputs of each output, in units of 2^-precision; 0 if there is no memory. */
static int prepare(Filter *filter, int in, int out, int mirrored) {
    double scale = (double)in / out, support = scale > 1 ? scale : 1;
    int most = (int)(2 * support) + 3, taps = 0;
    double *exact = calloc((size_t)out * most, sizeof *exact), largest = 0;
    int *first = calloc(rounded_up(out, 8), sizeof *first);
    if (exact == NULL || first == NULL) {
        free(exact);
        free(first);
        return 0;
    }
    for (int i = 0; i < out; i++) {
        double center = scale * (i + 0.5), total = 0;
        int begin = (int)(center - support + 0.5), end = (int)(center + support + 0.5);
        int place = mirrored ? out - 1 - i : i;
        double *row = exact + (size_t)place * most;
        begin = begin < 0 ? 0 : begin;
        end = end > in ? in : end;
        for (int k = 0; k < end - begin; k++) {
            row[k] = triangle((k + begin - center + 0.5) * (1 / support));
            total += row[k];
        }
        for (int k = 0; k < end - begin; k++) {
            row[k] /= total;
            largest = row[k] > largest ? row[k] : largest;
        }
        first[place] = begin;
        taps = end - begin > taps ? end - begin : taps;
    }
    filter->size = out;
    filter->padded = rounded_up(out, 8);
    filter->taps = rounded_up(taps, 2);
    filter->first = first;
    filter->weight = calloc((size_t)filter->padded * filter->taps, sizeof *filter->weight);
    int precision = 0;
    while (precision < 22 && 0.5 + largest * (1 << (precision + 1)) < (1 << 15)) precision++;
    filter->precision = precision;
    if (filter->weight != NULL)
        for (int i = 0; i < out; i++)
            for (int k = 0; k < taps; k++)
                filter->weight[(size_t)i * filter->taps + k] =
                    (int16_t)(0.5 + exact[(size_t)i * most + k] * (1 << precision));
    free(exact);
    if (filter->weight == NULL) free(first);
    return filter->weight != NULL;
}

static inline AVX2 __m256i pair(const int16_t *weight) {
    int32_t both;
    memcpy(&both, weight, sizeof both);
    return _mm256_set1_epi32(both);
}

static inline AVX2 __m256i both_rows(const uint8_t *a, const uint8_t *b) {
    __m256i bytes = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)a));
    return _mm256_inserti128_si256(bytes, _mm_loadu_si128((const __m128i *)b), 1);
}

/* One pixel of two rows: R, G, B, 0 as 32-bit sums, of the first row and of the second. */
static inline AVX2 __m256i pixel(const uint8_t *a, const uint8_t *b, const int16_t *weight,
                                 int taps, __m256i sum) {
    const __m256i low = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1));
    const __m256i high = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1));
    int k = 0;
    for (; k + 2 < taps; k += 4) {
        __m256i four = both_rows(a + 3 * k, b + 3 * k);
        __m256i left = _mm256_shuffle_epi8(four, low), right = _mm256_shuffle_epi8(four, high);
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(left, pair(weight + k)));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(right, pair(weight + k + 2)));
    }
    if (k < taps) {
        __m256i left = _mm256_shuffle_epi8(both_rows(a + 3 * k, b + 3 * k), low);
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(left, pair(weight + k)));
    }
    return sum;
}

/* Four pixels of two rows, from `x` on: four of R, four of G, of B, of 0. */
static inline AVX2 __m256i four_pixels(const uint8_t *a, const uint8_t *b, const Filter *filter,
                                       int taps, int x) {
    const __m128i shift = _mm_cvtsi32_si128(filter->precision);
    const __m256i half = _mm256_set1_epi32(1 << (filter->precision - 1));
    const __m256i by_channel = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    __m256i sums[4];
    for (int i = 0; i < 4; i++) {
        size_t first = filter->first[x + i];
        const int16_t *weight = filter->weight + (size_t)(x + i) * taps;
        sums[i] = pixel(a + 3 * first, b + 3 * first, weight, taps, half);
        sums[i] = _mm256_sra_epi32(sums[i], shift);
    }
    return _mm256_shuffle_epi8(_mm256_packus_epi16(_mm256_packs_epi32(sums[0], sums[1]),
                                                   _mm256_packs_epi32(sums[2], sums[3])),
                               by_channel);
}

static inline AVX2 void put(uint8_t *to, size_t plane, __m128i red_green, __m128i blue) {
    _mm_storel_epi64((__m128i *)to, red_green);
    _mm_storeh_pd((double *)(to + plane), _mm_castsi128_pd(red_green));
    _mm_storel_epi64((__m128i *)(to + 2 * plane), blue);
}

/* Two rows of pixels, resized, to two rows in each of three planes. */
static inline AVX2 void with_taps(const uint8_t *a, const uint8_t *b, const Filter *filter,
                                  int taps, uint8_t *to_a, uint8_t *to_b, size_t plane) {
    for (int x = 0; x < filter->padded; x += 8) {
        __m256i left = four_pixels(a, b, filter, taps, x);
        __m256i right = four_pixels(a, b, filter, taps, x + 4);
        __m256i red_green = _mm256_unpacklo_epi32(left, right);
        __m256i blue = _mm256_unpackhi_epi32(left, right);
        put(to_a + x, plane, _mm256_castsi256_si128(red_green), _mm256_castsi256_si128(blue));
        put(to_b + x, plane, _mm256_extracti128_si256(red_green, 1),
            _mm256_extracti128_si256(blue, 1));
    }
}

/* The usual numbers of taps are constants for the compiler. */
static AVX2 void along_rows(const uint8_t *a, const uint8_t *b, const Filter *filter,
                            uint8_t *to_a, uint8_t *to_b, size_t plane) {
    switch (filter->taps) {
    case 2: with_taps(a, b, filter, 2, to_a, to_b, plane); break;
    case 4: with_taps(a, b, filter, 4, to_a, to_b, plane); break;
    case 6: with_taps(a, b, filter, 6, to_a, to_b, plane); break;
    default: with_taps(a, b, filter, filter->taps, to_a, to_b, plane);
    }
}

/* A tile of a column: rows `stride` bytes apart, weighed and added. */
static inline AVX2 __m256i tile(const uint8_t *from, size_t stride, const int16_t *weight,
                                int taps, int precision) {
    const __m256i zero = _mm256_setzero_si256();
    const __m128i shift = _mm_cvtsi32_si128(precision);
    __m256i a = _mm256_set1_epi32(1 << (precision - 1)), b = a, c = a, d = a;
    for (int k = 0; k < taps; k += 2) {
        __m256i upper = _mm256_loadu_si256((const __m256i *)(from + k * stride));
        __m256i lower = _mm256_loadu_si256((const __m256i *)(from + (k + 1) * stride));
        __m256i low = _mm256_unpacklo_epi8(upper, lower);
        __m256i high = _mm256_unpackhi_epi8(upper, lower), both = pair(weight + k);
        a = _mm256_add_epi32(a, _mm256_madd_epi16(_mm256_unpacklo_epi8(low, zero), both));
        b = _mm256_add_epi32(b, _mm256_madd_epi16(_mm256_unpackhi_epi8(low, zero), both));
        c = _mm256_add_epi32(c, _mm256_madd_epi16(_mm256_unpacklo_epi8(high, zero), both));
        d = _mm256_add_epi32(d, _mm256_madd_epi16(_mm256_unpackhi_epi8(high, zero), both));
    }
    a = _mm256_packs_epi32(_mm256_sra_epi32(a, shift), _mm256_sra_epi32(b, shift));
    c = _mm256_packs_epi32(_mm256_sra_epi32(c, shift), _mm256_sra_epi32(d, shift));
    return _mm256_packus_epi16(a, c);
}

static AVX2 void along_columns(const uint8_t *from, size_t stride, const Filter *filter,
                               uint8_t *to, int width) {
    for (int y = 0; y < filter->size; y++, to += width) {
        const uint8_t *rows = from + filter->first[y] * stride;
        const int16_t *weight = filter->weight + (size_t)y * filter->taps;
        int taps = filter->taps, x = 0;
        while (taps > 2 && weight[taps - 1] == 0 && weight[taps - 2] == 0) taps -= 2;
        for (; x + TILE <= width; x += TILE)
            _mm256_storeu_si256((__m256i *)(to + x),
                                tile(rows + x, stride, weight, taps, filter->precision));
        if (x < width) {
            uint8_t rest[TILE];
            _mm256_storeu_si256((__m256i *)rest,
                                tile(rows + x, stride, weight, taps, filter->precision));
            memcpy(to + x, rest, width - x);
        }
    }
}

typedef struct {
    const uint8_t *begin, *end; /* the crop's first byte; the end of the image's memory */
    Py_ssize_t channel, row, column; /* strides */
    int height, width;
} Crop;

static int lies_by_pixel(const Crop *crop) { return crop->channel == 1 && crop->column == 3; }

/* Asks for two rows that are soon needed: pictures come from memory that no cache holds. */
static void fetch(const Crop *crop, int first) {
    int bytes = lies_by_pixel(crop) ? 3 * crop->width : crop->width;
    int parts = lies_by_pixel(crop) ? 1 : 3;
    for (int y = first; y < first + 2 && y < crop->height; y++)
        for (int c = 0; c < parts; c++)
            for (int x = 0; x < bytes; x += LINE)
                __builtin_prefetch(crop->begin + y * crop->row + c * crop->channel + x);
}

/* A row as R, G, B, R, G, B, ..., of which more may be read: in place, or copied. */
static const uint8_t *by_pixel(const Crop *crop, int y, uint8_t *copy, size_t reach) {
    const uint8_t *row = crop->begin + y * crop->row;
    const uint8_t *green = row + crop->channel, *blue = green + crop->channel;
    if (lies_by_pixel(crop)) {
        if (row + reach <= crop->end) return row;
        return memcpy(copy, row, 3 * (size_t)crop->width);
    }
    if (crop->column == 1) { /* the same as below, which is slow if it isn't known to be 1 */
        for (int x = 0; x < crop->width; x++) {
            copy[3 * x] = row[x];
            copy[3 * x + 1] = green[x];
            copy[3 * x + 2] = blue[x];
        }
        return copy;
    }
    for (int x = 0; x < crop->width; x++)
        for (int c = 0; c < 3; c++) copy[3 * x + c] = row[x * crop->column + c * crop->channel];
    return copy;
}

/* Returns 0 if there is no memory. */
static int resize(const Crop *crop, uint8_t *out, int height, int width, int mirrored) {
    Filter across = {0}, down = {0};
    if (!prepare(&across, crop->width, width, mirrored)) return 0;
    if (!prepare(&down, crop->height, height, 0)) {
        drop(&across);
        return 0;
    }
    /* Weights of 0 belong to what may lie beyond the last pixel, or below the last row. */
    size_t reach = 3 * ((size_t)crop->width + across.taps) + 16;
    size_t stride = rounded_up(width, TILE), plane = stride * (crop->height + down.taps);
    uint8_t *planes = malloc(3 * plane + TILE), *padded = calloc(2, reach);
    int done = planes != NULL && padded != NULL;
    for (int y = 0; done && y < AHEAD; y += 2) fetch(crop, y);
    for (int y = 0; done && y < crop->height; y += 2) {
        const uint8_t *rows[2];
        fetch(crop, y + AHEAD);
        for (int i = 0; i < 2; i++) {
            int row = y + i < crop->height ? y + i : y;
            rows[i] = by_pixel(crop, row, padded + i * reach, reach);
        }
        uint8_t *to = planes + y * stride;
        along_rows(rows[0], rows[1], &across, to, y + 1 < crop->height ? to + stride : to, plane);
    }
    for (int c = 0; done && c < 3; c++) {
        memset(planes + c * plane + crop->height * stride, 0, down.taps * stride);
        along_columns(planes + c * plane, stride, &down, out + (size_t)c * height * width, width);
    }
    free(planes);
    free(padded);
    drop(&across);
    drop(&down);
    return done;
}

static int is_rgb(const Py_buffer *view) {
    return view->ndim == 3 && view->itemsize == 1 && view->shape[0] == 3 &&
           view->shape[1] <= INT_MAX / 8 && view->shape[2] <= INT_MAX / 8;
}

static PyObject *resized_crop(PyObject *module, PyObject *args) {
    PyObject *source, *target;
    Py_buffer from, to;
    Crop crop;
    int top, left, mirrored, done = 0;
    if (!PyArg_ParseTuple(args, "O(iiii)Op", &source, &top, &left, &crop.height, &crop.width,
                          &target, &mirrored))
        return NULL;
    if (PyObject_GetBuffer(source, &from, PyBUF_STRIDES) < 0) return NULL;
    if (PyObject_GetBuffer(target, &to, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&from);
        return NULL;
    }
    if (!is_rgb(&from) || !is_rgb(&to) || to.len == 0 || top < 0 || left < 0 ||
        crop.height < 1 || crop.width < 1 || crop.height > from.shape[1] - top ||
        crop.width > from.shape[2] - left) {
        PyErr_SetString(PyExc_ValueError, "not a box in uint8 [3, H, W], to uint8 [3, h, w]");
    } else {
        crop.channel = from.strides[0], crop.row = from.strides[1], crop.column = from.strides[2];
        crop.begin = (const uint8_t *)from.buf + top * crop.row + left * crop.column;
        crop.end = (const uint8_t *)from.buf + (from.shape[1] - 1) * crop.row + 3 * from.shape[2];
        Py_BEGIN_ALLOW_THREADS
        done = resize(&crop, to.buf, (int)to.shape[1], (int)to.shape[2], mirrored);
        Py_END_ALLOW_THREADS
        if (!done) PyErr_NoMemory();
    }
    PyBuffer_Release(&from);
    PyBuffer_Release(&to);
    if (!done) return NULL;
    Py_RETURN_NONE;
}
#endif

static PyMethodDef methods[] = {
#ifdef HAVE_KERNEL
    {"resized_crop", resized_crop, METH_VARARGS,
     "resized_crop(image, (top, left, height, width), out, mirrored): uint8 [3, H, W] of any "
     "strides to [3, h, w]."},
#endif
    {NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_resample", NULL, 0, methods};

PyMODINIT_FUNC PyInit__resample(void) {
#ifdef HAVE_KERNEL
    if (__builtin_cpu_supports("avx2")) return PyModule_Create(&definition);
#endif
    PyErr_SetString(PyExc_ImportError, "needs a processor with AVX2");
    return NULL;
}
