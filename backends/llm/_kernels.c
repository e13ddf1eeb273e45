/* The language model's hot path on a CPU: attention directly over the blocks of the KV cache, and the row-wise steps.
 *
 * kernels.py says what each is for, and what replaces it without this module. Functions take addresses of tensors, whose
 * shapes, strides and datatypes their callers have checked. Numbers from a step's tables are checked here, by `plan`,
 * before an address is computed from them. Only the stable ABI is used: one build serves Python 3.11 and all later ones.
 *
 * Vectors have 16 floats with AVX-512 (F, BW, DQ, VL), 8 with AVX2 and FMA, and otherwise 4, which compilers turn into
 * SSE2 or NEON. A sum along a row is made in that many lanes, and then of the lanes, so its last bits depend on the width,
 * but not on other rows or threads.
 */

#ifndef WITHOUT_PYTHON /* tests in C include this file as it is, without the module */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#endif

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "_kernels_threads.h"

/* Tests in C define these otherwise: for instructions that are emulated, and to compile in seconds. */
#ifndef TARGET_OF
#define TARGET_OF(instructions) __attribute__((target(instructions)))
#endif
#ifndef INLINED
#define INLINED static inline __attribute__((always_inline))
#endif

/* Tokens whose softmax is taken at once, and how far their scores lie apart for two queries; tokens whose codes are
 * decoded at once; queries that share the values read for them; queries of a strip, and what these have in floats.
 */
#define TILE 128
#define SCORES (TILE + 16)
#define DECODED 32
#define MAX_QUERIES 4
#define MAX_ROWS 32
#define STRIP_VALUES (MAX_ROWS * 128)
#define MAX_DIM 576
#define MAX_ROTATIONS 8

/* ---- A layer, and a step ------------------------------------------------------------------------------------------ */

/* How keys and values are kept: as they come, or as codes of 8 bits with a scale for each head of a token. */
enum { AS_THEY_COME, INT8, FLOAT8 };

/* `struct.pack("9q2d")` in cpu_attention.py. `block_bytes` lie between the beginnings of two blocks of a layer. Values are
 * the last `shared_dim` of their keys; 0: they are kept beside them, as wide as they are.
 */
typedef struct {
    int64_t num_heads, num_kv_heads, head_dim, block_size, num_blocks, is_half, coding, block_bytes, shared_dim;
    double scale, softcap;
} Geometry;

/* Made by `plan` only. It is followed by slots[num_tokens], items[num_items], tables[num_rows][width]. */
typedef struct {
    int64_t num_blocks, block_size, num_tokens, num_items, num_rows, width, num_threads;
} Plan;

/* A strip: `count` tokens that follow each other, of which the first attends to the first `length` of its sequence. */
typedef struct {
    int64_t token, row, length, count;
} Item;

/* What a strip of `num_tokens` tokens sees through one KV head: tokens up to `stop` of the sequence whose blocks are in
 * `table`, and each token after the first one more; of a `window`, if that is not 0, the last of these. `num_queries`
 * query heads of each token read the KV head. `query_bytes` and `output_bytes` are the distances between the queries and
 * the outputs of two tokens.
 */
typedef struct {
    const char *layer;
    const int64_t *table;
    int64_t stop, window, num_tokens, num_queries, query_bytes, output_bytes;
    int64_t kv_head, num_kv_heads, head_dim, shared_dim, block_size, block_bytes, page_bytes;
    int is_half, coding;
    float softcap;
    const float *sinks; /* of each query head that reads this KV head; NULL: none */
} Sight;

/* The part of a block that belongs to a layer is [parts, KV heads] pages: of keys, then of values that are not within
 * them, by head. A page is [block size, head_dim], and behind codes [block size] scales in float32.
 */
static inline const char *page_of(const Sight *sight, int64_t block, int part)
{
    const int64_t page = part * sight->num_kv_heads + sight->kv_head;
    return sight->layer + sight->table[block] * sight->block_bytes + page * sight->page_bytes;
}

static inline int64_t num_pages(const Geometry *g)
{
    return (g->shared_dim > 0 ? 1 : 2) * g->num_kv_heads;
}

static inline int64_t item_bytes(const Geometry *g)
{
    return g->coding != AS_THEY_COME ? 1 : g->is_half ? 2 : 4;
}

static inline int64_t page_bytes(const Geometry *g)
{
    return g->block_size * (g->head_dim * item_bytes(g) + (g->coding != AS_THEY_COME ? 4 : 0));
}

/* Queries of a strip. */
static inline int64_t most_rows(int64_t head_dim)
{
    const int64_t most = STRIP_VALUES / head_dim / MAX_QUERIES * MAX_QUERIES;
    return most < MAX_QUERIES ? MAX_QUERIES : most > MAX_ROWS ? MAX_ROWS : most;
}

/* Row `row` of a strip is a query head of one of its tokens: what these see ends a token later each. */
static inline int64_t stop_of(const Sight *sight, int64_t row)
{
    return sight->stop + row / sight->num_queries;
}

