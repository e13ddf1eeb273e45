/* From codes, floats and the blocks of GGUF's types to packed matrices: _packed_linear.c includes this.
 *
 * packed_matrix.py and packing.py do the same in torch; gguf_blocks.py says what the blocks mean. A block is unpacked to
 * codes of one byte, and these are put where its output has them. Outputs of one block of the matrix are done together, a
 * part of their inputs after the other, so that what is written stays in the cache.
 */

#define MOST_BLOCK 256
#define MOST_BLOCK_GROUPS 16

/* Of one block: codes, scales and mins of its groups in as many bytes as the matrix has for them, and their factors. */
typedef struct {
    uint8_t codes[MOST_BLOCK], scales[2 * MOST_BLOCK_GROUPS], mins[2 * MOST_BLOCK_GROUPS];
    uint8_t scale_factor[2], min_factor[2];
} Block;

/* `number` is GGUF's. Of blocks with factors, these are in float16. */
typedef struct {
    int number, length, num_bytes, group;
    enum Form form;
    enum Kind scales, mins, scale_factors, min_factors;
    void (*unpack)(const uint8_t *stored, Block *block);
} BlockType;

/* `num_bytes` bytes: their low halves, then their high ones. */
static inline void halves_of(const uint8_t *stored, int num_bytes, uint8_t *codes)
{
    for (int at = 0; at < num_bytes; at++) {
        codes[at] = stored[at] & 15;
        codes[num_bytes + at] = stored[at] >> 4;
    }
}

/* 32 bytes: their lowest two bits, the next two, and so on, moved up by `place`. */
static inline void add_quarters(const uint8_t *stored, int place, uint8_t *codes)
{
    for (int part = 0; part < 4; part++)
        for (int at = 0; at < 32; at++)
            codes[32 * part + at] |= (uint8_t)((stored[at] >> 2 * part & 3) << place);
}

/* 32 bytes: their lowest bit, the next one, and so on, moved up by `place`. */
static inline void add_eighths(const uint8_t *stored, int place, uint8_t *codes)
{
    for (int part = 0; part < 8; part++)
        for (int at = 0; at < 32; at++)
            codes[32 * part + at] |= (uint8_t)((stored[at] >> part & 1) << place);
}

/* 4 bytes: a bit for each of 32 codes. */
static inline void add_fifth_bits(const uint8_t *stored, uint8_t *codes)
{
    for (int at = 0; at < 4; at++) {
        uint64_t eight, bits = stored[at] * 0x0101010101010101u & 0x8040201008040201u;
        memcpy(&eight, codes + 8 * at, sizeof eight);
        bits = (bits + 0x7F7F7F7F7F7F7F7Fu) >> 7 & 0x0101010101010101u;
        eight |= bits << 4;
        memcpy(codes + 8 * at, &eight, sizeof eight);
    }
}

/* A float16 that is subtracted where the matrix has it, and added where the file has it. */
static inline void negate_half(const uint8_t *stored, uint8_t *half)
{
    half[0] = stored[0];
    half[1] = stored[1] ^ 0x80;
}

static inline void copy_half(const uint8_t *stored, uint8_t *half)
{
    memcpy(half, stored, 2);
}

/* Eight scales and minima of 6 bits in 12 bytes. */
static inline void read_scales_and_mins(const uint8_t *stored, Block *block)
{
    for (int at = 0; at < 4; at++) {
        block->scales[at] = stored[at] & 63;
        block->mins[at] = stored[4 + at] & 63;
        block->scales[4 + at] = (uint8_t)((stored[8 + at] & 15) | stored[at] >> 6 << 4);
        block->mins[4 + at] = (uint8_t)(stored[8 + at] >> 4 | stored[4 + at] >> 6 << 4);
    }
}

static void unpack_q4_0(const uint8_t *stored, Block *block)
{
    copy_half(stored, block->scales);
    halves_of(stored + 2, 16, block->codes);
}

static void unpack_q4_1(const uint8_t *stored, Block *block)
{
    copy_half(stored, block->scales);
    negate_half(stored + 2, block->mins);
    halves_of(stored + 4, 16, block->codes);
}

static void unpack_q5_0(const uint8_t *stored, Block *block)
{
    copy_half(stored, block->scales);
    halves_of(stored + 6, 16, block->codes);
    add_fifth_bits(stored + 2, block->codes);
}

static void unpack_q5_1(const uint8_t *stored, Block *block)
{
    copy_half(stored, block->scales);
    negate_half(stored + 2, block->mins);
    halves_of(stored + 8, 16, block->codes);
    add_fifth_bits(stored + 4, block->codes);
}

