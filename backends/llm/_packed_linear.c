/* Products with weights in few bits, straight from their packed form, on a CPU.
 *
 * packed_matrix.py packs weights, checks every shape, and says what the forms mean; quantized_weight.py is what they are
 * exactly. Functions take addresses of tensors. Only the stable ABI is used: one build serves Python 3.11 and later.
 *
 * Outputs lie in blocks of LANES, which the chosen set of instructions decides: byte by byte for the inputs in turn,
 * so that a 32-bit lane of a vector belongs to one output. Integer forms multiply rows in 8 bits, with a step and a sum
 * for each 32 inputs; the others multiply floats.
 *
 * There is own code for AVX2 (with FMA and F16C), AVX-VNNI, AVX-512 (F, BW, DQ, VL), AVX-512 VNNI, and on Linux for NEON
 * with dotprod and with i8mm. The generic code serves all other processors.
 *
 * All of them, and any number of rows and threads, sum in one order, so a row's result has the same bits whatever is
 * multiplied with it. The integers of a unit of inputs are summed exactly. Units (or single inputs, of floats) are then
 * added from the first to the last of a segment, each with a fused multiply-add, and the segments from the first to the
 * last. Offsets are summed apart, and subtracted at the end of a segment. Only the generic code on x86-64 without FMA
 * rounds twice where the others round once.
 */

#ifndef WITHOUT_PYTHON /* tests in C include this file as it is, without the module */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#endif

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>
#endif
#ifdef __aarch64__
#include <arm_neon.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include "_kernels_threads.h"

/* Tests in C define these three otherwise: for instructions that are emulated, and to compile in seconds. */
#ifndef TARGET_OF
#define TARGET_OF(instructions) __attribute__((target(instructions)))
#endif
#ifndef INLINED
#define INLINED static inline __attribute__((always_inline))
#endif
/* Compilers would add up in another order, and keep all parts in memory until then. */
#ifndef IN_THIS_ORDER
#define IN_THIS_ORDER(vector) __asm__("" : "+v"(vector))
#endif

/* Inputs of a segment, for codes and for floats; rows, and sums for each row, that one part computes at a time. */
#define SEGMENT 2048
#define FLOAT_SEGMENT 256
#define MOST_ROWS 64
#define SUMS_PER_ROW 64
/* From this many rows on, codes are unpacked once for all of them. */
#define EXPANDED_ROWS 16

/* 1.5 * 2^23: the last bit of a sum of it and less than 2^22 is 1. */
#define ONE_AND_A_HALF 12582912.0f
#define ONE_AND_A_HALF_BITS 0x4B400000

enum Form { CODES4, TABLE4, CODES8, BF16, F16, FLOAT8, F32, CODES5, CODES6, NUM_FORMS };
/* CONSTANT: all zeros are the number that stands in place of the address. */
enum Kind { NONE, FLOAT32, FLOAT16, BFLOAT16, UINT8, INT8, CONSTANT, NUM_KINDS };

/* [blocks][groups][LANES] */
typedef struct {
    int64_t kind;
    const void *data;
} Values;

/* `struct.pack` in packed_matrix.py. `width` inputs, padded, in units of `unit` that have one scale in the kernels; `group`
 * inputs have one in the weight. A scale factor serves `scale_each` groups. */
typedef struct {
    int64_t form, lanes, num_outputs, num_inputs, width, unit, group, num_groups;
    int64_t num_scale_factors, scale_each, num_min_factors, min_each;
    Values scales, zeros, mins, scale_factors, min_factors;
    const uint8_t *codes, *table;
    const int64_t *order;
} Matrix;

/* Rows in 8 bits: codes [rows][code_stride], steps [rows][width / 32], sums of the codes times their steps [rows][width / unit],
 * and what the integer sums of a unit begin with, so that a constant zero costs nothing. */
typedef struct {
    int8_t *codes;
    float *steps, *sums;
    int32_t *starts;
} Quantized;

/* The rows of a tile are not all in the same place of a cache. */
static inline int64_t code_stride(const Matrix *w)
{
    return w->width + 64;
}

#define FORM_BITS(form) ((form) == CODES8 ? 8 : (form) == CODES6 ? 6 : (form) == CODES5 ? 5 : 4)

static inline float half_to_float(uint16_t half)
{
    const uint32_t magnitude = (uint32_t)(half & 0x7FFF) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    const uint32_t bits = magnitude >= 0x0F800000 ? magnitude | 0x70000000 : magnitude;
    float value;
    memcpy(&value, &bits, sizeof value);
    if (magnitude < 0x0F800000)
        value *= 5.192296858534828e33f; /* 2^112: also of what is too small to have an exponent of its own */
    uint32_t signed_bits;
    memcpy(&signed_bits, &value, sizeof signed_bits);
    signed_bits |= sign;
    memcpy(&value, &signed_bits, sizeof value);
    return value;
}

/* ---- The kernels, for each set of instructions --------------------------------------------------------------------- */

#define GENERIC 0
#define AVX2 1
#define AVXVNNI 2
#define AVX512 3
#define AVX512VNNI 4
#define DOTPROD 5
#define I8MM 6

/* Any processor. */
#define ISA GENERIC
#define TARGET
#define LANES 4
#define CODE_ROWS 2
#define FLOAT_ROWS 4
#define ROW_BLOCKS 1
#define NAME(name) name##_generic
#include "_packed_vector.h"
#undef ISA
#undef TARGET
#undef LANES
#undef CODE_ROWS
#undef FLOAT_ROWS
#undef ROW_BLOCKS
#undef NAME