static inline int64_t first_of(const Sight *sight, int64_t row)
{
    const int64_t first = stop_of(sight, row) - sight->window;
    return sight->window > 0 && first > 0 ? first : 0;
}

/* Half precision is bfloat16: the upper half of a float. */
static inline float element(const void *values, int64_t at, int is_half)
{
    float value;
    if (!is_half)
        return ((const float *)values)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)values)[at] << 16;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline void set_element(void *values, int64_t at, float value, int is_half)
{
    if (!is_half) {
        ((float *)values)[at] = value;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits = value == value ? (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 : 0x7FC0;
    ((uint16_t *)values)[at] = (uint16_t)bits;
}

/* ---- The kernels, for each set of instructions --------------------------------------------------------------------- */

#define TARGET
#define WIDTH 4
#define NAME(name) name##_4
#include "_kernels_vector.h"
#undef TARGET
#undef WIDTH
#undef NAME

#ifdef __x86_64__
#define TARGET TARGET_OF("avx2,fma")
#define WIDTH 8
#define NAME(name) name##_8
#include "_kernels_vector.h"
#undef TARGET
#undef WIDTH
#undef NAME

#define TARGET TARGET_OF("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#define WIDTH 16
#define NAME(name) name##_16
#include "_kernels_vector.h"
#undef TARGET
#undef WIDTH
#undef NAME
#endif

typedef struct {
    int width;
    void (*attend)(const Sight *, const char *, float, char *);
    void (*turn)(void *, const void *, const void *, int64_t, int);
    void (*normalise)(const void *, const void *, void *, int64_t, double, int);
    void (*gate)(const void *, const void *, void *, int64_t, int);
    void (*encode)(const void *, int64_t, int, int, void *, void *);
} Kernels;

#define KERNELS(width) {width, attend_##width, turn_##width, normalise_##width, gate_##width, encode_##width}

/* The widest vectors first; `chosen` is the first of them that this processor has. */
static const Kernels all_kernels[] = {
#ifdef __x86_64__
    KERNELS(16),
    KERNELS(8),
#endif
    KERNELS(4),
};
#define NUM_KERNELS ((int)(sizeof all_kernels / sizeof all_kernels[0]))
static const Kernels *chosen;

static int can_run(const Kernels *kernels)
{
#ifdef __x86_64__
    if (kernels->width == 16)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("fma");
    if (kernels->width == 8)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return kernels->width == 4;
}

/* ---- A layer's attention ------------------------------------------------------------------------------------------- */

static inline const int64_t *slots_of(const Plan *plan)
{
    return (const int64_t *)(plan + 1);
}

static inline const Item *items_of(const Plan *plan)
{
    return (const Item *)(slots_of(plan) + plan->num_tokens);
}

static inline const int64_t *tables_of(const Plan *plan)
{
    return (const int64_t *)(items_of(plan) + plan->num_items);
}

typedef struct {
    Work work;
    const Geometry *geometry;
    const Plan *plan;
    char *layer, *heads, *output;
    const char *cosines, *sines;
    const float *sinks;
    const float *head_norms; /* weights by which queries and keys are normalised first, [heads][head_dim]; NULL: none */
    double head_eps;
    int64_t rotated, window;
} Layer;

/* Rows in one part of the row-wise work. */
#define ROWS_PER_PART 32

static void rope_and_keep(const Work *shared, int64_t part)
{
    const Layer *layer = (const Layer *)shared;
    const Geometry *g = layer->geometry;
    const int64_t size = g->is_half ? 2 : 4, num_heads = g->num_heads + num_pages(g);
    const int64_t head_bytes = g->head_dim * size, rotated_bytes = layer->rotated * size;
    const int64_t *slots = slots_of(layer->plan);
    int64_t stop = (part + 1) * ROWS_PER_PART;
    stop = stop < layer->plan->num_tokens ? stop : layer->plan->num_tokens;
    for (int64_t token = part * ROWS_PER_PART; token < stop; token++) {
        char *heads = layer->heads + token * num_heads * head_bytes;
        for (int64_t head = 0; layer->head_norms != NULL && head < g->num_heads + g->num_kv_heads; head++)
            chosen->normalise(heads + head * head_bytes, layer->head_norms + head * g->head_dim,
                              heads + head * head_bytes, g->head_dim, layer->head_eps, 0);
        if (layer->rotated > 0)
            for (int64_t head = 0; head < g->num_heads + g->num_kv_heads; head++)
                chosen->turn(heads + head * head_bytes, layer->cosines + token * rotated_bytes,
                             layer->sines + token * rotated_bytes, layer->rotated, (int)g->is_half);
        const int64_t block = slots[token] / g->block_size, offset = slots[token] % g->block_size;
        for (int64_t page = 0; page < num_pages(g); page++) {
            char *kept = layer->layer + block * g->block_bytes + page * page_bytes(g);
            const char *head = heads + (g->num_heads + page) * head_bytes;
            if (g->coding == AS_THEY_COME)
                memcpy(kept + offset * head_bytes, head, (size_t)head_bytes);
            else
                chosen->encode(head, g->head_dim, (int)g->is_half, (int)g->coding, kept + offset * g->head_dim,
                               kept + g->block_size * g->head_dim + 4 * offset);
        }
    }
}

/* Of one KV head. Latent attention has few of them, so threads share its query heads. */
static inline int64_t parts_of_head(const Geometry *g)
{
    return g->shared_dim > 0 ? (g->num_heads / g->num_kv_heads + MAX_QUERIES - 1) / MAX_QUERIES : 1;
}

static void attend_part(const Work *shared, int64_t part)
{
    const Layer *layer = (const Layer *)shared;
    const Geometry *g = layer->geometry;
    const int64_t num_parts = parts_of_head(g), group = g->num_heads / g->num_kv_heads;
    const Item *item = items_of(layer->plan) + part / num_parts / g->num_kv_heads;
    const int64_t kv_head = part / num_parts % g->num_kv_heads, first = part % num_parts * MAX_QUERIES;
    const int64_t num_queries = num_parts == 1 || group - first < MAX_QUERIES ? group - first : MAX_QUERIES;
    const int64_t head_bytes = g->head_dim * (g->is_half ? 2 : 4);
    const int64_t output_bytes = (g->shared_dim > 0 ? g->shared_dim : g->head_dim) * (g->is_half ? 2 : 4);
    const Sight sight = {
        .layer = layer->layer,
        .table = tables_of(layer->plan) + item->row * layer->plan->width,
        .stop = item->length,
        .window = layer->window,
        .num_tokens = item->count,
        .num_queries = num_queries,
        .query_bytes = (g->num_heads + num_pages(g)) * head_bytes,
        .output_bytes = g->num_heads * output_bytes,
        .kv_head = kv_head,
        .num_kv_heads = g->num_kv_heads,
        .head_dim = g->head_dim,
        .shared_dim = g->shared_dim,
        .block_size = g->block_size,
        .block_bytes = g->block_bytes,
        .page_bytes = page_bytes(g),
        .is_half = (int)g->is_half,
        .coding = (int)g->coding,
        .softcap = (float)g->softcap,
        .sinks = layer->sinks == NULL ? NULL : layer->sinks + kv_head * group + first,
    };
    const int64_t row = item->token * (g->num_heads + num_pages(g)) + kv_head * group + first;
    const int64_t output_row = item->token * g->num_heads + kv_head * group + first;
    chosen->attend(&sight, layer->heads + row * head_bytes, (float)g->scale, layer->output + output_row * output_bytes);
}

#ifndef WITHOUT_PYTHON
static void attend_layer(Layer *layer)
{
    const Geometry *g = layer->geometry;
    const Plan *step = layer->plan;
    layer->work.compute = rope_and_keep;
    layer->work.num_parts = (step->num_tokens + ROWS_PER_PART - 1) / ROWS_PER_PART;
    share(&layer->work, step->num_tokens * (g->num_heads + num_pages(g)) * g->head_dim);
    int64_t num_seen = 0;
    for (int64_t item = 0; item < step->num_items; item++)
        num_seen += items_of(step)[item].length * items_of(step)[item].count;
    layer->work.compute = attend_part;
    layer->work.num_parts = step->num_items * g->num_kv_heads * parts_of_head(g);
    share(&layer->work, num_seen * g->num_heads * g->head_dim);
}

/* ---- Arguments ----------------------------------------------------------------------------------------------------- */

static int read_integers(PyObject *const *args, Py_ssize_t num_args, Py_ssize_t expected, int64_t *values)
{
    if (num_args != expected) {
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, num_args);
        return 0;
    }
    for (Py_ssize_t at = 0; at < expected; at++) {
        values[at] = PyLong_AsLongLong(args[at]);
        if (values[at] == -1 && PyErr_Occurred())
            return 0;
    }
    return 1;
}

static const Geometry *read_geometry(PyObject *packed)
{
    char *bytes;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(packed, &bytes, &size) < 0)
        return NULL;
    const Geometry *g = (const Geometry *)bytes;
    if (size != sizeof *g) {
        PyErr_Format(PyExc_ValueError, "expected a geometry of %zd bytes, got %zd", (Py_ssize_t)sizeof *g, size);
        return NULL;
    }
    const int64_t most = 1 << 30;
    if (g->num_kv_heads < 1 || g->num_heads < g->num_kv_heads || g->num_heads > most ||
        g->num_heads % g->num_kv_heads != 0 || g->head_dim < 1 || g->head_dim > MAX_DIM || g->block_size < 1 ||
        g->block_size > most || g->num_blocks < 1 || g->num_blocks > most || g->coding < AS_THEY_COME ||
        g->coding > FLOAT8 || g->shared_dim < 0 || g->shared_dim > g->head_dim ||
        (g->shared_dim > 0 && g->coding != AS_THEY_COME) || g->block_bytes / num_pages(g) < page_bytes(g)) {
        PyErr_SetString(PyExc_ValueError, "the geometry of a layer is out of range");
        return NULL;
    }
    return g;
}

