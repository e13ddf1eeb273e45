/* The kernels themselves, for vectors of WIDTH floats: _kernels.c includes this once for each set of instructions.
 *
 * It defines TARGET, the attribute that allows these instructions, and NAME, which tells the functions apart. Vectors
 * are those of GNU C, so nothing here names an instruction.
 */

#define INLINE INLINED TARGET
#define vec NAME(vec)
#define ivec NAME(ivec)

typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ivec __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t NAME(half_vec) __attribute__((vector_size(2 * WIDTH)));
typedef int8_t NAME(byte_vec) __attribute__((vector_size(WIDTH)));

#if WIDTH == 16
#define LANES(F, s) \
    F(0, s), F(1, s), F(2, s), F(3, s), F(4, s), F(5, s), F(6, s), F(7, s), F(8, s), F(9, s), F(10, s), F(11, s), \
        F(12, s), F(13, s), F(14, s), F(15, s)
#elif WIDTH == 8
#define LANES(F, s) F(0, s), F(1, s), F(2, s), F(3, s), F(4, s), F(5, s), F(6, s), F(7, s)
#else
#define LANES(F, s) F(0, s), F(1, s), F(2, s), F(3, s)
#endif
#ifdef __clang__
#define SHUFFLE(a, b, F, s) __builtin_shufflevector(a, b, LANES(F, s))
#else
#define SHUFFLE(a, b, F, s) __builtin_shuffle(a, b, (ivec){LANES(F, s)})
#endif
/* Bit s of the lane number i decides which of the two vectors lane i comes from. */
#define OWN_LANE(i, s) (((i) & (s)) ? WIDTH + (i) : (i))
#define PARTNER_LANE(i, s) (((i) & (s)) ? WIDTH + ((i) ^ (s)) : ((i) ^ (s)))
#define OTHER_LANE(i, s) ((i) ^ (s))

INLINE vec NAME(all)(float value)
{
    return value - (vec){0};
}

INLINE vec NAME(load)(const void *values, int64_t at, int is_half)
{
    vec loaded;
    if (is_half) {
        NAME(half_vec) bits;
        memcpy(&bits, (const uint16_t *)values + at, sizeof bits);
        ivec wide = __builtin_convertvector(bits, ivec) << 16;
        memcpy(&loaded, &wide, sizeof loaded);
    } else
        memcpy(&loaded, (const float *)values + at, sizeof loaded);
    return loaded;
}

INLINE void NAME(store)(void *values, int64_t at, vec stored, int is_half)
{
    if (is_half) {
        ivec bits;
        memcpy(&bits, &stored, sizeof bits);
        ivec is_nan = stored != stored;
        bits += 0x7FFF + ((bits >> 16) & 1); /* to the nearest, ties to even */
        bits = ((bits >> 16) & ~is_nan) | (0x7FC0 & is_nan);
        NAME(half_vec) narrow = __builtin_convertvector(bits, NAME(half_vec));
        memcpy((uint16_t *)values + at, &narrow, sizeof narrow);
    } else
        memcpy((float *)values + at, &stored, sizeof stored);
}

INLINE vec NAME(choose)(ivec is_first, vec first, vec second)
{
    ivec a, b;
    memcpy(&a, &first, sizeof a);
    memcpy(&b, &second, sizeof b);
    a = (a & is_first) | (b & ~is_first);
    memcpy(&first, &a, sizeof a);
    return first;
}

INLINE vec NAME(greater)(vec a, vec b)
{
    return NAME(choose)(a > b, a, b);
}

INLINE float NAME(greatest_lane)(vec values)
{
#if WIDTH > 8
    values = NAME(greater)(values, SHUFFLE(values, values, OTHER_LANE, 8));
#endif
#if WIDTH > 4
    values = NAME(greater)(values, SHUFFLE(values, values, OTHER_LANE, 4));
#endif
    values = NAME(greater)(values, SHUFFLE(values, values, OTHER_LANE, 2));
    values = NAME(greater)(values, SHUFFLE(values, values, OTHER_LANE, 1));
    return values[0];
}

