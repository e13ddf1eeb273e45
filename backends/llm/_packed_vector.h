/* Products of packed matrices for one set of instructions: _packed_linear.c includes this once for each.
 *
 * It defines ISA, TARGET (the attribute that allows its instructions), LANES (outputs in a block), NAME, which tells the
 * functions apart, and how many rows and blocks are multiplied at once. A 32-bit lane of a vector belongs to one output,
 * so nothing is ever summed across lanes. What differs is only how the integers of a unit are summed, which is exact.
 */

#define INLINE INLINED TARGET
#define fvec NAME(fvec)
#define ivec NAME(ivec)
#define bytes NAME(bytes)
#define halves NAME(halves)
#define UNROLL _Pragma("GCC unroll 16")
/* Units of one row whose scales are read at a time. */
#define UNITS_AT_ONCE (256 / LANES)
/* Reads ahead, across the pages that processors do not follow by themselves. Beyond the end of memory that does nothing. */
#define READ_AHEAD(at, num_bytes) __builtin_prefetch((const void *)((uintptr_t)(at) + (num_bytes)))

typedef float fvec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint8_t bytes __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

INLINE fvec NAME(load)(const float *values)
{
    fvec loaded;
    memcpy(&loaded, values, sizeof loaded);
    return loaded;
}

INLINE void NAME(store)(float *values, fvec stored)
{
    memcpy(values, &stored, sizeof stored);
}

INLINE bytes NAME(load_bytes)(const uint8_t *values)
{
    bytes loaded;
    memcpy(&loaded, values, sizeof loaded);
    return loaded;
}

INLINE fvec NAME(all)(float value)
{
    return value - (fvec){0};
}

INLINE ivec NAME(all_integers)(int32_t value)
{
    return value - (ivec){0};
}

INLINE ivec NAME(as_integers)(fvec values)
{
    ivec bits;
    memcpy(&bits, &values, sizeof bits);
    return bits;
}

INLINE fvec NAME(as_floats)(ivec bits)
{
    fvec values;
    memcpy(&values, &bits, sizeof bits);
    return values;
}

/* ---- What differs between the sets of instructions ----------------------------------------------------------------- */

#if ISA == AVX2 || ISA == AVXVNNI
#define BYTES(x) ((__m256i)(x))
#define IS_VNNI (ISA == AVXVNNI)
#define MADDUBS(a, b) _mm256_maddubs_epi16(a, b)
#define MADD(a, b) _mm256_madd_epi16(a, b)
#define ADD16(a, b) _mm256_add_epi16(a, b)
#define ONES _mm256_set1_epi16(1)
#define DPBUSD(sums, a, b) _mm256_dpbusd_avx_epi32(sums, a, b)
#define SHUFFLE_BYTES(table, index) _mm256_shuffle_epi8(table, index)
#define ABSOLUTE(codes) _mm256_abs_epi8(codes)
#define SIGNED_BY(x, codes) _mm256_sign_epi8(x, codes)
#define FMA(a, b, c) ((fvec)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define FROM_HALVES(h) ((fvec)_mm256_cvtph_ps((__m128i)(h)))
#define WIDEN_BYTES(values) ((ivec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(values))))
#define WIDEN_SIGNED(values) ((ivec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(values))))
#define WIDEN_TO_HALVES(values) ((halves)_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)(values))))
#elif ISA == AVX512 || ISA == AVX512VNNI
#define BYTES(x) ((__m512i)(x))
#define IS_VNNI (ISA == AVX512VNNI)
#define MADDUBS(a, b) _mm512_maddubs_epi16(a, b)
#define MADD(a, b) _mm512_madd_epi16(a, b)
#define ADD16(a, b) _mm512_add_epi16(a, b)
#define ONES _mm512_set1_epi16(1)
#define DPBUSD(sums, a, b) _mm512_dpbusd_epi32(sums, a, b)
#define SHUFFLE_BYTES(table, index) _mm512_shuffle_epi8(table, index)
#define ABSOLUTE(codes) _mm512_abs_epi8(codes)
#define SIGNED_BY(x, codes) _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(codes), _mm512_setzero_si512(), x)
#define FMA(a, b, c) ((fvec)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define FROM_HALVES(h) ((fvec)_mm512_cvtph_ps((__m256i)(h)))
#define WIDEN_BYTES(values) ((ivec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(values))))
#define WIDEN_SIGNED(values) ((ivec)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(values))))
#define WIDEN_TO_HALVES(values) ((halves)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(values))))
#else
#define IS_VNNI 0
#if defined(__aarch64__)
#define FMA(a, b, c) ((fvec)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#define FROM_HALVES(h) ((fvec)vcvt_f32_f16((float16x4_t)(h)))
#else
#define FMA(a, b, c) NAME(fma)(a, b, c)
#define FROM_HALVES(h) NAME(from_halves)(h)
#endif
#define WIDEN_BYTES(values) NAME(widen_bytes)(values)
#define WIDEN_SIGNED(values) ((NAME(widen_bytes)((const uint8_t *)(values)) ^ 128) - 128)
#define WIDEN_TO_HALVES(values) __builtin_convertvector(NAME(widen_bytes)(values), halves)

#ifndef __aarch64__
/* Rounds once, as the others do, where the compiler may use the instruction for it. */
INLINE fvec NAME(fma)(fvec a, fvec b, fvec c)
{
#ifdef __FP_FAST_FMAF
    for (int lane = 0; lane < LANES; lane++)
        c[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
    return c;
#else
    return a * b + c;
#endif
}

INLINE fvec NAME(from_halves)(halves h)
{
    fvec values;
    for (int lane = 0; lane < LANES; lane++)
        values[lane] = half_to_float(h[lane]);
    return values;
}
#endif

INLINE ivec NAME(widen_bytes)(const uint8_t *values)
{
    ivec wide;
    for (int lane = 0; lane < LANES; lane++)
        wide[lane] = values[lane];
    return wide;
}
#endif

/* The sixteen values of a table, in each part of a vector that instructions look up in. */
INLINE bytes NAME(load_table)(const uint8_t *table)
{
    uint8_t copies[4 * LANES];
    for (int at = 0; at < 4 * LANES; at += 16)
        memcpy(copies + at, table, 16);
    bytes loaded = NAME(load_bytes)(copies);
    return IS_VNNI ? loaded ^ 0x80 : loaded;
}

INLINE bytes NAME(look_up)(bytes table, bytes codes)
{
#if ISA == GENERIC
    for (int at = 0; at < 4 * LANES; at++)
        codes[at] = table[codes[at]];
    return codes;
#elif ISA == DOTPROD || ISA == I8MM
    return (bytes)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)codes);