/* An array of int64 without gaps, of `num_dims` dimensions. */
static int get_array(PyObject *array, Py_buffer *view, int num_dims, const char *name)
{
    if (PyObject_GetBuffer(array, view, PyBUF_ND | PyBUF_FORMAT) < 0)
        return 0;
    if (view->ndim == num_dims && view->itemsize == 8 && view->format != NULL && strchr("lq", view->format[0]) != NULL &&
        view->format[1] == '\0')
        return 1;
    PyErr_Format(PyExc_ValueError, "%s: expected an array of int64 of %d dimensions", name, num_dims);
    PyBuffer_Release(view);
    return 0;
}

/* ---- plan(geometry, num_queries, lens, tables, slots, most_queries, num_threads) ------------------------------------ */

/* The fault of a step; NULL if it has none, and every address computed from it then lies within the layer. */
static const char *fault_of(const Geometry *g, const Py_buffer views[4])
{
    const int64_t *num_queries = views[0].buf, *lens = views[1].buf, *tables = views[2].buf, *slots = views[3].buf;
    const int64_t num_rows = views[0].shape[0], width = views[2].shape[1], num_tokens = views[3].shape[0];
    if (views[1].shape[0] != num_rows || views[2].shape[0] != num_rows)
        return "num_queries, lens and tables differ in rows";
    int64_t counted = 0;
    for (int64_t row = 0; row < num_rows; row++) {
        if (num_queries[row] < 1 || num_queries[row] > num_tokens - counted || lens[row] < num_queries[row])
            return "num_queries do not fit to lens and slots";
        counted += num_queries[row];
        const int64_t num_used = (lens[row] - 1) / g->block_size + 1;
        if (num_used > width)
            return "a sequence is longer than its table";
        for (int64_t block = 0; block < num_used; block++)
            if (tables[row * width + block] < 0 || tables[row * width + block] >= g->num_blocks)
                return "a table names a block that does not exist";
    }
    if (counted != num_tokens)
        return "num_queries do not fit to slots";
    for (int64_t token = 0; token < num_tokens; token++)
        if (slots[token] < 0 || slots[token] >= g->num_blocks * g->block_size)
            return "a slot lies outside of the blocks";
    return NULL;
}