INLINE float NAME(sum_of_lanes)(vec values)
{
#if WIDTH > 8
    values += SHUFFLE(values, values, OTHER_LANE, 8);
#endif
#if WIDTH > 4
    values += SHUFFLE(values, values, OTHER_LANE, 4);
#endif
    values += SHUFFLE(values, values, OTHER_LANE, 2);
    values += SHUFFLE(values, values, OTHER_LANE, 1);
    return values[0];
}

/* Lane i of the result is the sum of all lanes of sums[i]. */
INLINE vec NAME(sums_of_lanes)(vec sums[WIDTH])
{
#define FOLD(s) \
    _Pragma("GCC unroll 16") for (int i = 0; i < WIDTH / (2 * s); i++) sums[i] = \
        SHUFFLE(sums[2 * i], sums[2 * i + 1], OWN_LANE, s) + SHUFFLE(sums[2 * i], sums[2 * i + 1], PARTNER_LANE, s);
    FOLD(1)
    FOLD(2)
#if WIDTH > 4
    FOLD(4)
#endif
#if WIDTH > 8
    FOLD(8)
#endif
#undef FOLD
    return sums[0];
}

/* e^x within 2 ulp for x from -87 to 88, to which x is clamped. 2^n by the exponent, the rest by a polynomial. */
INLINE vec NAME(exponential)(vec x)
{
    const float round = 12582912.0f; /* 1.5 * 2^23: the sum's last bit is 1 */
    x = NAME(choose)(x < -87.0f, NAME(all)(-87.0f), x);
    x = NAME(choose)(x > 88.0f, NAME(all)(88.0f), x);
    vec shifted = x * 1.44269504088896341f + round;
    vec whole = shifted - round;
    vec r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    vec power = 1.9875691500e-4f * r + 1.3981999507e-3f;
    power = power * r + 8.3334519073e-3f;
    power = power * r + 4.1665795894e-2f;
    power = power * r + 1.6666665459e-1f;
    power = power * r + 5.0000001201e-1f;
    power = power * r * r + r + 1.0f;
    ivec bits, exponent;
    memcpy(&bits, &power, sizeof bits);
    memcpy(&exponent, &shifted, sizeof exponent);
    bits += exponent << 23;
    memcpy(&power, &bits, sizeof power);
    return power;
}

/* tanh by e^(-2|x|), which never overflows. */
INLINE vec NAME(hyperbolic_tangent)(vec x)
{
    ivec is_negative = x < 0.0f;
    vec size = NAME(choose)(is_negative, -x, x);
    vec power = NAME(exponential)(size * -2.0f);
    size = (1.0f - power) / (1.0f + power);
    return NAME(choose)(is_negative, -size, size);
}

/* scores[t] of `count` tokens in a row of memory, each of `dim` floats; pads to a multiple of WIDTH with any values. */
INLINE void NAME(score)(const float *query, const void *keys, int64_t count, int64_t dim, float *scores, int is_half)
{
    const int64_t whole = dim / WIDTH * WIDTH;
    for (int64_t token = 0; token < count; token += WIDTH) {
        vec sums[WIDTH];
        const int64_t last = count - 1 - token, first = token * dim;
        /* From zero on, so that compilers have one way only to join products and sums. */
        if (last >= WIDTH - 1 && whole > 0) {
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; i++)
                sums[i] = NAME(all)(0.0f);
            for (int64_t at = 0; at < whole; at += WIDTH) {
                const vec part = NAME(load)(query, at, 0);
#pragma GCC unroll 16
                for (int i = 0; i < WIDTH; i++)
                    sums[i] += part * NAME(load)(keys, first + i * dim + at, is_half);
            }
        } else
            /* Few tokens: the last one is repeated, so that nothing beyond it is read. */
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; i++) {
                const int64_t row = first + (i < last ? i : last) * dim;
                sums[i] = NAME(all)(0.0f);
                for (int64_t at = 0; at < whole; at += WIDTH)
                    sums[i] += NAME(load)(query, at, 0) * NAME(load)(keys, row + at, is_half);
            }
        NAME(store)(scores, token, NAME(sums_of_lanes)(sums), 0);
    }
    for (int64_t at = whole; at < dim; at++)
        for (int64_t token = 0; token < count; token++)
            scores[token] += query[at] * element(keys, token * dim + at, is_half);
}