static void unpack_q8_0(const uint8_t *stored, Block *block)
{
    copy_half(stored, block->scales);
    memcpy(block->codes, stored + 2, 32);
}

static void unpack_q2_k(const uint8_t *stored, Block *block)
{
    for (int at = 0; at < 16; at++) {
        block->scales[at] = stored[at] & 15;
        block->mins[at] = stored[at] >> 4;
    }
    copy_half(stored + 80, block->scale_factor);
    copy_half(stored + 82, block->min_factor);
    memset(block->codes, 0, 256);
    add_quarters(stored + 16, 0, block->codes);
    add_quarters(stored + 48, 0, block->codes + 128);
}

static void unpack_q3_k(const uint8_t *stored, Block *block)
{
    const uint8_t *scales = stored + 96;
    for (int at = 0; at < 16; at++) {
        const int low = at < 8 ? scales[at] & 15 : scales[at - 8] >> 4, high = scales[8 + at % 4] >> at / 4 * 2 & 3;
        block->scales[at] = (uint8_t)((low | high << 4) - 32);
    }
    copy_half(stored + 108, block->scale_factor);
    memset(block->codes, 0, 256);
    add_quarters(stored + 32, 0, block->codes);
    add_quarters(stored + 64, 0, block->codes + 128);
    add_eighths(stored, 2, block->codes);
}

static void unpack_q4_k(const uint8_t *stored, Block *block)
{
    copy_half(stored, block->scale_factor);
    copy_half(stored + 2, block->min_factor);
    read_scales_and_mins(stored + 4, block);
    for (int part = 0; part < 4; part++)
        halves_of(stored + 16 + 32 * part, 32, block->codes + 64 * part);
}

static void unpack_q5_k(const uint8_t *stored, Block *block)
{
    copy_half(stored, block->scale_factor);
    copy_half(stored + 2, block->min_factor);
    read_scales_and_mins(stored + 4, block);
    for (int part = 0; part < 4; part++)
        halves_of(stored + 48 + 32 * part, 32, block->codes + 64 * part);
    add_eighths(stored + 16, 4, block->codes);
}

static void unpack_q6_k(const uint8_t *stored, Block *block)
{
    for (int part = 0; part < 2; part++) {
        halves_of(stored + 64 * part, 64, block->codes + 128 * part);
        add_quarters(stored + 128 + 32 * part, 4, block->codes + 128 * part);
    }
    memcpy(block->scales, stored + 192, 16);
    copy_half(stored + 208, block->scale_factor);
}

static void unpack_iq4_xs(const uint8_t *stored, Block *block)
{
    copy_half(stored, block->scale_factor);
    for (int at = 0; at < 8; at++) {
        const int low = stored[4 + at / 2] >> at % 2 * 4 & 15, high = stored[2 + at / 4] >> at % 4 * 2 & 3;
        block->scales[at] = (uint8_t)((low | high << 4) - 32);
        halves_of(stored + 8 + 16 * at, 16, block->codes + 32 * at);
    }
}

/* The scale, half as large, in bfloat16: 2^(e - 128). */
static void unpack_mxfp4(const uint8_t *stored, Block *block)
{
    const uint16_t scale = (uint16_t)(stored[0] < 2 ? 0x20 << stored[0] : (stored[0] - 1) << 7);
    memcpy(block->scales, &scale, sizeof scale);
    halves_of(stored + 1, 16, block->codes);
}

static const BlockType block_types[] = {
    {2, 32, 18, 32, CODES4, FLOAT16, NONE, NONE, NONE, unpack_q4_0},
    {3, 32, 20, 32, CODES4, FLOAT16, FLOAT16, NONE, NONE, unpack_q4_1},
    {6, 32, 22, 32, CODES5, FLOAT16, NONE, NONE, NONE, unpack_q5_0},
    {7, 32, 24, 32, CODES5, FLOAT16, FLOAT16, NONE, NONE, unpack_q5_1},
    {8, 32, 34, 32, CODES8, FLOAT16, NONE, NONE, NONE, unpack_q8_0},
    {10, 256, 84, 16, CODES4, UINT8, UINT8, FLOAT16, FLOAT16, unpack_q2_k},
    {11, 256, 110, 16, CODES4, INT8, NONE, FLOAT16, NONE, unpack_q3_k},
    {12, 256, 144, 32, CODES4, UINT8, UINT8, FLOAT16, FLOAT16, unpack_q4_k},
    {13, 256, 176, 32, CODES5, UINT8, UINT8, FLOAT16, FLOAT16, unpack_q5_k},
    {14, 256, 210, 16, CODES6, INT8, NONE, FLOAT16, NONE, unpack_q6_k},
    {20, 32, 18, 32, TABLE4, FLOAT16, NONE, NONE, NONE, unpack_q4_0},
    {23, 256, 136, 32, TABLE4, INT8, NONE, FLOAT16, NONE, unpack_iq4_xs},
    {39, 32, 17, 32, TABLE4, BFLOAT16, NONE, NONE, NONE, unpack_mxfp4},
};
#define NUM_BLOCK_TYPES ((int)(sizeof block_types / sizeof block_types[0]))