/* How many tokens a strip has: as many as share what they read, but parts for all threads. */
static int64_t strip_tokens(const Geometry *g, int64_t num_tokens, int64_t num_threads)
{
    const int64_t most = most_rows(g->head_dim) * g->num_kv_heads / g->num_heads;
    const int64_t shared = num_tokens * g->num_kv_heads / (4 * num_threads), fit = most < shared ? most : shared;
    return g->shared_dim > 0 || fit < 1 ? 1 : fit;
}

/* Rows of at most `most_queries` attend here; the others only store their keys and values. */
static PyObject *make_plan(const Geometry *g, const Py_buffer views[4], int64_t most_queries, int64_t num_threads)
{
    const int64_t *num_queries = views[0].buf, *lens = views[1].buf;
    const int64_t num_rows = views[2].shape[0];
    const int64_t each = strip_tokens(g, views[3].shape[0], num_threads);
    int64_t num_items = 0;
    for (int64_t row = 0; row < num_rows; row++)
        num_items += num_queries[row] <= most_queries ? (num_queries[row] + each - 1) / each : 0;
    Plan head = {g->num_blocks, g->block_size, views[3].shape[0], num_items, num_rows, views[2].shape[1], num_threads};
    const Py_ssize_t items_at = (Py_ssize_t)sizeof head + views[3].len;
    const Py_ssize_t tables_at = items_at + (Py_ssize_t)(num_items * (int64_t)sizeof(Item));
    PyObject *plan = PyBytes_FromStringAndSize(NULL, tables_at + views[2].len);
    if (plan == NULL)
        return NULL;
    char *bytes = PyBytes_AsString(plan);
    memcpy(bytes, &head, sizeof head);
    memcpy(bytes + sizeof head, views[3].buf, (size_t)views[3].len);
    memcpy(bytes + tables_at, views[2].buf, (size_t)views[2].len);
    Item *items = (Item *)(bytes + items_at);
    int64_t token = 0;
    for (int64_t row = 0; row < num_rows; token += num_queries[row], row++)
        if (num_queries[row] <= most_queries)
            for (int64_t query = 0; query < num_queries[row]; query += each) {
                const int64_t left = num_queries[row] - query;
                *items++ = (Item){token + query, row, lens[row] - left + 1, left < each ? left : each};
            }
    return plan;
}