/* Adds to outputs [queries, dim] the values of `count` tokens, weighed by weights [queries, SCORES]. There are `stride`
 * values between the beginnings of two tokens. Of these, `num_parts` vectors from number `at` on.
 */
INLINE void NAME(weigh_parts)(const float *weights, const void *values, int64_t count, int64_t dim, int64_t stride,
                              float *outputs, int64_t at, const int num_queries, const int num_parts, const int is_half)
{
    vec sums[MAX_QUERIES][8];
#pragma GCC unroll 4
    for (int query = 0; query < num_queries; query++)
#pragma GCC unroll 8
        for (int part = 0; part < num_parts; part++)
            sums[query][part] = NAME(load)(outputs, query * dim + at + part * WIDTH, 0);
    const char *token_values = (const char *)values + (is_half ? 2 : 4) * at;
    for (int64_t token = 0; token < count; token++, token_values += (is_half ? 2 : 4) * stride) {
        vec weight[MAX_QUERIES];
#pragma GCC unroll 4
        for (int query = 0; query < num_queries; query++)
            weight[query] = NAME(all)(weights[query * SCORES + token]);
#pragma GCC unroll 8
        for (int part = 0; part < num_parts; part++) {
            const vec value = NAME(load)(token_values, part * WIDTH, is_half);
#pragma GCC unroll 4
            for (int query = 0; query < num_queries; query++)
                sums[query][part] += weight[query] * value;
        }
    }
#pragma GCC unroll 4
    for (int query = 0; query < num_queries; query++)
#pragma GCC unroll 8
        for (int part = 0; part < num_parts; part++)
            NAME(store)(outputs, query * dim + at + part * WIDTH, sums[query][part], 0);
}

/* All of them: as many vectors at a time as there are sums that need not wait for one another. */
INLINE void NAME(weigh)(const float *weights, const void *values, int64_t count, int64_t dim, int64_t stride,
                        float *outputs, const int num_queries, const int is_half)
{
    const int most = num_queries > 2 ? (WIDTH == 16 ? 4 : 2) : num_queries == 2 && WIDTH < 16 ? 4 : 8;
    int64_t at = 0;
    for (; at + most * WIDTH <= dim; at += most * WIDTH)
        NAME(weigh_parts)(weights, values, count, dim, stride, outputs, at, num_queries, most, is_half);
    for (; most > 2 && at + 2 * WIDTH <= dim; at += 2 * WIDTH)
        NAME(weigh_parts)(weights, values, count, dim, stride, outputs, at, num_queries, 2, is_half);
    for (; at + WIDTH <= dim; at += WIDTH)
        NAME(weigh_parts)(weights, values, count, dim, stride, outputs, at, num_queries, 1, is_half);
    for (; at < dim; at++)
        for (int query = 0; query < num_queries; query++)
            for (int64_t token = 0; token < count; token++)
                outputs[query * dim + at] +=
                    weights[query * SCORES + token] * element(values, token * stride + at, is_half);
}

/* Turns scores [first, count) into weights in place; returns their sum, and the factor by which earlier sums must
 * shrink. */
INLINE float NAME(soften)(float *scores, int64_t first, int64_t count, float softcap, float *greatest, float *shrinkage)
{
    vec most = NAME(all)(-INFINITY), sum = NAME(all)(0.0f);
    const int64_t begin = first / WIDTH * WIDTH;
    int64_t at;
    for (at = begin; at < count; at += WIDTH) {
        vec part = NAME(load)(scores, at, 0);
        if (softcap > 0.0f)
            part = softcap * NAME(hyperbolic_tangent)(part / softcap);
        if (at + WIDTH > count)
            for (int lane = (int)(count - at); lane < WIDTH; lane++)
                part[lane] = -INFINITY;
        for (int lane = 0; lane < first - at; lane++)
            part[lane] = -INFINITY;
        NAME(store)(scores, at, part, 0);
        most = NAME(greater)(part, most);
    }
    float before = *greatest, now = NAME(greatest_lane)(most);
    now = now > before ? now : before;
    for (at = begin; at < count; at += WIDTH) {
        vec weights = NAME(exponential)(NAME(load)(scores, at, 0) - now);
        NAME(store)(scores, at, weights, 0);
        sum += weights;
    }
    *greatest = now;
    *shrinkage = before == -INFINITY ? 0.0f : expf(before - now);
    return NAME(sum_of_lanes)(sum);
}