#else
    return (bytes)SHUFFLE_BYTES(BYTES(table), BYTES(codes));
#endif
}

/* Signed codes as `dot` takes them. VNNI multiplies unsigned ones: 128 is added to each, as `load_table` has done. */
INLINE bytes NAME(signed_codes)(bytes codes, int is_looked_up)
{
    return IS_VNNI && !is_looked_up ? codes ^ 0x80 : codes;
}

/* To each lane, the products of its four codes with four of a row. `is_small`: codes from 0 to 15, 31 or 63; eight, four
 * or two sums of pairs of these with values up to 127 fit into 16 bits, so that `widen` makes them 32 bits wide later. */
INLINE ivec NAME(dot)(ivec sums, bytes codes, int32_t row, int is_small)
{
#if ISA == GENERIC
    ivec words;
    (void)is_small;
    memcpy(&words, &codes, sizeof words);
    const int32_t shift = 24;
    UNROLL for (int at = 0; at < 4; at++)
        sums += ((ivec)((words << (24 - 8 * at))) >> shift) * (int32_t)(int8_t)(row >> (8 * at));
    return sums;
#elif ISA == DOTPROD || ISA == I8MM
    (void)is_small;
    return (ivec)vdotq_s32((int32x4_t)sums, (int8x16_t)codes, (int8x16_t)NAME(all_integers)(row));
#else
    const bytes x = (bytes)NAME(all_integers)(row);
#if IS_VNNI
    (void)is_small;
    return (ivec)DPBUSD(BYTES(sums), BYTES(codes), BYTES(x));
#else
    if (is_small)
        sums = (ivec)ADD16(BYTES(sums), MADDUBS(BYTES(codes), BYTES(x)));
    else
        sums += (ivec)MADD(MADDUBS(ABSOLUTE(BYTES(codes)), SIGNED_BY(BYTES(x), BYTES(codes))), ONES);
    IN_THIS_ORDER(sums);
    return sums;
#endif
#endif
}

INLINE ivec NAME(widen)(ivec sums)
{
#ifdef MADD
    if (!IS_VNNI)
        sums = (ivec)MADD(BYTES(sums), ONES);
#endif
    return sums;
}

/* Some bits of each byte, moved down. What comes from the byte above is masked. */
INLINE bytes NAME(moved)(bytes values, const int shift, const int mask)
{
    ivec words;
    memcpy(&words, &values, sizeof words);
    words = (words >> shift) & mask * 0x01010101;
    memcpy(&values, &words, sizeof values);
    return values;
}

/* Groups of four inputs in a step of codes. */
INLINE int NAME(groups_of_step)(const int form)
{
    return form == CODES5 ? 8 : form == CODES6 ? 4 : 2;
}

/* The codes of four inputs, as `dot` wants them; `group` says which four of a step. Codes of 5 bits fill five vectors
 * with five groups, and the three bits above these have three more groups; those of 6 bits fill three with three, and
 * the two bits above have one more. */
INLINE bytes NAME(codes_of)(const uint8_t *step, const int group, bytes table, const int form)
{
    const int vector = 4 * LANES;
    if (form == CODES8)
        return NAME(signed_codes)(NAME(load_bytes)(step + group * vector), 0);
    if (form == CODES5 && group < 5)
        return NAME(load_bytes)(step + group * vector) & 31;
    if (form == CODES5 && group < 7) {
        const uint8_t *pair = step + 2 * (group - 5) * vector;
        return NAME(moved)(NAME(load_bytes)(pair), 5, 7) | NAME(moved)(NAME(load_bytes)(pair + vector), 3, 24);
    }
    if (form == CODES5)
        return NAME(moved)(NAME(load_bytes)(step + 4 * vector), 5, 7) |
               NAME(moved)(NAME(load_bytes)(step + vector), 2, 8) |
               NAME(moved)(NAME(load_bytes)(step + 3 * vector), 1, 16);
    if (form == CODES6 && group < 3)
        return NAME(load_bytes)(step + group * vector) & 63;
    if (form == CODES6)
        return NAME(moved)(NAME(load_bytes)(step), 6, 3) | NAME(moved)(NAME(load_bytes)(step + vector), 4, 12) |
               NAME(moved)(NAME(load_bytes)(step + 2 * vector), 2, 48);
    const bytes both = NAME(load_bytes)(step + group / 2 * vector), codes = group % 2 ? both >> 4 : both & 15;
    return form == TABLE4 ? NAME(signed_codes)(NAME(look_up)(table, codes), 1) : codes;
}

/* Group `group` of a unit. Expanded codes are what `codes_of` has found before, one byte for each. */
INLINE bytes NAME(unit_codes)(const uint8_t *codes, const int group, bytes table, const int form, const int is_expanded)
{
    const int each = NAME(groups_of_step)(form);
    if (is_expanded)
        return NAME(load_bytes)(codes + group * 4 * LANES);
    return NAME(codes_of)(codes + group / each * each * LANES * FORM_BITS(form) / 2, group % each, table, form);
}

/* ---- Numbers that belong to groups --------------------------------------------------------------------------------- */

/* LANES values of a kind, beginning with number `at`. */
INLINE fvec NAME(read)(const void *data, int64_t at, const int64_t kind)
{
    if (kind == FLOAT32)
        return NAME(load)((const float *)data + at);
    if (kind == FLOAT16 || kind == BFLOAT16) {
        halves h;
        memcpy(&h, (const uint16_t *)data + at, sizeof h);
        return kind == FLOAT16 ? FROM_HALVES(h) : NAME(as_floats)(__builtin_convertvector(h, ivec) << 16);
    }
    if (kind == INT8)
        return __builtin_convertvector(WIDEN_SIGNED((const int8_t *)data + at), fvec);
    return __builtin_convertvector(WIDEN_BYTES((const uint8_t *)data + at), fvec);
}

INLINE int64_t NAME(kind_bytes)(const int64_t kind)
{
    return LANES * (kind == FLOAT32 ? 4 : kind >= UINT8 ? 1 : 2);
}