static PyObject *plan(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    static const char *const names[4] = {"num_queries", "lens", "tables", "slots"};
    Py_buffer views[4];
    PyObject *made = NULL;
    int num_views = 0;
    int64_t numbers[2];
    (void)module;
    if (num_args != 7) {
        PyErr_SetString(PyExc_TypeError, "plan takes a geometry, four arrays, the most queries and threads");
        return NULL;
    }
    const Geometry *g = read_geometry(args[0]);
    if (g == NULL || !read_integers(args + 5, 2, 2, numbers))
        return NULL;
    while (num_views < 4 && get_array(args[1 + num_views], &views[num_views], num_views == 2 ? 2 : 1, names[num_views]))
        num_views++;
    if (num_views == 4) {
        const char *fault = fault_of(g, views);
        if (fault == NULL)
            made = make_plan(g, views, numbers[0], numbers[1] < 1 ? 1 : numbers[1]);
        else
            PyErr_SetString(PyExc_ValueError, fault);
    }
    while (num_views > 0)
        PyBuffer_Release(&views[--num_views]);
    return made;
}

/* ---- attend(geometry, plan, layer, heads, cosines, sines, output, rotated, window, sinks) --------------------------- */

static const Plan *read_plan(PyObject *made, const Geometry *g)
{
    char *bytes;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(made, &bytes, &size) < 0)
        return NULL;
    const Plan *found = (const Plan *)bytes;
    if ((size_t)size < sizeof *found || found->num_blocks != g->num_blocks || found->block_size != g->block_size) {
        PyErr_SetString(PyExc_ValueError, "the plan is not one of this geometry");
        return NULL;
    }
    return found;
}