/* ---- Keys and values in 8 bits ------------------------------------------------------------------------------------ */

/* The codes of values / scale, each in the low byte of a lane. Both codings round to the nearest, ties to even. FLOAT8 is
 * e4m3: below 2^-6 its steps are 2^-9.
 */
INLINE ivec NAME(codes_of)(vec values, float scale, int coding)
{
    const float round = 12582912.0f; /* 1.5 * 2^23: the sum's last bit is 1 */
    ivec bits, small;
    values /= scale; /* no product before the sum, which the compiler might round with it at once */
    if (coding == INT8) {
        values += round;
        memcpy(&bits, &values, sizeof bits);
        return bits & 0xFF;
    }
    memcpy(&bits, &values, sizeof bits);
    const ivec sign = (bits >> 24) & 0x80, size = bits & 0x7FFFFFFF;
    memcpy(&values, &size, sizeof values);
    const ivec is_small = values < 0.015625f;
    values = values * 512.0f + round;
    memcpy(&small, &values, sizeof small);
    const ivec large = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3);
    return sign | (((small & 0xFF) & is_small) | (large & ~is_small));
}

/* One head of a token: `count` codes, and their scale. */
TARGET static void NAME(encode)(const void *head, int64_t count, int is_half, int coding, void *codes, void *kept_scale)
{
    vec most = NAME(all)(0.0f);
    int64_t at = 0;
    for (; at + WIDTH <= count; at += WIDTH) {
        vec part = NAME(load)(head, at, is_half);
        most = NAME(greater)(NAME(greater)(part, -part), most);
    }
    float scale = NAME(greatest_lane)(most);
    for (; at < count; at++) {
        const float size = fabsf(element(head, at, is_half));
        scale = size > scale ? size : scale;
    }
    scale /= coding == INT8 ? 127.0f : 448.0f;
    scale = scale > 1e-30f ? scale : 1e-30f;
    for (at = 0; at + WIDTH <= count; at += WIDTH) {
        const ivec wide = NAME(codes_of)(NAME(load)(head, at, is_half), scale, coding);
        const NAME(byte_vec) narrow = __builtin_convertvector(wide, NAME(byte_vec));
        memcpy((char *)codes + at, &narrow, sizeof narrow);
    }
    for (; at < count; at++)
        ((uint8_t *)codes)[at] = (uint8_t)NAME(codes_of)(NAME(all)(element(head, at, is_half)), scale, coding)[0];
    memcpy(kept_scale, &scale, sizeof scale);
}

/* The values of `count` codes, without their scales. Plain loops, because compilers widen bytes well in these alone. */
INLINE void NAME(decode)(const char *restrict codes, int64_t count, int coding, float *restrict values)
{
    if (coding == INT8) {
        for (int64_t at = 0; at < count; at++)
            values[at] = (float)(int8_t)codes[at];
        return;
    }
    for (int64_t at = 0; at < count; at++) {
        const uint32_t code = (uint8_t)codes[at], bits = (code & 0x80) << 24 | (code & 0x7F) << 20;
        float value;
        memcpy(&value, &bits, sizeof value);
        values[at] = value * 0x1p120f;
    }
}

/* The scores of WIDTH tokens for `num_rows` queries, SCORES floats apart, in the order of `score`. `dim` is a multiple of
 * WIDTH. What is read of a token serves all of the queries.
 */