/* Number `at` of the values that each lane has, times its factor. */
INLINE fvec NAME(scaled)(const Values *values, int64_t at, const int64_t kind, fvec factor, const int64_t factor_kind)
{
    const fvec value = NAME(read)(values->data, at * LANES, kind);
    return factor_kind == NONE ? value : value * factor;
}

/* Zero and minimum of group `at` together. */
INLINE fvec NAME(offset_of)(const Matrix *w, int64_t at, fvec scale, const int64_t zero_kind, const int64_t min_kind,
                            fvec min_factor, const int64_t min_factor_kind)
{
    fvec offset = {0};
    if (min_kind != NONE)
        offset = NAME(scaled)(&w->mins, at, min_kind, min_factor, min_factor_kind);
    if (zero_kind != NONE && zero_kind != CONSTANT)
        offset += scale * NAME(read)(w->zeros.data, at * LANES, zero_kind);
    return offset;
}

/* Writes the scale of each unit of a block, from input `first` on, and its offset (zero and minimum together) unless that
 * is nothing but a constant zero. The kinds are those of the matrix, as constants, so that reading has no branches.
 * Groups that share their factors are read in a run. */
INLINE void NAME(read_kinds)(const Matrix *w, int64_t block, int64_t first, int64_t num_units, float *scales,
                             float *offsets, const int64_t scale_kind, const int64_t zero_kind, const int64_t min_kind,
                             const int64_t scale_factor_kind, const int64_t min_factor_kind)
{
    const Matrix m = *w;
    const int has_offsets = min_kind != NONE || (zero_kind != NONE && zero_kind != CONSTANT);
    const int64_t each = m.num_groups == 1 ? num_units : m.group / m.unit;
    int64_t group = m.num_groups == 1 ? 0 : first / m.group, unit = 0;
    /* Units of the first group that come before this segment. */
    int64_t before = m.num_groups == 1 ? 0 : first % m.group / m.unit;
    while (unit < num_units) {
        int64_t stop = group + (num_units - unit + before + each - 1) / each;
        fvec scale_factor = {0}, min_factor = {0};
        if (scale_factor_kind != NONE) {
            const int64_t factor = group / m.scale_each, last = (factor + 1) * m.scale_each;
            stop = last < stop ? last : stop;
            const int64_t at = block * m.num_scale_factors + factor;
            READ_AHEAD((const char *)m.scale_factors.data + at * NAME(kind_bytes)(scale_factor_kind), 512);
            scale_factor = NAME(read)(m.scale_factors.data, at * LANES, scale_factor_kind);
        }
        if (min_factor_kind != NONE) {
            const int64_t factor = group / m.min_each, last = (factor + 1) * m.min_each;
            stop = last < stop ? last : stop;
            const int64_t at = block * m.num_min_factors + factor;
            READ_AHEAD((const char *)m.min_factors.data + at * NAME(kind_bytes)(min_factor_kind), 512);
            min_factor = NAME(read)(m.min_factors.data, at * LANES, min_factor_kind);
        }
        READ_AHEAD((const char *)m.scales.data + (block * m.num_groups + group) * NAME(kind_bytes)(scale_kind), 1024);
        if (min_kind != NONE)
            READ_AHEAD((const char *)m.mins.data + (block * m.num_groups + group) * NAME(kind_bytes)(min_kind), 1024);
        if (each == 1) { /* as a loop of its own it takes a third of the time */
            for (; group < stop; group++, unit++) {
                const int64_t at = block * m.num_groups + group;
                const fvec scale = NAME(scaled)(&m.scales, at, scale_kind, scale_factor, scale_factor_kind);
                NAME(store)(scales + unit * LANES, scale);
                if (has_offsets)
                    NAME(store)(offsets + unit * LANES,
                                NAME(offset_of)(&m, at, scale, zero_kind, min_kind, min_factor, min_factor_kind));
            }
            continue;
        }
        for (; group < stop; group++) {
            const int64_t at = block * m.num_groups + group;
            const fvec scale = NAME(scaled)(&m.scales, at, scale_kind, scale_factor, scale_factor_kind);
            const fvec offset = NAME(offset_of)(&m, at, scale, zero_kind, min_kind, min_factor, min_factor_kind);
            int64_t left = each - before < num_units - unit ? each - before : num_units - unit;
            before = 0;
            do {
                NAME(store)(scales + unit * LANES, scale);
                if (has_offsets)
                    NAME(store)(offsets + unit * LANES, offset);
                unit++;
            } while (--left > 0);
        }
    }
}

/* Compiled once for each set of kinds that is common, and once for all others. */
static TARGET void NAME(read_groups)(const Matrix *w, int64_t block, int64_t first, int64_t num_units, float *scales,
                                     float *offsets)
{
    const int64_t scale = w->scales.kind, zero = w->zeros.kind, min = w->mins.kind;
    const int64_t scale_factor = w->scale_factors.kind, min_factor = w->min_factors.kind;
    if (scale_factor == NONE && min == NONE && scale == FLOAT16 && zero == UINT8)
        NAME(read_kinds)(w, block, first, num_units, scales, offsets, FLOAT16, UINT8, NONE, NONE, NONE);
    else if (scale_factor == NONE && min == NONE && scale == FLOAT16 && zero == CONSTANT)
        NAME(read_kinds)(w, block, first, num_units, scales, offsets, FLOAT16, CONSTANT, NONE, NONE, NONE);
    else if (scale_factor == NONE && min == NONE && scale == FLOAT16 && zero == NONE)
        NAME(read_kinds)(w, block, first, num_units, scales, offsets, FLOAT16, NONE, NONE, NONE, NONE);
    else if (scale_factor == FLOAT16 && min_factor == FLOAT16 && scale == UINT8 && min == UINT8 && zero == NONE)
        NAME(read_kinds)(w, block, first, num_units, scales, offsets, UINT8, NONE, UINT8, FLOAT16, FLOAT16);
    else if (scale_factor == FLOAT16 && min == NONE && scale == INT8 && zero == CONSTANT)
        NAME(read_kinds)(w, block, first, num_units, scales, offsets, INT8, CONSTANT, NONE, FLOAT16, NONE);
    else if (scale_factor == FLOAT16 && min == NONE && scale == INT8 && zero == NONE)
        NAME(read_kinds)(w, block, first, num_units, scales, offsets, INT8, NONE, NONE, FLOAT16, NONE);
    else
        NAME(read_kinds)(w, block, first, num_units, scales, offsets, scale, zero, min, scale_factor, min_factor);
}

