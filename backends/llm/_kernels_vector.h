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
        if (last >= WIDTH - 1 && whole > 0) {
            vec part = NAME(load)(query, 0, 0);
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; i++)
                sums[i] = part * NAME(load)(keys, first + i * dim, is_half);
            for (int64_t at = WIDTH; at < whole; at += WIDTH) {
                part = NAME(load)(query, at, 0);
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

/* Adds to outputs [queries, dim] the values of `count` tokens, weighed by weights [queries, TILE]. There are `stride`
 * values between the beginnings of two tokens.
 */
INLINE void NAME(weigh)(const float *weights, const void *values, int64_t count, int64_t dim, int64_t stride,
                        float *outputs, int num_queries, int is_half)
{
    int64_t at = 0;
    for (; at + 2 * WIDTH <= dim; at += 2 * WIDTH) {
        vec low[MAX_QUERIES], high[MAX_QUERIES];
#pragma GCC unroll 4
        for (int query = 0; query < num_queries; query++) {
            low[query] = NAME(load)(outputs, query * dim + at, 0);
            high[query] = NAME(load)(outputs, query * dim + at + WIDTH, 0);
        }
        for (int64_t token = 0; token < count; token++) {
            vec value_low = NAME(load)(values, token * stride + at, is_half);
            vec value_high = NAME(load)(values, token * stride + at + WIDTH, is_half);
#pragma GCC unroll 4
            for (int query = 0; query < num_queries; query++) {
                float weight = weights[query * TILE + token];
                low[query] += weight * value_low;
                high[query] += weight * value_high;
            }
        }
#pragma GCC unroll 4
        for (int query = 0; query < num_queries; query++) {
            NAME(store)(outputs, query * dim + at, low[query], 0);
            NAME(store)(outputs, query * dim + at + WIDTH, high[query], 0);
        }
    }
    for (; at + WIDTH <= dim; at += WIDTH)
        for (int query = 0; query < num_queries; query++) {
            vec sum = NAME(load)(outputs, query * dim + at, 0);
            for (int64_t token = 0; token < count; token++)
                sum += weights[query * TILE + token] * NAME(load)(values, token * stride + at, is_half);
            NAME(store)(outputs, query * dim + at, sum, 0);
        }
    for (; at < dim; at++)
        for (int query = 0; query < num_queries; query++)
            for (int64_t token = 0; token < count; token++)
                outputs[query * dim + at] +=
                    weights[query * TILE + token] * element(values, token * stride + at, is_half);
}

/* Turns `count` scores into weights in place; returns their sum, and the factor by which earlier sums must shrink. */
INLINE float NAME(soften)(float *scores, int64_t count, float softcap, float *greatest, float *shrinkage)
{
    vec most = NAME(all)(-INFINITY), sum = NAME(all)(0.0f);
    int64_t at;
    for (at = 0; at < count; at += WIDTH) {
        vec part = NAME(load)(scores, at, 0);
        if (softcap > 0.0f)
            part = softcap * NAME(hyperbolic_tangent)(part / softcap);
        if (at + WIDTH > count)
            for (int lane = (int)(count - at); lane < WIDTH; lane++)
                part[lane] = -INFINITY;
        NAME(store)(scores, at, part, 0);
        most = NAME(greater)(part, most);
    }
    float before = *greatest, now = NAME(greatest_lane)(most);
    now = now > before ? now : before;
    for (at = 0; at < count; at += WIDTH) {
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

/* Scores of tokens [start, stop), at most TILE of them, by query [queries, TILE]: the codes are decoded for all queries
 * at once, and a token's scale comes after its sum.
 */
INLINE void NAME(score_codes)(const Sight *sight, const float *queries, int num_queries, int64_t start, int64_t stop,
                              float *scores)
{
    float decoded[DECODED * MAX_DIM], found[DECODED + WIDTH], scales[DECODED];
    const int64_t dim = sight->head_dim, block_size = sight->block_size;
    for (int64_t at = start, count; at < stop; at += count) {
        const int64_t offset = at % block_size;
        const char *page = page_of(sight, at / block_size, 0);
        count = block_size - offset < stop - at ? block_size - offset : stop - at;
        count = count < DECODED ? count : DECODED;
        NAME(decode)(page + offset * dim, count * dim, sight->coding, decoded);
        memcpy(scales, page + block_size * dim + 4 * offset, 4 * (size_t)count);
        for (int query = 0; query < num_queries; query++) {
            if (dim == 64)
                NAME(score)(queries + query * 64, decoded, count, 64, found, 0);
            else if (dim == 128)
                NAME(score)(queries + query * 128, decoded, count, 128, found, 0);
            else
                NAME(score)(queries + query * dim, decoded, count, dim, found, 0);
            for (int64_t token = 0; token < count; token++)
                scores[query * TILE + at - start + token] = found[token] * scales[token];
        }
    }
}

/* Adds the values of tokens [start, stop) to outputs [queries, dim]. Their scales go into `weights`. */
INLINE void NAME(weigh_codes)(const Sight *sight, float *weights, int num_queries, int64_t start, int64_t stop,
                              float *outputs)
{
    float decoded[DECODED * MAX_DIM], scales[DECODED];
    const int64_t dim = sight->head_dim, block_size = sight->block_size;
    for (int64_t at = start, count; at < stop; at += count) {
        const int64_t offset = at % block_size;
        const char *page = page_of(sight, at / block_size, 1);
        float *own = weights + (at - start);
        count = block_size - offset < stop - at ? block_size - offset : stop - at;
        count = count < DECODED ? count : DECODED;
        NAME(decode)(page + offset * dim, count * dim, sight->coding, decoded);
        memcpy(scales, page + block_size * dim + 4 * offset, 4 * (size_t)count);
        for (int query = 0; query < num_queries; query++)
            for (int64_t token = 0; token < count; token++)
                own[query * TILE + token] *= scales[token];
        switch (num_queries) {
        case 1: NAME(weigh)(own, decoded, count, dim, dim, outputs, 1, 0); break;
        case 2: NAME(weigh)(own, decoded, count, dim, dim, outputs, 2, 0); break;
        case 3: NAME(weigh)(own, decoded, count, dim, dim, outputs, 3, 0); break;
        default: NAME(weigh)(own, decoded, count, dim, dim, outputs, 4, 0);
        }
    }
}

/* One to MAX_QUERIES heads of a token over the pages of their KV head, tile by tile with a running softmax. It begins
 * with their sinks, if they have any: a token's score whose values are zero.
 */
TARGET static void NAME(attend_heads)(const Sight *sight, const float *queries, const float *sinks, int num_queries,
                                      float *outputs)
{
    float scores[MAX_QUERIES * TILE + WIDTH], greatest[MAX_QUERIES], sums[MAX_QUERIES], shrinkage;
    const int64_t dim = sight->head_dim, block_size = sight->block_size;
    const int is_half = sight->is_half, is_shared = sight->shared_dim > 0;
    const int64_t width = is_shared ? sight->shared_dim : dim;
    for (int query = 0; query < num_queries; query++) {
        greatest[query] = sinks == NULL ? -INFINITY : sinks[query];
        sums[query] = sinks == NULL ? 0.0f : 1.0f;
    }
    memset(outputs, 0, sizeof(float) * (size_t)(num_queries * width));
    for (int64_t start = sight->first; start < sight->stop; start += TILE) {
        const int64_t stop = start + TILE < sight->stop ? start + TILE : sight->stop;
        if (sight->coding != AS_THEY_COME)
            NAME(score_codes)(sight, queries, num_queries, start, stop, scores);
        for (int query = 0; query < num_queries && sight->coding == AS_THEY_COME; query++)
            /* The next query overwrites the values beyond the last score. */
            for (int64_t at = start, count; at < stop; at += count) {
                const int64_t offset = at % block_size;
                count = block_size - offset < stop - at ? block_size - offset : stop - at;
                const char *keys = page_of(sight, at / block_size, 0);
                float *found = scores + query * TILE + (at - start);
#define SCORE(dim, is_half) \
    NAME(score)(queries + query * (dim), keys + (is_half ? 2 : 4) * offset * (dim), count, dim, found, is_half)
                if (is_half)
                    SCORE(dim, 1);
                else if (dim == 32)
                    SCORE(32, 0);
                else if (dim == 64)
                    SCORE(64, 0);
                else if (dim == 128)
                    SCORE(128, 0);
                else
                    SCORE(dim, 0);
#undef SCORE
            }
        for (int query = 0; query < num_queries; query++) {
            sums[query] = NAME(soften)(scores + query * TILE, stop - start, sight->softcap, greatest + query, &shrinkage) +
                          sums[query] * shrinkage;
            if (shrinkage != 1.0f)
                for (int64_t at = 0; at < width; at++)
                    outputs[query * width + at] *= shrinkage;
        }
        if (sight->coding != AS_THEY_COME) {
            NAME(weigh_codes)(sight, scores, num_queries, start, stop, outputs);
            continue;
        }
        for (int64_t at = start, count; at < stop; at += count) {
            const int64_t offset = at % block_size;
            count = block_size - offset < stop - at ? block_size - offset : stop - at;
            const char *values =
                page_of(sight, at / block_size, !is_shared) + (is_half ? 2 : 4) * (offset * dim + dim - width);
            const float *weights = scores + (at - start);
            /* Constants, so that loops over them are unrolled and sums stay in registers. */
#define WEIGH(number) \
    if (num_queries == number) { \
        if (is_half) \
            NAME(weigh)(weights, values, count, width, dim, outputs, number, 1); \
        else \
            NAME(weigh)(weights, values, count, width, dim, outputs, number, 0); \
    }
            WEIGH(1)
            WEIGH(2)
            WEIGH(3)
            WEIGH(4)
#undef WEIGH
        }
    }
    for (int query = 0; query < num_queries; query++)
        for (int64_t at = 0; at < width; at++)
            outputs[query * width + at] /= sums[query];
}

/* A token's `num_query_heads` query heads and those of one KV head: from the step's memory to float32, scaled. */
TARGET static void NAME(attend)(const Sight *sight, const void *queries, int64_t num_queries, float scale, void *outputs)
{
    float scaled[MAX_QUERIES * MAX_DIM], sums[MAX_QUERIES * MAX_DIM];
    const int64_t dim = sight->head_dim, width = sight->shared_dim > 0 ? sight->shared_dim : dim;
    for (int64_t query = 0; query < num_queries; query += MAX_QUERIES) {
        const int number = num_queries - query < MAX_QUERIES ? (int)(num_queries - query) : MAX_QUERIES;
        const int64_t first = query * dim, count = number * dim;
        int64_t at = 0;
        for (; at + WIDTH <= count; at += WIDTH)
            NAME(store)(scaled, at, scale * NAME(load)(queries, first + at, sight->is_half), 0);
        for (; at < count; at++)
            scaled[at] = scale * element(queries, first + at, sight->is_half);
        NAME(attend_heads)(sight, scaled, sight->sinks == NULL ? NULL : sight->sinks + query, number, sums);
        for (at = 0; at + WIDTH <= number * width; at += WIDTH)
            NAME(store)(outputs, query * width + at, NAME(load)(sums, at, 0), sight->is_half);
        for (; at < number * width; at++)
            set_element(outputs, query * width + at, sums[at], sight->is_half);
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