INLINE void NAME(score_together)(const float *queries, const float *keys, int64_t dim, float *scores, const int num_rows)
{
    vec quarters[4][WIDTH / 4];
#pragma GCC unroll 1 /* they stay in memory, and sums in registers */
    for (int quarter = 0; quarter < WIDTH / 4; quarter++) {
        const float *key = keys + 4 * quarter * dim;
        vec sums[4][4];
#pragma GCC unroll 4
        for (int token = 0; token < 4; token++)
#pragma GCC unroll 4
            for (int row = 0; row < num_rows; row++)
                sums[row][token] = NAME(all)(0.0f);
        for (int64_t at = 0; at < dim; at += WIDTH) {
            vec parts[4];
#pragma GCC unroll 4
            for (int row = 0; row < num_rows; row++)
                parts[row] = NAME(load)(queries, row * dim + at, 0);
#pragma GCC unroll 4
            for (int token = 0; token < 4; token++) {
                vec part = NAME(load)(key, token * dim + at, 0);
#pragma GCC unroll 4
                for (int row = 0; row < num_rows; row++)
                    sums[row][token] += parts[row] * part;
            }
        }
        /* As `sums_of_lanes` begins. */
#pragma GCC unroll 4
        for (int row = 0; row < num_rows; row++) {
            vec first = SHUFFLE(sums[row][0], sums[row][1], OWN_LANE, 1) + SHUFFLE(sums[row][0], sums[row][1], PARTNER_LANE, 1);
            vec second = SHUFFLE(sums[row][2], sums[row][3], OWN_LANE, 1) + SHUFFLE(sums[row][2], sums[row][3], PARTNER_LANE, 1);
            quarters[row][quarter] = SHUFFLE(first, second, OWN_LANE, 2) + SHUFFLE(first, second, PARTNER_LANE, 2);
        }
    }
#pragma GCC unroll 4
    for (int row = 0; row < num_rows; row++) {
        vec found = quarters[row][0];
#if WIDTH > 4
        found = SHUFFLE(found, quarters[row][1], OWN_LANE, 4) + SHUFFLE(found, quarters[row][1], PARTNER_LANE, 4);
#endif
#if WIDTH > 8
        vec last = SHUFFLE(quarters[row][2], quarters[row][3], OWN_LANE, 4) +
                   SHUFFLE(quarters[row][2], quarters[row][3], PARTNER_LANE, 4);
        found = SHUFFLE(found, last, OWN_LANE, 8) + SHUFFLE(found, last, PARTNER_LANE, 8);
#endif
        NAME(store)(scores, row * SCORES, found, 0);
    }
}

/* Queries whose scores are computed together. */
#define TOGETHER (WIDTH == 16 ? 4 : 2)

/* The scores of `count` tokens that follow each other in memory, for `num_rows` queries. */
INLINE void NAME(score_run)(const float *queries, const void *keys, int64_t count, int64_t dim, float *scores, int num_rows,
                            int is_half)
{
    int row = 0;
    const int64_t whole = is_half || dim % WIDTH != 0 ? 0 : count / WIDTH * WIDTH;
    for (; whole > 0 && row + TOGETHER <= num_rows; row += TOGETHER) {
        for (int64_t token = 0; token < whole; token += WIDTH)
            NAME(score_together)(queries + row * dim, (const float *)keys + token * dim, dim, scores + row * SCORES + token,
                                 TOGETHER);
        for (int other = row; whole < count && other < row + TOGETHER; other++)
            NAME(score)(queries + other * dim, (const float *)keys + whole * dim, count - whole, dim,
                        scores + other * SCORES + whole, 0);
    }
    for (; row < num_rows; row++) {
        const float *query = queries + row * dim;
        float *found = scores + row * SCORES;
        if (is_half)
            NAME(score)(query, keys, count, dim, found, 1);
        else if (dim == 64)
            NAME(score)(query, keys, count, 64, found, 0);
        else if (dim == 128)
            NAME(score)(query, keys, count, 128, found, 0);
        else
            NAME(score)(query, keys, count, dim, found, 0);
    }
}