/* ---- Codes by rows in 8 bits --------------------------------------------------------------------------------------- */

/* What a tile multiplies: `num_units` of the codes of one block or of two, and rows from their first of these on. The
 * second block's codes, scales and offsets lie the given distances after those of the first. */
typedef struct {
    const uint8_t *codes, *table, *block_end; /* of the first block */
    const float *scales, *offsets;            /* no offsets: NULL */
    int64_t num_units, block_bytes, block_scales;
    const int8_t *rows;
    const float *steps, *sums;
    const int32_t *starts;
    int64_t row_bytes, row_steps, row_units;
    int has_starts; /* some of them are not 0 */
} NAME(Tile);

INLINE int32_t NAME(four)(const int8_t *row)
{
    int32_t value;
    memcpy(&value, row, sizeof value);
    return value;
}

INLINE void NAME(add_offsets)(const NAME(Tile) *t, int64_t unit, fvec least[][2], const int num_rows, const int num_blocks)
{
    UNROLL for (int b = 0; b < num_blocks; b++) {
        const fvec offset = NAME(load)(t->offsets + b * t->block_scales + unit * LANES);
        UNROLL for (int m = 0; m < num_rows; m++)
            least[m][b] = FMA(offset, NAME(all)(t->sums[m * t->row_units + unit]), least[m][b]);
    }
}

/* How much higher the codes are than what they mean; VNNI's signed ones are another 128 higher. */
INLINE int32_t NAME(codes_above)(const Matrix *w)
{
    const int is_small = w->form != CODES8 && w->form != TABLE4;
    const int32_t zero = w->zeros.kind == CONSTANT ? (int32_t)(intptr_t)w->zeros.data : 0;
    return zero + (IS_VNNI && !is_small ? 128 : 0);
}

#if ISA == I8MM
/* `multiply_unit` for an even number of rows and one block: an instruction multiplies eight inputs of two rows by those of
 * two outputs. */
INLINE void NAME(multiply_row_pairs)(const NAME(Tile) *t, const uint8_t *codes, const int8_t *row, int64_t at, bytes table,
                                     ivec sums[][2], const int num_rows, const int form, const int unit,
                                     const int is_expanded)
{
    int32x4_t low[4], high[4]; /* of outputs 0 and 1, and of 2 and 3: the first row's two sums, then the second's */
    UNROLL for (int pair = 0; pair < num_rows / 2; pair++)
        low[pair] = high[pair] = vdupq_n_s32(0);
    UNROLL for (int group = 0; group < unit / 4; group += 2) {
        const int32x4_t first = (int32x4_t)NAME(unit_codes)(codes, group, table, form, is_expanded);
        const int32x4_t second = (int32x4_t)NAME(unit_codes)(codes, group + 1, table, form, is_expanded);
        const int8x16_t outputs01 = (int8x16_t)vzip1q_s32(first, second), outputs23 = (int8x16_t)vzip2q_s32(first, second);
        UNROLL for (int pair = 0; pair < num_rows / 2; pair++) {
            const int8_t *x = row + 2 * pair * t->row_bytes + 4 * group;
            const int8x16_t rows = vcombine_s8(vld1_s8(x), vld1_s8(x + t->row_bytes));
            low[pair] = vmmlaq_s32(low[pair], rows, outputs01);
            high[pair] = vmmlaq_s32(high[pair], rows, outputs23);
        }
    }
    UNROLL for (int m = 0; m < num_rows; m++) {
        const int64x2_t l = (int64x2_t)low[m / 2], h = (int64x2_t)high[m / 2];
        const ivec start = NAME(all_integers)(t->starts[m * t->row_units + at]);
        sums[m][0] = start + (ivec)(m % 2 ? vzip2q_s64(l, h) : vzip1q_s64(l, h));
    }
}
#endif

/* The products of one unit of `unit` inputs, for each row and block, as integers. */
INLINE void NAME(multiply_unit)(const NAME(Tile) *t, const uint8_t *codes, const int8_t *row, int64_t at, bytes table,
                                ivec sums[][2], const int num_rows, const int num_blocks, const int form,
                                const int unit, const int is_expanded)
{
    const int is_small = form != CODES8 && form != TABLE4, num_bits = FORM_BITS(form), num_groups = unit / 4;
    /* `span`: groups of four inputs whose products are added in 16 bits. */
    const int span = form == CODES6 ? 2 : form == CODES5 ? 4 : 8;
    /* Where sums of 16 bits are added anyway, starts are, too, unless all are 0. */
    const int begins_with_starts = !is_small || IS_VNNI;
    ivec parts[8][2];
    /* Where a block ends, the next one to be read is not its neighbour, which is read beside it. */
    const int64_t ahead = 4096 + (t->block_end - codes > 4096 ? 0 : (num_blocks - 1) * t->block_bytes);
    UNROLL for (int b = 0; !is_expanded && b < num_blocks; b++)
        UNROLL for (int at_byte = 0; at_byte < unit * LANES * num_bits / 8; at_byte += 64)
            READ_AHEAD(codes + b * t->block_bytes + at_byte, ahead);
#if ISA == I8MM
    if (num_rows > 1) {
        NAME(multiply_row_pairs)(t, codes, row, at, table, sums, num_rows, form, unit, is_expanded);
        return;
    }
#endif
    UNROLL for (int m = 0; m < num_rows; m++)
        UNROLL for (int b = 0; b < num_blocks; b++) {
            sums[m][b] = begins_with_starts ? NAME(all_integers)(t->starts[m * t->row_units + at]) : (ivec){0};
            parts[m][b] = (ivec){0};
        }
    UNROLL for (int group = 0; group < num_groups; group++) {
        bytes wanted[2];
        UNROLL for (int b = 0; b < num_blocks; b++)
            wanted[b] = NAME(unit_codes)(codes + b * t->block_bytes, group, table, form, is_expanded);
        UNROLL for (int m = 0; m < num_rows; m++) {
            const int32_t four = NAME(four)(row + m * t->row_bytes + 4 * group);
            UNROLL for (int b = 0; b < num_blocks; b++) {
                ivec *to = is_small ? &parts[m][b] : &sums[m][b];
                *to = NAME(dot)(*to, wanted[b], four, is_small);
                if (is_small && ((group + 1) % span == 0 || group + 1 == num_groups)) {
                    sums[m][b] += NAME(widen)(parts[m][b]);
                    parts[m][b] = (ivec){0};
                }
            }
        }
    }
    if (!begins_with_starts && t->has_starts)
        UNROLL for (int m = 0; m < num_rows; m++)
            UNROLL for (int b = 0; b < num_blocks; b++)
                sums[m][b] += NAME(all_integers)(t->starts[m * t->row_units + at]);
}