static PyObject *attend(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    int64_t numbers[8];
    (void)module;
    if (num_args != 10) {
        PyErr_SetString(PyExc_TypeError, "attend takes a geometry, a plan, five addresses, a width, a window and sinks");
        return NULL;
    }
    const Geometry *g = read_geometry(args[0]);
    const Plan *step = g == NULL ? NULL : read_plan(args[1], g);
    if (step == NULL || !read_integers(args + 2, num_args - 2, 8, numbers))
        return NULL;
    if (numbers[5] < 0 || numbers[5] % 2 != 0 || numbers[5] > g->head_dim) {
        PyErr_SetString(PyExc_ValueError, "what is turned of a head is not within it");
        return NULL;
    }
    Layer layer = {
        .work = {.num_threads = step->num_threads},
        .geometry = g,
        .plan = step,
        .layer = (char *)(intptr_t)numbers[0],
        .heads = (char *)(intptr_t)numbers[1],
        .cosines = (const char *)(intptr_t)numbers[2],
        .sines = (const char *)(intptr_t)numbers[3],
        .output = (char *)(intptr_t)numbers[4],
        .rotated = numbers[5],
        .window = numbers[6],
        .sinks = (const float *)(intptr_t)numbers[7],
    };
    Py_BEGIN_ALLOW_THREADS
    attend_layer(&layer);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* ---- Row by row -----------------------------------------------------------------------------------------------------
 *
 * normalise(values, weight, output, num_rows, width, num_weights, stride, is_half, num_threads, eps)
 * gate(gates and ups, output, num_rows, width, is_half, num_threads)
 */

typedef struct {
    Work work;
    const char *values, *weight;
    char *output;
    int64_t num_rows, width, is_half;
    /* Each of `num_weights` rows that follow each other has a weight of its own; the next of them begin `stride` on. */
    int64_t num_weights, stride;
    double eps;
} Rows;

static void normalise_rows(const Work *shared, int64_t part)
{
    const Rows *rows = (const Rows *)shared;
    const int64_t item = rows->is_half ? 2 : 4, row_bytes = rows->width * item, stop = (part + 1) * ROWS_PER_PART;
    for (int64_t row = part * ROWS_PER_PART; row < stop && row < rows->num_rows; row++) {
        const int64_t place = row % rows->num_weights;
        const char *values = rows->values + row / rows->num_weights * rows->stride * item + place * row_bytes;
        chosen->normalise(values, rows->weight + place * row_bytes, rows->output + row * row_bytes, rows->width, rows->eps,
                          (int)rows->is_half);
    }
}

static void gate_rows(const Work *shared, int64_t part)
{
    const Rows *rows = (const Rows *)shared;
    const int64_t row_bytes = rows->width * (rows->is_half ? 2 : 4), stop = (part + 1) * ROWS_PER_PART;
    for (int64_t row = part * ROWS_PER_PART; row < stop && row < rows->num_rows; row++) {
        const char *gates = rows->values + 2 * row * row_bytes;
        chosen->gate(gates, gates + row_bytes, rows->output + row * row_bytes, rows->width, (int)rows->is_half);
    }
}

/* Few rows are finished before another Python thread would get its turn. */
static PyObject *share_rows(Rows *rows, int64_t num_threads)
{
    const int64_t num_values = rows->num_rows * rows->width;
    rows->work.num_parts = (rows->num_rows + ROWS_PER_PART - 1) / ROWS_PER_PART;
    rows->work.num_threads = num_threads;
    if (num_values > FEW_VALUES) {
        Py_BEGIN_ALLOW_THREADS
        share(&rows->work, num_values);
        Py_END_ALLOW_THREADS
    } else
        share(&rows->work, num_values);
    Py_RETURN_NONE;
}

static PyObject *normalise(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    int64_t n[9];
    (void)module;
    if (!read_integers(args, num_args - 1, 9, n))
        return NULL;
    const double eps = PyFloat_AsDouble(args[9]);
    if (eps == -1.0 && PyErr_Occurred())
        return NULL;
    Rows rows = {
        .work = {.compute = normalise_rows},
        .values = (const char *)(intptr_t)n[0],
        .weight = (const char *)(intptr_t)n[1],
        .output = (char *)(intptr_t)n[2],
        .num_rows = n[3],
        .width = n[4],
        .num_weights = n[5] < 1 ? 1 : n[5],
        .stride = n[6],
        .is_half = n[7],
        .eps = eps,
    };
    return share_rows(&rows, n[8]);
}

static PyObject *gate(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    int64_t n[6];
    (void)module;
    if (!read_integers(args, num_args, 6, n))
        return NULL;
    Rows rows = {
        .work = {.compute = gate_rows},
        .values = (const char *)(intptr_t)n[0],
        .output = (char *)(intptr_t)n[1],
        .num_rows = n[2],
        .width = n[3],
        .is_half = n[4],
    };
    return share_rows(&rows, n[5]);
}

/* ---- All layers of a step -------------------------------------------------------------------------------------------
 *
 * compute_layers(geometry, plan, layers, adapters, bounds, hidden, scratch, rotations...): `hidden` [tokens][hidden] in float32 passes each
 * layer in place: norm, product to queries, keys and values, attention, product that is added, norm, product to gates
 * and ups, gate, product that is added. So between products of a few rows, whose weights fill the caches, no Python runs.
 * `scratch` has room for `scratch_width` floats for each token. `rotations` are three numbers each: addresses of cosines
 * and sines, and how much of a head is turned. `adapters` is empty, or says for each product of each layer how many bytes
 * of additions follow, and these; `bounds` is the address of those of its runs. See `add_all_runs` of _packed_linear.c.
 */

/* _packed_linear.c: `multiply_rows`. */
typedef int (*Multiply)(const void *, const float *, int64_t, float *, int64_t, const float *, int64_t, int64_t, Team *);
/* The same: `add_all_runs`. */
typedef int (*Add)(const void *, int64_t, const int64_t *, const float *, float *, int64_t, int64_t, Team *);

/* `struct.pack("7q")` in cpu_layers.py. */
typedef struct {
    int64_t num_layers, hidden, inner, scratch_width, matrix_bytes, multiply, add;
} Network;

/* `struct.pack("11q3d")`; the parts of the four products follow, each of them two numbers and a matrix. */
typedef struct {
    int64_t attention_norm, head_norms, mlp_norm, kept, window, sinks, rotation;
    int64_t num_parts[4];
    double attention_eps, head_eps, mlp_eps;
} LayerHead;

/* A product that writes the outputs from number `first` on. */
typedef struct {
    int64_t first, bias;
} Part;

/* What is to be read next of layers, and of adapters, if the step has any. */
typedef struct {
    const char *layers, *adapters;
} Place;

typedef struct {
    const Geometry *geometry;
    const Plan *plan;
    const Network *network;
    const int64_t *rotations, *bounds;
    float *hidden, *scratch;
    Place place;
    Team *team;
    int is_done;
} Step;

/* All parts of one product, and what adapters add to it; the place moves behind them. */
static int multiply_parts(const Step *step, Place *next, int64_t num_parts, const float *rows, float *output,
                          int64_t width, int is_added)
{
    const Network *network = step->network;
    int is_done = 1;
    for (int64_t at = 0; is_done && at < num_parts; at++) {
        const Part *part = (const Part *)next->layers;
        is_done = ((Multiply)(intptr_t)network->multiply)(part + 1, rows, step->plan->num_tokens, output + part->first,
                                                          width, (const float *)(intptr_t)part->bias, is_added,
                                                          step->plan->num_threads, step->team);
        next->layers += sizeof *part + (size_t)network->matrix_bytes;
    }
    if (is_done && next->adapters != NULL) {
        const int64_t *size = (const int64_t *)next->adapters;
        is_done = ((Add)(intptr_t)network->add)(size + 1, *size, step->bounds, rows, output, width,
                                                step->plan->num_threads, step->team);
        next->adapters += (int64_t)sizeof *size + *size;
    }
    return is_done;
}

static void normalise_hidden(const Step *step, int64_t weight, double eps)
{
    Rows rows = {
        .work = {.compute = normalise_rows, .num_threads = step->plan->num_threads, .team = step->team},
        .values = (const char *)step->hidden,
        .weight = (const char *)(intptr_t)weight,
        .output = (char *)step->scratch,
        .num_rows = step->plan->num_tokens,
        .width = step->network->hidden,
        .num_weights = 1,
        .stride = step->network->hidden,
        .eps = eps,
    };
    rows.work.num_parts = (rows.num_rows + ROWS_PER_PART - 1) / ROWS_PER_PART;
    share(&rows.work, rows.num_rows * rows.width);
}

static void gate_hidden(const Step *step, const float *both, float *output)
{
    Rows rows = {
        .work = {.compute = gate_rows, .num_threads = step->plan->num_threads, .team = step->team},
        .values = (const char *)both,
        .output = (char *)output,
        .num_rows = step->plan->num_tokens,
        .width = step->network->inner,
    };
    rows.work.num_parts = (rows.num_rows + ROWS_PER_PART - 1) / ROWS_PER_PART;
    share(&rows.work, rows.num_rows * rows.width);
}

/* The place moves behind the layer. 0 if there is no memory. */
static int compute_layer(const Step *step, Place *next)
{
    const LayerHead *head = (const LayerHead *)next->layers;
    const Geometry *g = step->geometry;
    const int64_t num_tokens = step->plan->num_tokens, hidden = step->network->hidden, inner = step->network->inner;
    const int64_t heads_width = (g->num_heads + 2 * g->num_kv_heads) * g->head_dim;
    const int64_t *rotation = step->rotations + 3 * head->rotation;
    float *rows = step->scratch, *wide = rows + num_tokens * hidden, *narrow = wide + num_tokens * heads_width;
    next->layers = (const char *)(head + 1);
    Layer layer = {
        .work = {.num_threads = step->plan->num_threads, .team = step->team},
        .geometry = g,
        .plan = step->plan,
        .layer = (char *)(intptr_t)head->kept,
        .heads = (char *)wide,
        .output = (char *)narrow,
        .cosines = head->rotation < 0 ? NULL : (const char *)(intptr_t)rotation[0],
        .sines = head->rotation < 0 ? NULL : (const char *)(intptr_t)rotation[1],
        .rotated = head->rotation < 0 ? 0 : rotation[2],
        .window = head->window,
        .sinks = (const float *)(intptr_t)head->sinks,
        .head_norms = (const float *)(intptr_t)head->head_norms,
        .head_eps = head->head_eps,
    };
    normalise_hidden(step, head->attention_norm, head->attention_eps);
    if (!multiply_parts(step, next, head->num_parts[0], rows, wide, heads_width, 0))
        return 0;
    attend_layer(&layer);
    if (!multiply_parts(step, next, head->num_parts[1], narrow, step->hidden, hidden, 1))
        return 0;
    normalise_hidden(step, head->mlp_norm, head->mlp_eps);
    if (!multiply_parts(step, next, head->num_parts[2], rows, wide, 2 * inner, 0))
        return 0;
    narrow = wide + num_tokens * 2 * inner;
    gate_hidden(step, wide, narrow);
    return multiply_parts(step, next, head->num_parts[3], narrow, step->hidden, hidden, 1);
}

static void lead_step(void *argument, Team *team)
{
    Step *step = argument;
    step->team = team;
    step->is_done = 1;
    for (int64_t layer = 0; step->is_done && layer < step->network->num_layers; layer++)
        step->is_done = compute_layer(step, &step->place);
}

/* The end of the layers as their numbers say it, or NULL if that lies outside of them. */
static const Network *read_network(PyObject *packed, int64_t num_rotations)
{
    char *bytes;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(packed, &bytes, &size) < 0)
        return NULL;
    const Network *network = (const Network *)bytes;
    int64_t left = size - (int64_t)sizeof *network;
    const char *at = bytes + sizeof *network;
    int is_right = left >= 0 && network->matrix_bytes > 0 && network->matrix_bytes < 1 << 16;
    for (int64_t number = 0; is_right && number < network->num_layers; number++) {
        const LayerHead *head = (const LayerHead *)at;
        is_right = left >= (int64_t)sizeof *head && head->rotation < num_rotations;
        int64_t num_bytes = sizeof *head;
        for (int product = 0; is_right && product < 4; product++) {
            is_right = head->num_parts[product] > 0 && head->num_parts[product] < 64;
            num_bytes += head->num_parts[product] * ((int64_t)sizeof(Part) + network->matrix_bytes);
        }
        is_right = is_right && num_bytes <= left;
        at += num_bytes, left -= num_bytes;
    }
    if (is_right && left == 0)
        return network;
    PyErr_SetString(PyExc_ValueError, "the layers are not as they are packed");
    return NULL;
}