#if defined(__aarch64__) && defined(__linux__)
#define HAS_DOTPROD
/* NEON, of which some processors multiply codes of 8 bits by fours, and some of these by matrices of 2 x 8. */
#define LANES 4
#define CODE_ROWS 8
#define FLOAT_ROWS 6
#define ROW_BLOCKS 1

#define ISA DOTPROD
#ifdef __clang__
#define TARGET TARGET_OF("dotprod")
#else
#define TARGET TARGET_OF("arch=armv8.2-a+dotprod")
#endif
#define NAME(name) name##_dotprod
#include "_packed_vector.h"
#undef ISA
#undef TARGET
#undef NAME

#define ISA I8MM
#ifdef __clang__
#define TARGET TARGET_OF("dotprod,i8mm")
#else
#define TARGET TARGET_OF("arch=armv8.2-a+dotprod+i8mm")
#endif
#define NAME(name) name##_i8mm
#include "_packed_vector.h"
#undef ISA
#undef TARGET
#undef NAME
#endif

#ifdef __x86_64__
/* AVX2 adds two products of codes in 16 bits; VNNI adds four in 32 bits. */
#define LANES 8
#define CODE_ROWS 4
#define FLOAT_ROWS 6
#define ROW_BLOCKS 2

#define ISA AVX2
#define TARGET TARGET_OF("avx2,fma,f16c")
#define NAME(name) name##_avx2
#include "_packed_vector.h"
#undef ISA
#undef TARGET
#undef NAME

#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define HAS_AVXVNNI
#define ISA AVXVNNI
#define TARGET TARGET_OF("avx2,fma,f16c,avxvnni")
#define NAME(name) name##_avxvnni
#include "_packed_vector.h"
#undef ISA
#undef TARGET
#undef NAME
#endif

#undef LANES
#undef CODE_ROWS
#undef FLOAT_ROWS
#define LANES 16
#define CODE_ROWS 8
#define FLOAT_ROWS 8

#define ISA AVX512
#define TARGET TARGET_OF("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#define NAME(name) name##_avx512
#include "_packed_vector.h"
#undef ISA
#undef TARGET
#undef NAME

#define ISA AVX512VNNI
#define TARGET TARGET_OF("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
#define NAME(name) name##_avx512vnni
#include "_packed_vector.h"
#undef ISA
#undef TARGET
#undef NAME
#endif

typedef struct {
    const char *name;
    int isa, lanes, float_rows, row_blocks;
    void (*multiply_codes)(const Matrix *, const Quantized *, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float *);
    void (*multiply_floats)(const Matrix *, const float *, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float *);
    void (*quantize)(const Matrix *, const float *, int8_t *, float *, float *, int32_t *);
} Kernels;