/* VNNI's sums begin with the bits of a float whose last bit is 1: they are floats, but for that one, and exact as they
 * stay below 2^22. Processors have more units for a difference than for a conversion. */
INLINE fvec NAME(sums_as_floats)(ivec sums)
{
    return IS_VNNI ? NAME(as_floats)(sums) - ONE_AND_A_HALF : __builtin_convertvector(sums, fvec);
}

/* Adds to `output` [num_rows][SUMS_PER_ROW]. */
INLINE void NAME(multiply_tile)(const NAME(Tile) *t, float *output, const int num_rows, const int num_blocks,
                                const int form, const int unit, const int is_expanded)
{
    const bytes table = form == TABLE4 ? NAME(load_table)(t->table) : (bytes){0};
    fvec products[8][2], least[8][2];
    UNROLL for (int m = 0; m < num_rows; m++)
        UNROLL for (int b = 0; b < num_blocks; b++)
            products[m][b] = least[m][b] = (fvec){0};
    const uint8_t *codes = t->codes;
    const int8_t *row = t->rows;
    const int unit_bytes = unit * LANES * (is_expanded ? 8 : FORM_BITS(form)) / 8;
    for (int64_t at = 0; at < t->num_units; at++, row += unit, codes += unit_bytes) {
        ivec sums[8][2];
        NAME(multiply_unit)(t, codes, row, at, table, sums, num_rows, num_blocks, form, unit, is_expanded);
        UNROLL for (int b = 0; b < num_blocks; b++) {
            const fvec scale = NAME(load)(t->scales + b * t->block_scales + at * LANES);
            UNROLL for (int m = 0; m < num_rows; m++) {
                const fvec step = NAME(all)(t->steps[m * t->row_steps + (unit == 32 ? at : at >> 1)]);
                products[m][b] = FMA(NAME(sums_as_floats)(sums[m][b]) * scale, step, products[m][b]);
            }
        }
        /* With few rows there are registers for the offsets, too; with more they have a loop of their own. */
        if (num_rows < 4 && t->offsets != NULL)
            NAME(add_offsets)(t, at, least, num_rows, num_blocks);
    }
    for (int64_t at = 0; num_rows >= 4 && t->offsets != NULL && at < t->num_units; at++)
        NAME(add_offsets)(t, at, least, num_rows, num_blocks);
    UNROLL for (int m = 0; m < num_rows; m++)
        UNROLL for (int b = 0; b < num_blocks; b++) {
            float *sum = output + m * SUMS_PER_ROW + b * LANES;
            NAME(store)(sum, NAME(load)(sum) + (products[m][b] - least[m][b]));
        }
}

INLINE void NAME(advance)(NAME(Tile) *t, int64_t num_rows)
{
    t->rows += num_rows * t->row_bytes;
    t->steps += num_rows * t->row_steps;
    t->sums += num_rows * t->row_units;
    t->starts += num_rows * t->row_units;
}

/* For many rows codes of fewer bits are unpacked once: whole tiles read them from a buffer that stays in the cache. Returns the rows
 * that are done. VNNI multiplies all codes alike, so it has one tile for all of them. */
INLINE int64_t NAME(multiply_expanded)(const NAME(Tile) *given, float *output, int64_t num_rows, int64_t num_blocks,
                                              const int form, const int unit)
{
    _Alignas(64) uint8_t expanded[ROW_BLOCKS * SEGMENT * LANES];
    const bytes table = form == TABLE4 ? NAME(load_table)(given->table) : (bytes){0};
    const int unit_bytes = unit * LANES * FORM_BITS(form) / 8;
    NAME(Tile) t = *given;
    t.codes = expanded;
    t.block_bytes = t.num_units * unit * LANES;
    for (int64_t b = 0; b < num_blocks; b++)
        for (int64_t at = 0; at < t.num_units; at++) {
            const uint8_t *codes = given->codes + b * given->block_bytes + at * unit_bytes;
            uint8_t *to = expanded + b * t.block_bytes + at * unit * LANES;
            READ_AHEAD(codes, 4096);
            UNROLL for (int group = 0; group < unit / 4; group++) {
                const bytes found = NAME(unit_codes)(codes, group, table, form, 0);
                memcpy(to + group * 4 * LANES, &found, sizeof found);
            }
        }
    const int tile_form = IS_VNNI || form == TABLE4 ? CODES8 : form;
    int64_t done = 0;
    for (; done + CODE_ROWS <= num_rows; done += CODE_ROWS, output += CODE_ROWS * SUMS_PER_ROW) {
        if (ROW_BLOCKS == 2 && num_blocks == 2)
            NAME(multiply_tile)(&t, output, CODE_ROWS, 2, tile_form, unit, 1);
        else
            NAME(multiply_tile)(&t, output, CODE_ROWS, 1, tile_form, unit, 1);
        NAME(advance)(&t, CODE_ROWS);
    }
    return done;
}