/* Adds the values of `count` tokens to outputs of `num_rows` <= MAX_QUERIES queries. */
INLINE void NAME(weigh_run)(const float *weights, const void *values, int64_t count, int64_t width, int64_t stride,
                            float *outputs, int num_rows, int is_half)
{
    /* Constants, so that loops over them are unrolled and sums stay in registers. */
#define WEIGH(number) \
    case number: \
        if (is_half) \
            NAME(weigh)(weights, values, count, width, stride, outputs, number, 1); \
        else \
            NAME(weigh)(weights, values, count, width, stride, outputs, number, 0); \
        break;
    switch (num_rows) {
        WEIGH(1)
        WEIGH(2)
        WEIGH(3)
        WEIGH(4)
    }
#undef WEIGH
}

/* Keys (part 0) or values (part 1) of tokens [at, at + *count), of which this sets the number that follow each other in
 * memory. They are floats, made into such in `decoded`, or bfloat16 where few queries read them. Codes have scales, too.
 */
INLINE const void *NAME(read_run)(const Sight *sight, int64_t at, int64_t stop, int part, int is_half, int64_t *count,
                                  float *decoded, float *scales)
{
    const int64_t dim = sight->head_dim, block_size = sight->block_size, offset = at % block_size;
    const char *page = page_of(sight, at / block_size, part);
    *count = block_size - offset < stop - at ? block_size - offset : stop - at;
    if (sight->coding == AS_THEY_COME && !sight->is_half)
        return page + 4 * offset * dim;
    if (is_half)
        return page + 2 * offset * dim;
    *count = *count < DECODED ? *count : DECODED;
    if (sight->coding == AS_THEY_COME) {
        const uint16_t *halves = (const uint16_t *)page + offset * dim;
        for (int64_t each = 0; each < *count * dim; each++) {
            const uint32_t bits = (uint32_t)halves[each] << 16;
            memcpy(decoded + each, &bits, sizeof bits);
        }
        return decoded;
    }
    NAME(decode)(page + offset * dim, *count * dim, sight->coding, decoded);
    memcpy(scales, page + block_size * dim + 4 * offset, 4 * (size_t)*count);
    return decoded;
}

/* Adds the values of a run of tokens, those that each of a few rows sees: the ones that all see for all at once. */
INLINE void NAME(weigh_seen)(const Sight *sight, const float *weights, const void *values, int64_t at, int64_t stop,
                             int64_t row, int num_rows, float *outputs, int64_t width, int is_half)
{
    const int64_t dim = sight->head_dim, end = stop < stop_of(sight, row) ? stop : stop_of(sight, row);
    const int64_t last_first = first_of(sight, row + num_rows - 1), begin = at > last_first ? at : last_first;
#define VALUES(token) ((const char *)values + (is_half ? 2 : 4) * (((token) - at) * dim + dim - width))
    for (int each = 0; each < num_rows; each++) {
        const int64_t first = first_of(sight, row + each), own = at > first ? at : first;
        const int64_t seen = stop_of(sight, row + each), last = stop < seen ? stop : seen, next = begin < last ? begin : last;
        if (own < next)
            NAME(weigh_run)(weights + each * SCORES + own - at, VALUES(own), next - own, width, dim, outputs + each * width, 1,
                            is_half);
    }
    if (begin < end)
        NAME(weigh_run)(weights + begin - at, VALUES(begin), end - begin, width, dim, outputs, num_rows, is_half);
    for (int each = 0; each < num_rows; each++) {
        const int64_t seen = stop_of(sight, row + each), last = stop < seen ? stop : seen, own = end > begin ? end : begin;
        if (own < last)
            NAME(weigh_run)(weights + each * SCORES + own - at, VALUES(own), last - own, width, dim, outputs + each * width, 1,
                            is_half);
    }
#undef VALUES
}

/* A strip of rows over the pages of their KV head, tile by tile with a running softmax. Tiles begin at the same tokens
 * for all queries, so that a query's result does not depend on the others. It begins with its sink, if it has one: a
 * token's score whose values are zero.
 */