/* Whether `packed` has as many additions as the layers have products; `found` is NULL where it is empty. */
static int read_adapters(PyObject *packed, const Network *network, const char **found)
{
    char *bytes;
    Py_ssize_t left;
    if (PyBytes_AsStringAndSize(packed, &bytes, &left) < 0)
        return 0;
    *found = left == 0 ? NULL : bytes;
    int64_t num_products = left == 0 ? 0 : 4 * network->num_layers;
    for (int64_t size; num_products > 0 && left >= (Py_ssize_t)sizeof size; num_products--) {
        memcpy(&size, bytes, sizeof size);
        if (size < 0 || size > left - (Py_ssize_t)sizeof size)
            break;
        bytes += (Py_ssize_t)sizeof size + size, left -= (Py_ssize_t)sizeof size + size;
    }
    if (num_products == 0 && left == 0)
        return 1;
    PyErr_SetString(PyExc_ValueError, "the adapters are not as they are packed");
    return 0;
}

static PyObject *compute_layers(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    int64_t numbers[3 + 3 * MAX_ROTATIONS];
    (void)module;
    if (num_args < 7 || num_args > 7 + 3 * MAX_ROTATIONS || (num_args - 7) % 3 != 0) {
        PyErr_SetString(PyExc_TypeError, "compute_layers takes a geometry, a plan, layers, adapters, three addresses and rotations");
        return NULL;
    }
    const Geometry *g = read_geometry(args[0]);
    const Plan *plan = g == NULL ? NULL : read_plan(args[1], g);
    const Network *network = plan == NULL ? NULL : read_network(args[2], (num_args - 7) / 3);
    const char *adapters = NULL;
    if (network == NULL || !read_adapters(args[3], network, &adapters) ||
        !read_integers(args + 4, num_args - 4, num_args - 4, numbers))
        return NULL;
    for (Py_ssize_t at = 3 + 2; at < num_args - 4; at += 3)
        if (numbers[at] < 0 || numbers[at] % 2 != 0 || numbers[at] > g->head_dim) {
            PyErr_SetString(PyExc_ValueError, "what is turned of a head is not within it");
            return NULL;
        }
    const int64_t attending = (2 * g->num_heads + 2 * g->num_kv_heads) * g->head_dim;
    if (g->is_half || g->shared_dim > 0 || network->scratch_width < network->hidden + attending ||
        network->scratch_width < network->hidden + 3 * network->inner) {
        PyErr_SetString(PyExc_ValueError, "the layers are in half precision, or their scratch is too small");
        return NULL;
    }
    Step step = {
        .geometry = g,
        .plan = plan,
        .network = network,
        .rotations = numbers + 3,
        .bounds = (const int64_t *)(intptr_t)numbers[0],
        .hidden = (float *)(intptr_t)numbers[1],
        .scratch = (float *)(intptr_t)numbers[2],
        .place = {(const char *)(network + 1), adapters},
    };
    Py_BEGIN_ALLOW_THREADS
    lead_team(lead_step, &step, plan->num_threads);
    Py_END_ALLOW_THREADS
    return step.is_done ? Py_NewRef(Py_None) : PyErr_NoMemory();
}