/* `num_blocks` is 1 for one row, and at most ROW_BLOCKS for several: what is read of the rows serves all. */
INLINE void NAME(multiply_tiles)(NAME(Tile) *t, float *output, int64_t num_rows, int64_t num_blocks, const int form,
                                 const int unit)
{
    if (form != CODES8 && num_rows >= EXPANDED_ROWS) {
        const int64_t done = NAME(multiply_expanded)(t, output, num_rows, num_blocks, form, unit);
        NAME(advance)(t, done);
        num_rows -= done, output += done * SUMS_PER_ROW;
    }
    for (int64_t taken; num_rows > 0; num_rows -= taken, output += taken * SUMS_PER_ROW) {
        taken = num_rows >= CODE_ROWS ? CODE_ROWS : num_rows >= 4 ? 4 : num_rows >= 2 ? 2 : 1;
        if (ROW_BLOCKS == 2 && CODE_ROWS >= 8 && num_blocks == 2 && taken == 8 && (form == CODES5 || form == CODES6))
            /* Unpacking them takes registers that two blocks of sums would need. */
            for (int b = 0; b < 2; b++) {
                NAME(Tile) one = *t;
                one.codes += b * t->block_bytes;
                one.block_end += b * t->block_bytes;
                one.scales += b * t->block_scales;
                one.offsets = t->offsets == NULL ? NULL : t->offsets + b * t->block_scales;
                NAME(multiply_tile)(&one, output + b * LANES, 8, 1, form, unit, 0);
            }
        else if (ROW_BLOCKS == 2 && CODE_ROWS >= 8 && num_blocks == 2 && taken == 8)
            NAME(multiply_tile)(t, output, 8, 2, form, unit, 0);
        else if (ROW_BLOCKS == 2 && num_blocks == 2 && taken == 4)
            NAME(multiply_tile)(t, output, 4, 2, form, unit, 0);
        else if (ROW_BLOCKS == 2 && num_blocks == 2 && taken == 2)
            NAME(multiply_tile)(t, output, 2, 2, form, unit, 0);
        else if (ROW_BLOCKS == 2 && num_blocks == 2)
            NAME(multiply_tile)(t, output, 1, 2, form, unit, 0);
        else if (CODE_ROWS >= 8 && taken == 8)
            NAME(multiply_tile)(t, output, 8, 1, form, unit, 0);
        else if (CODE_ROWS >= 4 && taken == 4)
            NAME(multiply_tile)(t, output, 4, 1, form, unit, 0);
        else if (taken == 2)
            NAME(multiply_tile)(t, output, 2, 1, form, unit, 0);
        else
            NAME(multiply_tile)(t, output, 1, 1, form, unit, 0);
        NAME(advance)(t, taken);
    }
}

/* One row by one block, of which `t` begins with input `first`; adds to `output` [LANES]. Scales are read shortly before
 * their codes, so that memory goes on sending: what it sends decides the time of one row. */
INLINE void NAME(multiply_row)(const NAME(Tile) *t, const Matrix *w, int64_t block, int64_t first, float *output,
                               const int form, const int unit)
{
    const bytes table = form == TABLE4 ? NAME(load_table)(t->table) : (bytes){0};
    float scales[UNITS_AT_ONCE * LANES], offsets[UNITS_AT_ONCE * LANES];
    fvec products = {0}, least = {0};
    for (int64_t begin = 0, count; begin < t->num_units; begin += count) {
        count = t->num_units - begin < UNITS_AT_ONCE ? t->num_units - begin : UNITS_AT_ONCE;
        NAME(read_groups)(w, block, first + begin * unit, count, scales, offsets);
        for (int64_t near = 0; near < count; near++) {
            const int64_t at = begin + near;
            ivec sums[8][2];
            NAME(multiply_unit)(t, t->codes + at * unit * LANES * FORM_BITS(form) / 8, t->rows + at * unit, at, table, sums,
                                1, 1, form, unit, 0);
            products = FMA(NAME(sums_as_floats)(sums[0][0]) * NAME(load)(scales + near * LANES),
                           NAME(all)(t->steps[unit == 32 ? at : at >> 1]), products);
            if (t->offsets != NULL)
                least = FMA(NAME(load)(offsets + near * LANES), NAME(all)(t->sums[at]), least);
        }
    }
    NAME(store)(output, NAME(load)(output) + (products - least));
}

/* Calls a function with a matrix's form and unit as constants. */
#define WITH_FORM(w, function, ...)                \
    do {                                           \
        const int is_long = (w)->unit == 32;       \
        if ((w)->form == CODES4 && is_long)        \
            function(__VA_ARGS__, CODES4, 32);     \
        else if ((w)->form == CODES4)              \
            function(__VA_ARGS__, CODES4, 16);     \
        else if ((w)->form == TABLE4 && is_long)   \
            function(__VA_ARGS__, TABLE4, 32);     \
        else if ((w)->form == TABLE4)              \
            function(__VA_ARGS__, TABLE4, 16);     \
        else if ((w)->form == CODES5)              \
            function(__VA_ARGS__, CODES5, 32);     \
        else if ((w)->form == CODES6)              \
            function(__VA_ARGS__, CODES6, 16);     \
        else if (is_long)                          \
            function(__VA_ARGS__, CODES8, 32);     \
        else                                       \
            function(__VA_ARGS__, CODES8, 16);     \
    } while (0)

/* Without its scales and offsets, of which there is room for these. */
INLINE NAME(Tile) NAME(tile_of)(const Matrix *w, const Quantized *x, int64_t block, int64_t first, int64_t count,
                                int64_t row, const float *scales, const float *offsets)
{
    const int64_t num_units = count / w->unit, block_bytes = w->width * LANES * FORM_BITS(w->form) / 8;
    return (NAME(Tile)){
        .codes = w->codes + block * block_bytes + first * LANES * FORM_BITS(w->form) / 8,
        .table = w->table,
        .block_end = w->codes + (block + 1) * block_bytes,
        .scales = scales,
        .offsets = w->mins.kind == NONE && (w->zeros.kind == NONE || w->zeros.kind == CONSTANT) ? NULL : offsets,
        .num_units = num_units,
        .block_bytes = block_bytes,
        .block_scales = num_units * LANES,
        .rows = x->codes + row * code_stride(w) + first,
        .steps = x->steps + (row * w->width + first) / 32,
        .sums = x->sums + (row * w->width + first) / w->unit,
        .starts = x->starts + (row * w->width + first) / w->unit,
        .row_bytes = code_stride(w),
        .row_steps = w->width / 32,
        .row_units = w->width / w->unit,
        .has_starts = NAME(codes_above)(w) != 0,
    };
}

static TARGET void NAME(multiply_alone)(const Matrix *w, const Quantized *x, int64_t block, int64_t first, int64_t count,
                                        int64_t row, float *output)
{
    const float unused[1] = {0};
    const NAME(Tile) t = NAME(tile_of)(w, x, block, first, count, row, unused, unused);
    WITH_FORM(w, NAME(multiply_row), &t, w, block, first, output);
}

/* Rows [row, row + num_rows) times inputs [first, first + count) of one block or of two, or one row times these of one;
 * adds to `output` [num_rows][SUMS_PER_ROW]. */