#define KERNELS(name, isa, lanes, float_rows, row_blocks) \
    {#name, isa, lanes, float_rows, row_blocks, \
     multiply_codes_##name, multiply_floats_##name, quantize_##name}

/* The fastest first: the module takes the first of them that this processor has. */
static const Kernels all_kernels[] = {
#ifdef __x86_64__
    KERNELS(avx512vnni, AVX512VNNI, 16, 8, 2),
#ifdef HAS_AVXVNNI
    KERNELS(avxvnni, AVXVNNI, 8, 6, 2),
#endif
    KERNELS(avx512, AVX512, 16, 8, 2),
    KERNELS(avx2, AVX2, 8, 6, 2),
#endif
#ifdef HAS_DOTPROD
    KERNELS(i8mm, I8MM, 4, 6, 1),
    KERNELS(dotprod, DOTPROD, 4, 6, 1),
#endif
    KERNELS(generic, GENERIC, 4, 4, 1),
};
#define NUM_KERNELS ((int)(sizeof all_kernels / sizeof all_kernels[0]))

static int can_run(const Kernels *kernels)
{
    if (kernels->isa == GENERIC)
        return 1;
#ifdef __x86_64__
    unsigned a = 0, b = 0, c = 0, d = 0;
    const int has_halves = __get_cpuid(1, &a, &b, &c, &d) && (c & 1u << 29);
    /* These ask the operating system, too, whether it keeps the registers. */
    if (!has_halves || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return 0;
    const int has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    switch (kernels->isa) {
    case AVX2:
        return 1;
    case AVXVNNI:
        return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
    case AVX512:
        return has_avx512;
    default:
        return has_avx512 && __builtin_cpu_supports("avx512vnni");
    }
#elif defined(HAS_DOTPROD)
    /* Bits of Linux's <asm/hwcap.h>, where old ones lack names: ASIMDDP, and I8MM in the second word. */
    const int has_dotprod = (getauxval(AT_HWCAP) & 1ul << 20) != 0;
    return has_dotprod && (kernels->isa == DOTPROD || (getauxval(AT_HWCAP2) & 1ul << 13) != 0);
#else
    return 0;
#endif
}

/* ---- A product ----------------------------------------------------------------------------------------------------- */

/* A matrix, and the rows [row, row + num_rows) that it multiplies. */
typedef struct {
    const Matrix *weight;
    const float *bias;
    int64_t row, num_rows;
} Group;

/* One matrix by all rows, or the experts of a mixture, each by rows of its own: matrices of groups have one shape, form
 * and unit, and `weight` is any of them. Only groups with rows are here, in the order of their rows. `rows` have no gaps;
 * `output_stride` values lie between the beginnings of two rows of the output. `is_added`: the output is added to. Rows
 * of floats are read with `stride`: the caller's own, or padded copies. */
typedef struct {
    Work work;
    const Group *groups;
    const Matrix *weight;
    const Kernels *kernels;
    const float *rows;
    float *output, *copies;
    Quantized quantized;
    int64_t num_groups, num_rows, stride, output_stride, blocks_per_part, parts_per_group;
    int is_added;
} Product;

static inline int is_float(const Matrix *w)
{
    return w->form >= BF16 && w->form <= F32;
}

static const Matrix *matrix_of(const Product *product, int64_t row)
{
    int64_t first = 0, stop = product->num_groups;
    while (stop - first > 1) {
        const int64_t middle = (first + stop) / 2;
        if (product->groups[middle].row <= row)
            first = middle;
        else
            stop = middle;
    }
    return product->groups[first].weight;
}

/* Prepares one row for the kernels: in the order of the codes, and quantized or padded. */
static void prepare_row(const Work *shared, int64_t row)
{
    const Product *product = (const Product *)shared;
    const Matrix *w = matrix_of(product, row);
    const float *given = product->rows + row * w->num_inputs;
    if (is_float(w)) {
        float *copy = product->copies + row * product->stride;
        memcpy(copy, given, (size_t)w->num_inputs * sizeof *copy);
        memset(copy + w->num_inputs, 0, (size_t)(w->width - w->num_inputs) * sizeof *copy);
        return;
    }
    const Quantized *x = &product->quantized;
    for (int64_t first = 0; first < w->width; first += 32) {
        float values[32];
        const float *read = values;
        const int64_t count = w->num_inputs - first < 32 ? w->num_inputs - first : 32;
        if (w->order == NULL && count == 32)
            read = given + first;
        else
            for (int64_t at = 0; at < 32; at++)
                values[at] = at >= count ? 0.0f : given[w->order == NULL ? first + at : w->order[first + at]];
        const int64_t unit = (row * w->width + first) / w->unit;
        product->kernels->quantize(w, read, x->codes + row * code_stride(w) + first, x->steps + (row * w->width + first) / 32,
                                   x->sums + unit, x->starts + unit);
    }
}

/* Multiplies blocks [block, stop) and a segment of inputs by rows [row, row + num_rows), and adds to `sums`. */
static void multiply_segment(const Product *product, const Matrix *w, int64_t block, int64_t stop, int64_t first,
                             int64_t count, int64_t row, int64_t num_rows, float *sums)
{
    const Kernels *kernels = product->kernels;
    if (is_float(w)) {
        const float *rows = product->copies == NULL ? product->rows : product->copies;
        kernels->multiply_floats(w, rows + row * product->stride + first, product->stride, block, stop - block, first,
                                 count, num_rows, sums);
        return;
    }
    kernels->multiply_codes(w, &product->quantized, block, stop - block, first, count, row, num_rows, sums);
}

static void finish(const Product *product, const float *bias, int64_t output, int64_t stop, int64_t row,
                   int64_t num_rows, const float *sums)
{
    const int64_t count = stop - output;
    for (int64_t at = 0; at < num_rows; at++, sums += SUMS_PER_ROW) {
        float *restrict written = product->output + (row + at) * product->output_stride + output;
        for (int64_t o = 0; bias != NULL && product->is_added && o < count; o++)
            written[o] += sums[o] + bias[output + o];
        for (int64_t o = 0; bias == NULL && product->is_added && o < count; o++)
            written[o] += sums[o];
        for (int64_t o = 0; bias != NULL && !product->is_added && o < count; o++)
            written[o] = sums[o] + bias[output + o];
        if (bias == NULL && !product->is_added)
            memcpy(written, sums, (size_t)count * sizeof *sums);
    }
}

/* Some blocks of a group's matrix by all of its rows. One row takes block by block, which memory sends as one stream. Few
 * rows take a block's inputs to their end, as memory has them; many take one segment of all blocks after the other, so that the rows' part of it stays in the cache. */
static void multiply_part(const Work *shared, int64_t part)
{
    const Product *product = (const Product *)shared;
    const Group *group = product->groups + part / product->parts_per_group;
    const Matrix *w = group->weight;
    const int64_t lanes = product->kernels->lanes, num_blocks = (w->num_outputs + lanes - 1) / lanes;
    const int64_t block = part % product->parts_per_group * product->blocks_per_part;
    const int64_t most = block + product->blocks_per_part, stop = most < num_blocks ? most : num_blocks;
    const int64_t last = stop * lanes < w->num_outputs ? stop * lanes : w->num_outputs;
    const int64_t last_row = group->row + group->num_rows;
    int64_t segment = is_float(w) ? FLOAT_SEGMENT : SEGMENT;
    if (is_float(w) && w->num_groups > 1)
        segment = w->group;
    float sums[MOST_ROWS * SUMS_PER_ROW];
    for (int64_t row = group->row; row < last_row; row += MOST_ROWS) {
        const int64_t num_rows = last_row - row < MOST_ROWS ? last_row - row : MOST_ROWS;
        const Kernels *kernels = product->kernels;
        const int64_t together = is_float(w) ? 4 : num_rows == 1 ? 1 : kernels->row_blocks;
        const int64_t stride = num_rows > 8 ? stop - block : together;
        memset(sums, 0, (size_t)num_rows * SUMS_PER_ROW * sizeof *sums);
        for (int64_t outer = block; outer < stop; outer += stride)
            for (int64_t first = 0; first < w->width; first += segment)
                for (int64_t inner = outer; inner < outer + stride && inner < stop; inner += together) {
                    const int64_t end = inner + together < stop ? inner + together : stop;
                    const int64_t count = w->width - first < segment ? w->width - first : segment;
                    multiply_segment(product, w, inner, end, first, count, row, num_rows,
                                     sums + (inner - block) * lanes);
                }
        finish(product, group->bias, block * lanes, last, row, num_rows, sums);
    }
}

/* Takes memory for the rows as kernels read them; returns 0 if there is none. */
static int prepare(Product *product)
{
    const Matrix *w = product->weight;
    const int64_t num_rows = product->num_rows;
    product->stride = w->num_inputs;
    if (is_float(w)) {
        int64_t most = 0;
        for (int64_t at = 0; at < product->num_groups; at++)
            most = product->groups[at].num_rows > most ? product->groups[at].num_rows : most;
        if (most <= product->kernels->float_rows && w->num_inputs == w->width)
            return 1;
        product->stride = w->width + 16; /* rows of a tile are not all in the same place of a cache */
        product->copies = malloc((size_t)(num_rows * product->stride) * sizeof(float));
        return product->copies != NULL;
    }
    const int64_t num_units = w->width / w->unit, num_steps = w->width / 32;
    char *memory = malloc((size_t)num_rows * (size_t)(code_stride(w) + 4 * num_steps + 8 * num_units));
    if (memory == NULL)
        return 0;
    product->quantized = (Quantized){
        .codes = (int8_t *)memory,
        .steps = (float *)(memory + num_rows * code_stride(w)),
        .sums = (float *)(memory + num_rows * (code_stride(w) + 4 * num_steps)),
        .starts = (int32_t *)(memory + num_rows * (code_stride(w) + 4 * num_steps + 4 * num_units)),
    };
    return 1;
}

static int multiply_all(Product *product)
{
    const Matrix *w = product->weight;
    const int64_t lanes = product->kernels->lanes, num_blocks = (w->num_outputs + lanes - 1) / lanes;
    if (product->num_rows == 0)
        return 1;
    if (!prepare(product))
        return 0;
    if (!is_float(w) || product->copies != NULL) {
        product->work.compute = prepare_row;
        product->work.num_parts = product->num_rows;
        share(&product->work, product->num_rows * w->width);
    }
    /* At least four parts for each thread, of at most SUMS_PER_ROW outputs. */
    const int64_t num_threads = product->work.num_threads < 1 ? 1 : product->work.num_threads;
    int64_t per_part = num_blocks * product->num_groups / (4 * num_threads);
    per_part = per_part < 4 ? 4 : per_part;
    product->blocks_per_part = per_part * lanes < SUMS_PER_ROW ? per_part : SUMS_PER_ROW / lanes;
    product->parts_per_group = (num_blocks + product->blocks_per_part - 1) / product->blocks_per_part;
    product->work.compute = multiply_part;
    product->work.num_parts = product->num_groups * product->parts_per_group;
    share(&product->work, product->num_groups * w->width * w->num_outputs);
    free(product->copies);
    free(product->quantized.codes);
    return 1;
}

/* ---- Rows of a matrix in floats ------------------------------------------------------------------------------------ */

static float value_at(const Values *values, int64_t at)
{
    float found;
    uint32_t bits;
    switch (values->kind) {
    case FLOAT32:
        return ((const float *)values->data)[at];
    case FLOAT16:
        return half_to_float(((const uint16_t *)values->data)[at]);
    case BFLOAT16:
        bits = (uint32_t)((const uint16_t *)values->data)[at] << 16;
        memcpy(&found, &bits, sizeof found);
        return found;
    case UINT8:
        return ((const uint8_t *)values->data)[at];
    case CONSTANT:
        return (float)(intptr_t)values->data;
    default:
        return ((const int8_t *)values->data)[at];
    }
}

/* A code as packed_matrix.py has put it there. */
static float code_at(const Matrix *w, int64_t output, int64_t input)
{
    const int64_t lanes = w->lanes, lane = output % lanes;
    const uint8_t *block = w->codes;
    switch (w->form) {
    case CODES8:
        block += output / lanes * w->width * lanes + input / 4 * 4 * lanes;
        return (int8_t)block[4 * lane + input % 4];
    case BF16:
    case F16: {
        const uint16_t *halves = (const uint16_t *)w->codes + output / lanes * w->width * lanes;
        const Values values = {w->form == F16 ? FLOAT16 : BFLOAT16, halves};
        return value_at(&values, w->form == F16 ? input * lanes + lane : (input / 2 * lanes + lane) * 2 + input % 2);
    }
    case F32:
        return ((const float *)w->codes)[(output / lanes * w->width + input) * lanes + lane];
    case FLOAT8: {
        const uint8_t small = block[(output / lanes * w->width + input) * lanes + lane];
        return half_to_float((uint16_t)((small & 0x80) << 8 | (small & 0x7F) << 7)) * 256.0f;
    }
    case CODES5: {
        const int64_t group = input % 32 / 4, vector = 4 * lanes;
        block += (output / lanes * w->width + input / 32 * 32) * lanes * 5 / 8 + 4 * lane + input % 4;
        if (group < 5)
            return (float)(block[group * vector] & 31);
        if (group == 7)
            return (float)(block[4 * vector] >> 5 | (block[vector] >> 2 & 8) | (block[3 * vector] >> 1 & 16));
        block += 2 * (group - 5) * vector;
        return (float)(block[0] >> 5 | (block[vector] >> 3 & 24));
    }
    case CODES6: {
        const int64_t group = input % 16 / 4, vector = 4 * lanes;
        block += (output / lanes * w->width + input / 16 * 16) * lanes * 6 / 8 + 4 * lane + input % 4;
        if (group < 3)
            return (float)(block[group * vector] & 63);
        return (float)(block[0] >> 6 | (block[vector] >> 4 & 12) | (block[2 * vector] >> 2 & 48));
    }
    default: {
        block += output / lanes * w->width * lanes / 2 + input / 8 * 4 * lanes;
        const uint8_t both = block[4 * lane + input % 4], code = input % 8 < 4 ? both & 15 : both >> 4;
        return w->form == TABLE4 ? (float)(int8_t)w->table[code] : (float)code;
    }
    }
}

typedef struct {
    Work work;
    const Matrix *weight;
    const int64_t *outputs;
    float *rows;
} Expansion;

static void expand_row(const Work *shared, int64_t row)
{
    const Expansion *expansion = (const Expansion *)shared;
    const Matrix *w = expansion->weight;
    const int64_t output = expansion->outputs[row], block = output / w->lanes, lane = output % w->lanes;
    float *values = expansion->rows + row * w->num_inputs, scale = 1.0f, zero = 0.0f, least = 0.0f;
    for (int64_t input = 0; input < w->num_inputs; input++) {
        if (w->scales.kind != NONE && input % w->group == 0) {
            const int64_t group = input / w->group, at = (block * w->num_groups + group) * w->lanes + lane;
            scale = value_at(&w->scales, at);
            if (w->scale_factors.kind != NONE)
                scale *= value_at(&w->scale_factors,
                                  (block * w->num_scale_factors + group / w->scale_each) * w->lanes + lane);
            zero = w->zeros.kind == NONE ? 0.0f : value_at(&w->zeros, at);
            least = w->mins.kind == NONE ? 0.0f : value_at(&w->mins, at);
            if (w->min_factors.kind != NONE)
                least *= value_at(&w->min_factors, (block * w->num_min_factors + group / w->min_each) * w->lanes + lane);
        }
        values[w->order == NULL ? input : w->order[input]] = (code_at(w, output, input) - zero) * scale - least;
    }
}

#include "_packed_blocks.h"

/* ---- The module ---------------------------------------------------------------------------------------------------- */

#ifndef WITHOUT_PYTHON
static const Kernels *chosen;

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

static int is_right(const Matrix *w)
{
    const int64_t most = (int64_t)1 << 31;
    const Values *all[] = {&w->scales, &w->zeros, &w->mins, &w->scale_factors, &w->min_factors};
    for (int at = 0; at < 5; at++)
        if (all[at]->kind < NONE || all[at]->kind >= NUM_KINDS || (all[at]->kind == CONSTANT && at != 1) ||
            (all[at]->kind != NONE && all[at]->kind != CONSTANT && all[at]->data == NULL))
            return 0;
    if (w->form < 0 || w->form >= NUM_FORMS || w->num_outputs < 1 || w->num_outputs > most || w->num_inputs < 1 ||
        w->width < w->num_inputs || w->width > most || w->codes == NULL || w->group < 1 || w->num_groups < 1 ||
        w->scale_each < 1 || w->min_each < 1 || (w->form == TABLE4 && w->table == NULL))
        return 0;
    if (is_float(w))
        return w->width % 2 == 0 && (w->num_groups == 1 || (w->group <= FLOAT_SEGMENT && w->group % 2 == 0));
    if ((w->form == CODES5 && w->unit != 32) || (w->form == CODES6 && w->unit != 16))
        return 0;
    return w->width % 32 == 0 && (w->unit == 16 || w->unit == 32) && w->scales.kind != NONE &&
           (w->num_groups == 1 || w->group % w->unit == 0);
}

/* Whether all matrices can be multiplied in one product. */
static int are_alike(const Matrix *first, int64_t num_matrices)
{
    for (const Matrix *w = first + 1; w < first + num_matrices; w++)
        if (w->form != first->form || w->lanes != first->lanes || w->num_outputs != first->num_outputs ||
            w->num_inputs != first->num_inputs || w->width != first->width || w->unit != first->unit)
            return 0;
    return 1;
}

/* One matrix, or several that are alike. */
static const Matrix *read_matrices(PyObject *packed, int64_t *num_matrices)
{
    char *bytes;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(packed, &bytes, &size) < 0)
        return NULL;
    const Matrix *w = (const Matrix *)bytes;
    *num_matrices = size / (Py_ssize_t)sizeof *w;
    int are_right = *num_matrices > 0 && size % (Py_ssize_t)sizeof *w == 0;
    for (int64_t at = 0; are_right && at < *num_matrices; at++)
        are_right = is_right(w + at);
    if (!are_right || !are_alike(w, *num_matrices)) {
        PyErr_SetString(PyExc_ValueError, "expected packed matrices of one shape and form");
        return NULL;
    }
    return w;
}

/* The groups that have rows, of `counts` [num_matrices], or all rows for the only matrix; returns their number, or -1
 * with an exception. */
static int64_t make_groups(Group *groups, const Matrix *matrices, int64_t num_matrices, const int64_t *counts,
                           int64_t num_rows, const float *bias)
{
    int64_t num_groups = 0, row = 0;
    for (int64_t at = 0; at < num_matrices; at++) {
        const int64_t count = counts == NULL ? num_rows : counts[at];
        if (count < 0 || count > num_rows - row)
            break;
        if (count > 0)
            groups[num_groups++] =
                (Group){matrices + at, bias == NULL ? NULL : bias + at * matrices->num_outputs, row, count};
        row += count;
    }
    if (row == num_rows)
        return num_groups;
    PyErr_SetString(PyExc_ValueError, "the counts of rows do not add up to the rows");
    return -1;
}

/* One matrix by rows [num_rows][inputs], for `compute_layers` of _kernels.c, which gets its address from Python. 0 if there
 * is no memory, or the matrix was packed for other instructions. */
static int multiply_rows(const void *matrix, const float *rows, int64_t num_rows, float *output, int64_t output_stride,
                         const float *bias, int64_t is_added, int64_t num_threads, Team *team)
{
    const Matrix *w = matrix;
    if (w->lanes != chosen->lanes)
        return 0;
    const Group group = {w, bias, 0, num_rows};
    Product product = {
        .work = {.num_threads = num_threads, .team = team},
        .groups = &group,
        .num_groups = 1,
        .weight = w,
        .kernels = chosen,
        .rows = rows,
        .num_rows = num_rows,
        .output = output,
        .output_stride = output_stride,
        .is_added = is_added != 0,
    };
    return multiply_all(&product);
}

/* What adapters add to some outputs, from number `output` on, of the rows of `num_runs` runs of a step; `struct.pack("3q")`
 * in lora/layers.py. As many matrices follow that narrow rows, and then those that widen them again. */
typedef struct {
    int64_t output, first_run, num_runs;
} Addition;

/* Adds one. Run i is rows [bounds[i], bounds[i + 1]) of `rows` and `output`. 0 if there is no memory. */
static int add_runs(const Addition *addition, const int64_t *bounds, const float *rows, float *output,
                    int64_t output_stride, int64_t num_threads, Team *team)
{
    const Matrix *down = (const Matrix *)(addition + 1), *up = down + addition->num_runs;
    const int64_t rank = down->num_outputs, num_runs = addition->num_runs;
    bounds += addition->first_run;
    const int64_t first = bounds[0], num_rows = bounds[num_runs] - first;
    Group *groups = malloc(2 * (size_t)num_runs * sizeof *groups);
    float *narrow = malloc((size_t)(num_rows * rank) * sizeof *narrow + 1);
    int is_done = groups != NULL && narrow != NULL;
    for (int64_t run = 0; is_done && run < num_runs; run++) {
        groups[run] = (Group){down + run, NULL, bounds[run] - first, bounds[run + 1] - bounds[run]};
        groups[num_runs + run] = (Group){up + run, NULL, bounds[run] - first, bounds[run + 1] - bounds[run]};
    }
    if (is_done) {
        Product product = {
            .work = {.num_threads = num_threads, .team = team},
            .groups = groups,
            .num_groups = num_runs,
            .weight = down,
            .kernels = chosen,
            .rows = rows + first * down->num_inputs,
            .num_rows = num_rows,
            .output = narrow,
            .output_stride = rank,
        };
        is_done = multiply_all(&product);
        product = (Product){
            .work = {.num_threads = num_threads, .team = team},
            .groups = groups + num_runs,
            .num_groups = num_runs,
            .weight = up,
            .kernels = chosen,
            .rows = narrow,
            .num_rows = num_rows,
            .output = output + first * output_stride + addition->output,
            .output_stride = output_stride,
            .is_added = 1,
        };
        is_done = is_done && multiply_all(&product);
    }
    free(narrow);
    free(groups);
    return is_done;
}

/* All additions of a layer, `size` bytes, which Python has checked; for `add_adapters`, and for `compute_layers` of
 * _kernels.c, which gets its address from Python. */
static int add_all_runs(const void *additions, int64_t size, const int64_t *bounds, const float *rows, float *output,
                        int64_t output_stride, int64_t num_threads, Team *team)
{
    const char *at = additions, *end = at + size;
    int is_done = 1;
    while (is_done && at < end) {
        const Addition *addition = (const Addition *)at;
        is_done = add_runs(addition, bounds, rows, output, output_stride, num_threads, team);
        at = (const char *)((const Matrix *)(addition + 1) + 2 * addition->num_runs);
    }
    return is_done;
}

static int are_additions(const char *at, int64_t size, const int64_t *bounds, int64_t num_bounds, int64_t num_rows,
                         int64_t num_inputs, int64_t output_stride)
{
    for (int64_t run = 0; run + 1 < num_bounds; run++)
        if (bounds[run] < 0 || bounds[run + 1] < bounds[run] || bounds[run + 1] > num_rows)
            return 0;
    while (size >= (int64_t)sizeof(Addition)) {
        const Addition *addition = (const Addition *)at;
        const Matrix *down = (const Matrix *)(addition + 1), *up = down + addition->num_runs;
        if (addition->num_runs < 1 || addition->first_run < 0 || addition->first_run >= num_bounds ||
            addition->num_runs >= num_bounds - addition->first_run)
            return 0;
        const int64_t taken = (int64_t)sizeof *addition + 2 * addition->num_runs * (int64_t)sizeof *down;
        if (taken > size)
            return 0;
        for (int64_t run = 0; run < 2 * addition->num_runs; run++)
            if (!is_right(down + run) || down[run].lanes != chosen->lanes)
                return 0;
        if (!are_alike(down, addition->num_runs) || !are_alike(up, addition->num_runs) ||
            up->num_inputs != down->num_outputs || down->num_inputs != num_inputs || addition->output < 0 ||
            addition->output > output_stride - up->num_outputs)
            return 0;
        at += taken, size -= taken;
    }
    return size == 0;
}

/* add_adapters(additions, bounds, num_bounds, rows, num_rows, num_inputs, output, output_stride, num_threads) */
static PyObject *add_adapters(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    int64_t n[8];
    char *additions;
    Py_ssize_t size;
    int is_done;
    (void)module;
    if (!read_integers(args + 1, num_args - 1, 8, n) || PyBytes_AsStringAndSize(args[0], &additions, &size) < 0)
        return NULL;
    const int64_t *bounds = (const int64_t *)(intptr_t)n[0];
    if (!are_additions(additions, size, bounds, n[1], n[3], n[4], n[6])) {
        PyErr_SetString(PyExc_ValueError, "expected runs of the rows, and matrices that fit them and the output");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    is_done = add_all_runs(additions, size, bounds, (const float *)(intptr_t)n[2], (float *)(intptr_t)n[5], n[6], n[7], NULL);
    Py_END_ALLOW_THREADS
    return is_done ? Py_NewRef(Py_None) : PyErr_NoMemory();
}

/* multiply(matrices, counts, rows, num_rows, output, output_stride, bias, is_added, num_threads)
 *
 * `matrices` are one after the other. `counts` [matrices] says how many of the rows, in turn, each of them multiplies; 0
 * for a single matrix. `bias` is [matrices][outputs] or 0. */
static PyObject *multiply(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    int64_t n[8], num_matrices;
    int is_done;
    (void)module;
    if (!read_integers(args + 1, num_args - 1, 8, n))
        return NULL;
    const Matrix *w = read_matrices(args[0], &num_matrices);
    if (w == NULL)
        return NULL;
    if (w->lanes != chosen->lanes) {
        PyErr_SetString(PyExc_ValueError, "the matrix was packed for other instructions");
        return NULL;
    }
    if (n[4] < w->num_outputs) {
        PyErr_SetString(PyExc_ValueError, "rows of the output overlap");
        return NULL;
    }
    Group only, *groups = num_matrices == 1 ? &only : malloc((size_t)num_matrices * sizeof *groups);
    if (groups == NULL)
        return PyErr_NoMemory();
    Product product = {
        .work = {.num_threads = n[7]},
        .groups = groups,
        .num_groups = make_groups(groups, w, num_matrices, (const int64_t *)(intptr_t)n[0], n[2],
                                  (const float *)(intptr_t)n[5]),
        .weight = w,
        .kernels = chosen,
        .rows = (const float *)(intptr_t)n[1],
        .num_rows = n[2],
        .output = (float *)(intptr_t)n[3],
        .output_stride = n[4],
        .is_added = n[6] != 0,
    };
    PyObject *result = NULL;
    if (product.num_groups >= 0) {
        Py_BEGIN_ALLOW_THREADS
        is_done = multiply_all(&product);
        Py_END_ALLOW_THREADS
        result = is_done ? Py_NewRef(Py_None) : PyErr_NoMemory();
    }
    if (groups != &only)
        free(groups);
    return result;
}

/* expand(matrix, outputs, num_outputs, rows, num_threads) */
static PyObject *expand(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    int64_t n[4], num_matrices;
    (void)module;
    if (!read_integers(args + 1, num_args - 1, 4, n))
        return NULL;
    const Matrix *w = read_matrices(args[0], &num_matrices);
    if (w == NULL)
        return NULL;
    const int64_t *outputs = (const int64_t *)(intptr_t)n[0];
    for (int64_t row = 0; row < n[1]; row++)
        if (outputs[row] < 0 || outputs[row] >= w->num_outputs) {
            PyErr_SetString(PyExc_IndexError, "the matrix has fewer outputs");
            return NULL;
        }
    Expansion expansion = {
        .work = {.compute = expand_row, .num_parts = n[1], .num_threads = n[3]},
        .weight = w,
        .outputs = outputs,
        .rows = (float *)(intptr_t)n[2],
    };
    Py_BEGIN_ALLOW_THREADS
    share(&expansion.work, n[1] * w->num_inputs);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* fill(matrix, type, first, rows, num_rows, num_threads): rows of blocks become its outputs from `first` on. */
static PyObject *fill(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    int64_t n[5], num_matrices;
    (void)module;
    if (!read_integers(args + 1, num_args - 1, 5, n))
        return NULL;
    const Matrix *w = read_matrices(args[0], &num_matrices);
    if (w == NULL)
        return NULL;
    const BlockType *type = find_block_type(n[0]);
    if (num_matrices != 1 || type == NULL || !can_fill(w, type) || n[1] < 0 || n[3] < 0 || n[1] > w->num_outputs - n[3]) {
        PyErr_SetString(PyExc_ValueError, "the matrix is not one of these blocks");
        return NULL;
    }
    Filling filling = {
        .work = {.compute = fill_part, .num_threads = n[4]},
        .weight = w,
        .type = type,
        .rows = (const uint8_t *)(intptr_t)n[2],
        .first = n[1],
        .num_rows = n[3],
    };
    filling.work.num_parts = n[3] == 0 ? 0 : (n[1] + n[3] - 1) / w->lanes - n[1] / w->lanes + 1;
    Py_BEGIN_ALLOW_THREADS
    share(&filling.work, n[3] * w->num_inputs);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* pack(form, lanes, width, num_inputs, rows, stride, num_rows, codes, num_threads): the codes of whole blocks, of rows of
 * codes in bytes, or of floats. */
static PyObject *pack(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    int64_t n[9];
    (void)module;
    if (!read_integers(args, num_args, 9, n))
        return NULL;
    const int64_t most = (int64_t)1 << 31;
    if (n[0] < 0 || n[0] >= NUM_FORMS || n[1] < 1 || n[1] > most || n[3] < 1 || n[2] < n[3] || n[2] > most || n[6] < 0 ||
        n[2] % (n[0] >= BF16 && n[0] <= F32 ? 2 : 32)) {
        PyErr_SetString(PyExc_ValueError, "no matrix has this form");
        return NULL;
    }
    Packing packing = {
        .work = {.compute = pack_part, .num_parts = (n[6] + n[1] - 1) / n[1], .num_threads = n[8]},
        .form = (enum Form)n[0],
        .lanes = n[1],
        .width = n[2],
        .num_inputs = n[3],
        .rows = (const uint8_t *)(intptr_t)n[4],
        .stride = n[5],
        .num_rows = n[6],
        .codes = (uint8_t *)(intptr_t)n[7],
    };
    Py_BEGIN_ALLOW_THREADS
    share(&packing.work, n[6] * n[2]);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* block_types(): the numbers in GGUF of the types that `fill` reads. */
static PyObject *list_block_types(PyObject *module, PyObject *nothing)
{
    PyObject *found = PyList_New(0);
    (void)module, (void)nothing;
    for (int index = 0; found != NULL && index < NUM_BLOCK_TYPES; index++) {
        PyObject *number = PyLong_FromLong(block_types[index].number);
        if (number == NULL || PyList_Append(found, number) < 0)
            Py_CLEAR(found);
        Py_XDECREF(number);
    }
    return found;
}

/* use(name): this set of instructions from now on; matrices are packed for its `lanes`. */
static PyObject *use(PyObject *module, PyObject *wanted)
{
    (void)module;
    PyObject *encoded = PyUnicode_AsUTF8String(wanted);
    if (encoded == NULL)
        return NULL;
    const char *name = PyBytes_AsString(encoded);
    for (int index = 0; index < NUM_KERNELS; index++)
        if (strcmp(all_kernels[index].name, name) == 0 && can_run(&all_kernels[index])) {
            chosen = &all_kernels[index];
            Py_DECREF(encoded);
            Py_RETURN_NONE;
        }
    PyErr_Format(PyExc_ValueError, "no kernels for %s run here", name);
    Py_DECREF(encoded);
    return NULL;
}

/* instructions(): the sets that run here, the fastest first. */
static PyObject *instructions(PyObject *module, PyObject *nothing)
{
    PyObject *found = PyList_New(0);
    (void)module, (void)nothing;
    for (int index = 0; found != NULL && index < NUM_KERNELS; index++)
        if (can_run(&all_kernels[index])) {
            PyObject *name = PyUnicode_FromString(all_kernels[index].name);
            if (name == NULL || PyList_Append(found, name) < 0)
                Py_CLEAR(found);
            Py_XDECREF(name);
        }
    return found;
}

static PyObject *lanes(PyObject *module, PyObject *nothing)
{
    (void)module, (void)nothing;
    return PyLong_FromLong(chosen->lanes);
}

#define FAST(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    FAST(multiply),
    FAST(add_adapters),
    FAST(expand),
    FAST(fill),
    FAST(pack),
    {"block_types", list_block_types, METH_NOARGS, NULL},
    {"use", use, METH_O, NULL},
    {"instructions", instructions, METH_NOARGS, NULL},
    {"lanes", lanes, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_packed_linear", "See packed_matrix.py.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__packed_linear(void)
{
#ifdef __x86_64__
    __builtin_cpu_init();
#endif
    chosen = all_kernels;
    while (!can_run(chosen))
        chosen++;
    find_threads();
    PyObject *module = PyModule_Create(&definition);
    const struct {
        const char *name;
        intptr_t address;
    } functions[] = {{"MULTIPLY_ROWS", (intptr_t)multiply_rows}, {"ADD_ALL_RUNS", (intptr_t)add_all_runs}};
    for (int at = 0; module != NULL && at < 2; at++) {
        PyObject *address = PyLong_FromVoidPtr((void *)functions[at].address);
        if (address == NULL || PyModule_AddObjectRef(module, functions[at].name, address) < 0)
            Py_CLEAR(module);
        Py_XDECREF(address);
    }
#ifdef SOURCE_DIGEST
    if (module != NULL && PyModule_AddStringConstant(module, "SOURCE_DIGEST", SOURCE_DIGEST) < 0)
        Py_CLEAR(module);
#endif
    return module;
}
#endif