static inline uint32_t four(const uint8_t *codes)
{
    uint32_t found;
    memcpy(&found, codes, sizeof found);
    return found;
}

/* `count` bits of each of four codes, from bit `lowest` on. */
static inline uint32_t bits_of(uint32_t codes, int count, int lowest)
{
    return codes >> lowest & (uint32_t)((1 << count) - 1) * 0x01010101u;
}

static inline void put(uint8_t *packed, uint32_t codes)
{
    memcpy(packed, &codes, sizeof codes);
}

/* Before it is packed. */
static inline int input_bytes(enum Form form)
{
    return form == F32 ? 4 : form == BF16 || form == F16 ? 2 : 1;
}

/* `count` bytes of whole steps of one output; `packed` is where its first are, and `stride` bytes later the next: two, or
 * one, or else four. */
static inline void put_codes(enum Form form, const uint8_t *codes, int count, uint8_t *packed, int64_t stride)
{
    const uint8_t *stop = codes + count;
    if (form == F16)
        for (; codes < stop; codes += 2, packed += stride)
            memcpy(packed, codes, 2);
    else if (form == FLOAT8)
        for (; codes < stop; codes++, packed += stride)
            *packed = *codes;
    else if (form == CODES8 || form == BF16 || form == F32)
        for (; codes < stop; codes += 4, packed += stride)
            put(packed, four(codes));
    else if (form == CODES5)
        for (; codes < stop; codes += 32, packed += 5 * stride) {
            const uint32_t fifth = four(codes + 20), sixth = four(codes + 24), seventh = four(codes + 28);
            put(packed, four(codes) | bits_of(fifth, 3, 0) << 5);
            put(packed + stride, four(codes + 4) | bits_of(fifth, 2, 3) << 6 | bits_of(seventh, 1, 3) << 5);
            put(packed + 2 * stride, four(codes + 8) | bits_of(sixth, 3, 0) << 5);
            put(packed + 3 * stride, four(codes + 12) | bits_of(sixth, 2, 3) << 6 | bits_of(seventh, 1, 4) << 5);
            put(packed + 4 * stride, four(codes + 16) | bits_of(seventh, 3, 0) << 5);
        }
    else if (form == CODES6)
        for (; codes < stop; codes += 16, packed += 3 * stride) {
            const uint32_t last = four(codes + 12);
            put(packed, four(codes) | bits_of(last, 2, 0) << 6);
            put(packed + stride, four(codes + 4) | bits_of(last, 2, 2) << 6);
            put(packed + 2 * stride, four(codes + 8) | bits_of(last, 2, 4) << 6);
        }
    else
        for (; codes < stop; codes += 8, packed += stride)
            put(packed, four(codes) | four(codes + 4) << 4);
}

/* `count` values that follow each other along the inputs. */
static inline void put_values(const Values *values, const uint8_t *given, int64_t at, int count, int64_t lanes)
{
    if (values->kind == UINT8 || values->kind == INT8)
        for (int one = 0; one < count; one++)
            ((uint8_t *)(uintptr_t)values->data)[at + one * lanes] = given[one];
    else if (values->kind == FLOAT16 || values->kind == BFLOAT16)
        for (int one = 0; one < count; one++)
            memcpy((uint16_t *)(uintptr_t)values->data + at + one * lanes, given + 2 * one, 2);
}

/* Rows [0, num_rows) of blocks become the outputs from `first` on. */
typedef struct {
    Work work;
    const Matrix *weight;
    const BlockType *type;
    const uint8_t *rows;
    int64_t first, num_rows;
} Filling;