static TARGET void NAME(multiply_codes)(const Matrix *w, const Quantized *x, int64_t block, int64_t num_blocks,
                                        int64_t first, int64_t count, int64_t row, int64_t num_rows, float *output)
{
    if (num_rows == 1) {
        NAME(multiply_alone)(w, x, block, first, count, row, output);
        return;
    }
    float scales[2 * SEGMENT / 16 * LANES], offsets[2 * SEGMENT / 16 * LANES];
    const int64_t num_units = count / w->unit;
    for (int64_t b = 0; b < num_blocks; b++)
        NAME(read_groups)(w, block + b, first, num_units, scales + b * num_units * LANES, offsets + b * num_units * LANES);
    NAME(Tile) t = NAME(tile_of)(w, x, block, first, count, row, scales, offsets);
    WITH_FORM(w, NAME(multiply_tiles), &t, output, num_rows, num_blocks);
}

/* Quantizes 32 values of a row in steps of 1 / 127 of the largest. If one is infinite or NaN, the step is NaN, and so are
 * the products. */
INLINE void NAME(quantize_units)(const Matrix *w, const float *row, int8_t *codes, float *step, float *sums,
                                 int32_t *starts, const int unit)
{
    const int32_t above = NAME(codes_above)(w);
    int32_t greatest[32];
    memcpy(greatest, row, sizeof greatest);
    for (int at = 0; at < 32; at++)
        greatest[at] &= 0x7FFFFFFF;
    UNROLL for (int half = 16; half > 0; half /= 2)
        for (int at = 0; at < half; at++)
            greatest[at] = greatest[at] > greatest[half + at] ? greatest[at] : greatest[half + at];
    const int32_t most = greatest[0];
    float largest;
    memcpy(&largest, &most, sizeof largest);
    const int is_finite = most < 0x7F800000, is_zero = largest < 1e-30f;
    const float factor = is_finite && !is_zero ? 127.0f / largest : 0.0f;
    *step = !is_finite ? largest - largest : is_zero ? 0.0f : largest / 127.0f;
    int32_t values[32];
    UNROLL for (int at = 0; at < 32; at += LANES) {
        ivec whole = NAME(as_integers)(NAME(load)(row + at) * factor + ONE_AND_A_HALF) - ONE_AND_A_HALF_BITS;
        whole = is_finite ? whole : (ivec){0};
        memcpy(values + at, &whole, sizeof whole);
    }
    for (int at = 0; at < 32; at++)
        codes[at] = (int8_t)values[at];
    for (int part = 0; part < 32 / unit; part++) {
        int32_t sum = 0;
        for (int at = 0; at < unit; at++)
            sum += values[part * unit + at];
        starts[part] = (IS_VNNI ? ONE_AND_A_HALF_BITS : 0) - above * sum;
        sums[part] = *step * (float)sum;
    }
}

static TARGET void NAME(quantize)(const Matrix *w, const float *row, int8_t *codes, float *step, float *sums, int32_t *starts)
{
    if (w->unit == 32)
        NAME(quantize_units)(w, row, codes, step, sums, starts, 32);
    else
        NAME(quantize_units)(w, row, codes, step, sums, starts, 16);
}

/* ---- Weights in 8 and 16 bits of a float by rows of floats --------------------------------------------------------- */

/* The first or the second of two inputs of a block. In bfloat16 one lane has both, the second in its upper half. */
INLINE fvec NAME(widen_floats)(const uint8_t *weights, const int is_second, const int form)
{
    if (form == F32)
        return NAME(load)((const float *)weights + is_second * LANES);
    if (form == BF16) {
        ivec both;
        memcpy(&both, weights, sizeof both);
        return NAME(as_floats)(is_second ? both & (int32_t)0xFFFF0000 : both << 16);
    }
    halves h;
    if (form == F16)
        memcpy(&h, weights + 2 * is_second * LANES, sizeof h);
    else {
        h = WIDEN_TO_HALVES(weights + is_second * LANES);
        h = (h & 0x80) << 8 | (h & 0x7F) << 7; /* 2^-8 of its value */
    }
    return FROM_HALVES(h);
}

INLINE int64_t NAME(pair_bytes)(const int form)
{
    return LANES * (form == F32 ? 8 : form == FLOAT8 ? 2 : 4);
}

/* `num_blocks` blocks, `block_bytes` from each other, of which the first goes on until `end`; adds to `output`
 * [num_rows][SUMS_PER_ROW]. */
INLINE void NAME(float_tile)(const uint8_t *weights, const uint8_t *end, int64_t block_bytes, int64_t count,
                             const float *x, int64_t stride, const float *scales, float *output, const int num_rows,
                             const int num_blocks, const int form)
{
    fvec sums[8][4];
    UNROLL for (int m = 0; m < num_rows; m++)
        UNROLL for (int b = 0; b < num_blocks; b++)
            sums[m][b] = (fvec){0};
    for (int64_t k = 0; k < count; k += 2) {
        if (form != F32 && k * NAME(pair_bytes)(form) / 2 % 64 == 0) {
            const int64_t ahead = 2048 + (end - weights > 2048 ? 0 : (num_blocks - 1) * block_bytes); /* as with codes */
            UNROLL for (int b = 0; b < num_blocks; b++)
                READ_AHEAD(weights + b * block_bytes, ahead);
        }
        UNROLL for (int is_second = 0; is_second < 2; is_second++) {
            fvec w[4];
            UNROLL for (int b = 0; b < num_blocks; b++)
                w[b] = NAME(widen_floats)(weights + b * block_bytes, is_second, form);
            UNROLL for (int m = 0; m < num_rows; m++) {
                const fvec value = NAME(all)(x[m * stride + k + is_second]);
                UNROLL for (int b = 0; b < num_blocks; b++)
                    sums[m][b] = FMA(w[b], value, sums[m][b]);
            }
        }
        weights += NAME(pair_bytes)(form);
    }
    UNROLL for (int m = 0; m < num_rows; m++)
        UNROLL for (int b = 0; b < num_blocks; b++) {
            float *sum = output + m * SUMS_PER_ROW + b * LANES;
            NAME(store)(sum, NAME(load)(sum) + sums[m][b] * NAME(load)(scales + b * LANES));
        }
}