TARGET static void NAME(attend_strip)(const Sight *sight, const float *queries, const float *sinks, int num_rows,
                                      float *outputs)
{
    float scores[MAX_ROWS * SCORES], greatest[MAX_ROWS], sums[MAX_ROWS], decoded[DECODED * MAX_DIM], scales[DECODED];
    const int64_t dim = sight->head_dim, width = sight->shared_dim > 0 ? sight->shared_dim : dim;
    const int is_half = sight->is_half && sight->coding == AS_THEY_COME && num_rows <= MAX_QUERIES;
    /* A few queries wait for memory, which is read ahead where one goes on and on. */
    const int together = sight->coding == AS_THEY_COME && num_rows <= MAX_QUERIES ? 1 : num_rows;
    const int64_t first = first_of(sight, 0), last = stop_of(sight, num_rows - 1);
    for (int row = 0; row < num_rows; row++) {
        const int64_t head = row % sight->num_queries;
        greatest[row] = sinks == NULL ? -INFINITY : sinks[head];
        sums[row] = sinks == NULL ? 0.0f : 1.0f;
    }
    memset(outputs, 0, sizeof(float) * (size_t)(num_rows * width));
    for (int64_t start = first / TILE * TILE; start < last; start += TILE) {
        const int64_t begin = start > first ? start : first, end = start + TILE < last ? start + TILE : last;
        for (int row = 0; row < num_rows; row += together)
            for (int64_t at = begin, count; at < end; at += count) {
                const void *keys = NAME(read_run)(sight, at, end, 0, is_half, &count, decoded, scales);
                float *found = scores + row * SCORES + at - start;
                NAME(score_run)(queries + row * dim, keys, count, dim, found, together, is_half);
                for (int each = 0; each < together && sight->coding != AS_THEY_COME; each++)
                    for (int64_t token = 0; token < count; token++)
                        found[each * SCORES + token] *= scales[token];
            }
        for (int row = 0; row < num_rows; row++) {
            const int64_t seen = stop_of(sight, row), unseen = first_of(sight, row);
            const int64_t own = begin > unseen ? begin : unseen, stop = end < seen ? end : seen;
            if (own >= stop)
                continue;
            float shrinkage;
            sums[row] = NAME(soften)(scores + row * SCORES, own - start, stop - start, sight->softcap, greatest + row,
                                     &shrinkage) +
                        sums[row] * shrinkage;
            if (shrinkage != 1.0f)
                for (int64_t at = 0; at < width; at++)
                    outputs[row * width + at] *= shrinkage;
        }
        for (int64_t at = begin, count; at < end; at += count) {
            const void *values = NAME(read_run)(sight, at, end, sight->shared_dim == 0, is_half, &count, decoded, scales);
            float *weights = scores + at - start;
            for (int row = 0; row < num_rows && sight->coding != AS_THEY_COME; row++)
                for (int64_t token = 0; token < count; token++)
                    weights[row * SCORES + token] *= scales[token];
            for (int row = 0; row < num_rows; row += MAX_QUERIES)
                NAME(weigh_seen)(sight, weights + row * SCORES, values, at, at + count, row,
                                 num_rows - row < MAX_QUERIES ? num_rows - row : MAX_QUERIES, outputs + row * width, width,
                                 is_half);
        }
    }
    for (int row = 0; row < num_rows; row++)
        for (int64_t at = 0; at < width; at++)
            outputs[row * width + at] /= sums[row];
}

/* The query heads that read one KV head, of all tokens of a strip: from the step's memory to float32, scaled. */
TARGET static void NAME(attend)(const Sight *sight, const char *queries, float scale, char *outputs)
{
    float scaled[STRIP_VALUES], mixed[STRIP_VALUES];
    const int64_t dim = sight->head_dim, width = sight->shared_dim > 0 ? sight->shared_dim : dim, group = sight->num_queries;
    const int64_t size = sight->is_half ? 2 : 4, most = sight->num_tokens > 1 ? group : most_rows(dim);
    for (int64_t head = 0; head < group; head += most) {
        const int64_t together = group - head < most ? group - head : most, count = together * dim;
        Sight seen = *sight;
        seen.num_queries = together;
        for (int64_t token = 0; token < sight->num_tokens; token++) {
            const char *given = queries + token * sight->query_bytes + head * dim * size;
            float *own = scaled + token * count;
            int64_t at = 0;
            for (; at + WIDTH <= count; at += WIDTH)
                NAME(store)(own, at, scale * NAME(load)(given, at, sight->is_half), 0);
            for (; at < count; at++)
                own[at] = scale * element(given, at, sight->is_half);
        }
        NAME(attend_strip)(&seen, scaled, sight->sinks == NULL ? NULL : sight->sinks + head,
                           (int)(together * sight->num_tokens), mixed);
        for (int64_t token = 0; token < sight->num_tokens; token++) {
            char *written = outputs + token * sight->output_bytes + head * width * size;
            const float *own = mixed + token * together * width;
            int64_t at = 0;
            for (; at + WIDTH <= together * width; at += WIDTH)
                NAME(store)(written, at, NAME(load)(own, at, 0), sight->is_half);
            for (; at < together * width; at++)
                set_element(written, at, own[at], sight->is_half);
        }
    }
}