/* ---- The module ---------------------------------------------------------------------------------------------------- */

/* use(width): compute with vectors of `width` floats from now on. Tests call it for each set of instructions. */
static PyObject *use(PyObject *module, PyObject *wanted)
{
    long width = PyLong_AsLong(wanted);
    (void)module;
    if (width == -1 && PyErr_Occurred())
        return NULL;
    for (int index = 0; index < NUM_KERNELS; index++)
        if (all_kernels[index].width == width && can_run(&all_kernels[index])) {
            chosen = &all_kernels[index];
            Py_RETURN_NONE;
        }
    PyErr_Format(PyExc_ValueError, "no kernels for vectors of %ld floats run here", width);
    return NULL;
}

static PyObject *widths(PyObject *module, PyObject *nothing)
{
    PyObject *found = PyList_New(0);
    (void)module, (void)nothing;
    for (int index = 0; found != NULL && index < NUM_KERNELS; index++)
        if (can_run(&all_kernels[index])) {
            PyObject *width = PyLong_FromLong(all_kernels[index].width);
            if (width == NULL || PyList_Append(found, width) < 0)
                Py_CLEAR(found);
            Py_XDECREF(width);
        }
    return found;
}

#define FAST(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    FAST(plan),
    FAST(attend),
    FAST(normalise),
    FAST(gate),
    FAST(compute_layers),
    {"use", use, METH_O, NULL},
    {"widths", widths, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_kernels", "See kernels.py.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernels(void)
{
#ifdef __x86_64__
    __builtin_cpu_init();
#endif
    chosen = all_kernels;
    while (!can_run(chosen))
        chosen++;
    find_threads();
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddIntConstant(module, "MAX_HEAD_DIM", MAX_DIM) < 0)
        Py_CLEAR(module);
#ifdef SOURCE_DIGEST
    if (module != NULL && PyModule_AddStringConstant(module, "SOURCE_DIGEST", SOURCE_DIGEST) < 0)
        Py_CLEAR(module);
#endif
    return module;
}
#endif