/* The same for any number of rows, and of blocks up to four. */
INLINE void NAME(float_tiles)(const uint8_t *weights, const uint8_t *end, int64_t block_bytes, int64_t num_blocks,
                              int64_t count, const float *x, int64_t stride, const float *scales, float *output,
                              int64_t num_rows, const int form)
{
    for (int64_t taken; num_rows > 0; num_rows -= taken, x += taken * stride, output += taken * SUMS_PER_ROW) {
        taken = num_rows >= FLOAT_ROWS ? FLOAT_ROWS : num_rows >= 6 ? 6 : num_rows >= 4 ? 4 : num_rows >= 2 ? 2 : 1;
        int64_t b = 0;
        if (taken == 1 && num_blocks == 4) {
            NAME(float_tile)(weights, end, block_bytes, count, x, stride, scales, output, 1, 4, form);
            continue;
        }
        for (; b + 2 <= num_blocks; b += 2) {
            const uint8_t *at = weights + b * block_bytes, *stop = end + b * block_bytes;
            const float *scale = scales + b * LANES;
            float *sums = output + b * LANES;
            if (FLOAT_ROWS >= 8 && taken == 8)
                NAME(float_tile)(at, stop, block_bytes, count, x, stride, scale, sums, 8, 2, form);
            else if (FLOAT_ROWS >= 6 && taken == 6)
                NAME(float_tile)(at, stop, block_bytes, count, x, stride, scale, sums, 6, 2, form);
            else if (taken == 4)
                NAME(float_tile)(at, stop, block_bytes, count, x, stride, scale, sums, 4, 2, form);
            else if (taken == 2)
                NAME(float_tile)(at, stop, block_bytes, count, x, stride, scale, sums, 2, 2, form);
            else
                NAME(float_tile)(at, stop, block_bytes, count, x, stride, scale, sums, 1, 2, form);
        }
        /* A single block, as adapters have it: sums of four rows do not wait for one another. */
        const int64_t by_four = b < num_blocks ? taken / 4 * 4 : 0;
        for (int64_t m = 0; m < by_four; m += 4)
            NAME(float_tile)(weights + b * block_bytes, end + b * block_bytes, block_bytes, count, x + m * stride, stride,
                             scales + b * LANES, output + m * SUMS_PER_ROW + b * LANES, 4, 1, form);
        for (int64_t m = by_four; b < num_blocks && m < taken; m++)
            NAME(float_tile)(weights + b * block_bytes, end + b * block_bytes, block_bytes, count, x + m * stride, stride,
                             scales + b * LANES, output + m * SUMS_PER_ROW + b * LANES, 1, 1, form);
    }
}

/* For many rows the blocks are widened once. `num_blocks` is at most two. */
INLINE void NAME(widened_tiles)(const uint8_t *weights, int64_t block_bytes, int64_t num_blocks, int64_t count,
                                const float *x, int64_t stride, const float *scales, float *output, int64_t num_rows,
                                const int form)
{
    float wide[2 * FLOAT_SEGMENT * LANES];
    for (int64_t b = 0; b < num_blocks; b++)
        for (int64_t k = 0; k < count; k += 2) {
            const uint8_t *pair = weights + b * block_bytes + k / 2 * NAME(pair_bytes)(form);
            NAME(store)(wide + (b * count + k) * LANES, NAME(widen_floats)(pair, 0, form));
            NAME(store)(wide + (b * count + k + 1) * LANES, NAME(widen_floats)(pair, 1, form));
        }
    NAME(float_tiles)((const uint8_t *)wide, NULL, count * LANES * (int64_t)sizeof *wide, num_blocks, count, x, stride,
                      scales, output, num_rows, F32);
}

INLINE void NAME(few_or_many)(const uint8_t *weights, const uint8_t *end, int64_t block_bytes, int64_t num_blocks,
                              int64_t count, const float *x, int64_t stride, const float *scales, float *output,
                              int64_t num_rows, const int form)
{
    /* Wide values of 16 lanes crowd the codes out of the first cache. */
    if (LANES == 16 || num_rows <= 2 * FLOAT_ROWS)
        NAME(float_tiles)(weights, end, block_bytes, num_blocks, count, x, stride, scales, output, num_rows, form);
    else
        for (int64_t b = 0; b < num_blocks; b += 2)
            NAME(widened_tiles)(weights + b * block_bytes, block_bytes, num_blocks - b < 2 ? 1 : 2, count, x, stride,
                                scales + b * LANES, output + b * LANES, num_rows, form);
}

/* Rows x [num_rows][stride], from input `first` on, times blocks [block, block + num_blocks) of at most four. */
static TARGET void NAME(multiply_floats)(const Matrix *w, const float *x, int64_t stride, int64_t block,
                                         int64_t num_blocks, int64_t first, int64_t count, int64_t num_rows,
                                         float *output)
{
    const int64_t input_bytes = NAME(pair_bytes)((int)w->form) / 2, block_bytes = w->width * input_bytes;
    const uint8_t *weights = w->codes + block * block_bytes + first * input_bytes;
    const uint8_t *end = w->codes + (block + 1) * block_bytes;
    float scales[4 * LANES], unused[LANES];
    for (int64_t b = 0; b < num_blocks; b++) {
        NAME(store)(scales + b * LANES, NAME(all)(1.0f));
        if (w->scales.kind != NONE)
            NAME(read_groups)(w, block + b, first, 1, scales + b * LANES, unused);
        if (w->form == FLOAT8)
            NAME(store)(scales + b * LANES, NAME(load)(scales + b * LANES) * 256.0f);
    }
    if (w->form == F32)
        NAME(float_tiles)(weights, end, block_bytes, num_blocks, count, x, stride, scales, output, num_rows, F32);
    else if (w->form == BF16)
        NAME(few_or_many)(weights, end, block_bytes, num_blocks, count, x, stride, scales, output, num_rows, BF16);
    else if (w->form == F16)
        NAME(few_or_many)(weights, end, block_bytes, num_blocks, count, x, stride, scales, output, num_rows, F16);
    else
        NAME(few_or_many)(weights, end, block_bytes, num_blocks, count, x, stride, scales, output, num_rows, FLOAT8);
}

#undef INLINE
#undef fvec
#undef ivec
#undef bytes
#undef halves
#undef UNROLL
#undef UNITS_AT_ONCE
#undef READ_AHEAD
#undef BYTES
#undef IS_VNNI
#undef MADDUBS
#undef MADD
#undef ADD16
#undef ONES
#undef DPBUSD
#undef SHUFFLE_BYTES
#undef ABSOLUTE
#undef SIGNED_BY
#undef FMA
#undef FROM_HALVES
#undef WIDEN_BYTES
#undef WIDEN_SIGNED
#undef WIDEN_TO_HALVES
#undef WITH_FORM