/* Turns one head in place: halves of its first `width` are a pair's coordinates, the sines of the first are negated. */
TARGET static void NAME(turn)(void *head, const void *cosines, const void *sines, int64_t width, int is_half)
{
    const int64_t half = width / 2;
    int64_t at = 0;
    for (; at + WIDTH <= half; at += WIDTH) {
        vec low = NAME(load)(head, at, is_half), high = NAME(load)(head, half + at, is_half);
        vec turned = low * NAME(load)(cosines, at, is_half) + high * NAME(load)(sines, at, is_half);
        high = high * NAME(load)(cosines, half + at, is_half) + low * NAME(load)(sines, half + at, is_half);
        NAME(store)(head, at, turned, is_half);
        NAME(store)(head, half + at, high, is_half);
    }
    for (; at < half; at++) {
        float low = element(head, at, is_half), high = element(head, half + at, is_half);
        float turned = low * element(cosines, at, is_half) + high * element(sines, at, is_half);
        high = high * element(cosines, half + at, is_half) + low * element(sines, half + at, is_half);
        set_element(head, at, turned, is_half);
        set_element(head, half + at, high, is_half);
    }
}

/* values / rms(values) * weight, of one row. */
TARGET static void NAME(normalise)(const void *values, const void *weight, void *output, int64_t width, double eps,
                                   int is_half)
{
    vec sums[4] = {{0}, {0}, {0}, {0}};
    int64_t at = 0;
    for (; at + 4 * WIDTH <= width; at += 4 * WIDTH)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            vec part = NAME(load)(values, at + i * WIDTH, is_half);
            sums[i] += part * part;
        }
    for (; at + WIDTH <= width; at += WIDTH) {
        vec part = NAME(load)(values, at, is_half);
        sums[0] += part * part;
    }
    float sum = NAME(sum_of_lanes)((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; at < width; at++)
        sum += element(values, at, is_half) * element(values, at, is_half);
    const float scale = (float)(1.0 / sqrt((double)sum / (double)width + eps));
    for (at = 0; at + WIDTH <= width; at += WIDTH)
        NAME(store)(output, at, NAME(load)(values, at, is_half) * scale * NAME(load)(weight, at, is_half), is_half);
    for (; at < width; at++)
        set_element(output, at, element(values, at, is_half) * scale * element(weight, at, is_half), is_half);
}

/* gate / (1 + e^-gate) * up, of one row. */
TARGET static void NAME(gate)(const void *gates, const void *ups, void *output, int64_t width, int is_half)
{
    int64_t at = 0;
    for (; at + WIDTH <= width; at += WIDTH) {
        vec gate = NAME(load)(gates, at, is_half);
        gate = gate / (1.0f + NAME(exponential)(-gate));
        NAME(store)(output, at, gate * NAME(load)(ups, at, is_half), is_half);
    }
    for (; at < width; at++) {
        float gate = element(gates, at, is_half);
        set_element(output, at, gate / (1.0f + expf(-gate)) * element(ups, at, is_half), is_half);
    }
}

#undef INLINE
#undef vec
#undef ivec
#undef LANES
#undef SHUFFLE
#undef OWN_LANE
#undef PARTNER_LANE
#undef OTHER_LANE
#undef TOGETHER