/* The outputs of one block of the matrix. */
static void fill_part(const Work *shared, int64_t part)
{
    const Filling *filling = (const Filling *)shared;
    const Matrix *w = filling->weight;
    const BlockType *type = filling->type;
    const int64_t lanes = w->lanes, number = filling->first / lanes + part, num_blocks = w->num_inputs / type->length;
    const int64_t begin = number * lanes < filling->first ? filling->first : number * lanes;
    const int64_t end = filling->first + filling->num_rows, next = (number + 1) * lanes, last = next < end ? next : end;
    const int num_groups = type->length / type->group;
    Block block;
    for (int64_t at = 0; at < num_blocks; at++)
        for (int64_t output = begin; output < last; output++) {
            const int64_t lane = output % lanes;
            type->unpack(filling->rows + ((output - filling->first) * num_blocks + at) * type->num_bytes, &block);
            put_codes(type->form, block.codes, type->length,
                      (uint8_t *)(uintptr_t)w->codes +
                          (number * w->width + at * type->length) * lanes * FORM_BITS(type->form) / 8 + 4 * lane,
                      4 * lanes);
            const int64_t group = (number * w->num_groups + at * num_groups) * lanes + lane;
            put_values(&w->scales, block.scales, group, num_groups, lanes);
            put_values(&w->mins, block.mins, group, num_groups, lanes);
            const int64_t factor = (number * num_blocks + at) * lanes + lane;
            put_values(&w->scale_factors, block.scale_factor, factor, 1, lanes);
            put_values(&w->min_factors, block.min_factor, factor, 1, lanes);
        }
}

static const BlockType *find_block_type(int64_t number)
{
    for (int at = 0; at < NUM_BLOCK_TYPES; at++)
        if (block_types[at].number == number)
            return block_types + at;
    return NULL;
}

/* Whether a matrix has all that blocks of a type have, and room for it. */
static int can_fill(const Matrix *w, const BlockType *type)
{
    const int64_t num_groups = w->num_inputs / type->group, num_blocks = w->num_inputs / type->length;
    return w->form == type->form && w->group == type->group && w->width == w->num_inputs &&
           w->num_inputs % type->length == 0 && w->num_groups == num_groups && w->order == NULL &&
           w->scales.kind == type->scales && w->mins.kind == type->mins && (w->zeros.kind == NONE || w->zeros.kind == CONSTANT) &&
           w->scale_factors.kind == type->scale_factors && w->min_factors.kind == type->min_factors &&
           (type->scale_factors == NONE || w->num_scale_factors == num_blocks) &&
           (type->min_factors == NONE || w->num_min_factors == num_blocks);
}

/* Rows [num_rows][num_inputs] of codes or floats, `stride` bytes from each other, and the codes of a matrix of them. */
typedef struct {
    Work work;
    enum Form form;
    int64_t lanes, num_rows, num_inputs, width, stride;
    const uint8_t *rows;
    uint8_t *codes;
} Packing;

#define PACKED_AT_ONCE 256

/* The outputs of one block of the matrix; those that it lacks, and inputs that are padded, are zero. */
static void pack_part(const Work *shared, int64_t part)
{
    const Packing *packing = (const Packing *)shared;
    const enum Form form = packing->form;
    const int64_t lanes = packing->lanes, size = input_bytes(form), given = packing->num_inputs * size;
    const int64_t packed_bits = form == CODES4 || form == TABLE4 ? 4 : form == CODES5 ? 5 : form == CODES6 ? 6 : 8 * size;
    const int64_t piece = form == F16 ? 2 : form == FLOAT8 ? 1 : 4, left = packing->num_rows - part * lanes;
    uint8_t *block = packing->codes + part * packing->width * lanes * packed_bits / 8;
    if (left < lanes)
        memset(block, 0, (size_t)(packing->width * lanes * packed_bits / 8));
    for (int64_t first = 0; first < packing->width; first += PACKED_AT_ONCE) {
        const int64_t most = packing->width - first, count = (most < PACKED_AT_ONCE ? most : PACKED_AT_ONCE) * size;
        uint8_t *packed = block + first * lanes * packed_bits / 8;
        for (int64_t lane = 0; lane < lanes && lane < left; lane++) {
            const uint8_t *row = packing->rows + (part * lanes + lane) * packing->stride + first * size;
            uint8_t padded[4 * PACKED_AT_ONCE];
            const int64_t there = given - first * size;
            if (there < count) {
                memcpy(padded, row, (size_t)(there < 0 ? 0 : there));
                memset(padded + (there < 0 ? 0 : there), 0, (size_t)(count - (there < 0 ? 0 : there)));
                row = padded;
            }
            put_codes(form, row, (int)count, packed + piece * lane, piece * lanes);
        }
    }
}
