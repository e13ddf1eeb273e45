/* Every width of vectors of _kernels.c against float64, in memory of exactly the size that they may use.
 *
 * Sums of lanes have another order in each width, so only codes of the KV cache have the same bits in all of them. With
 * EMULATED all widths are run; otherwise those that this processor has. It prints them.
 */

#define WITHOUT_PYTHON
#include "_kernels.c"

#include <stdio.h>
#include <stdlib.h>

static uint32_t state = 1;
static int num_failures;

static int is_run(const Kernels *kernels)
{
#ifdef EMULATED
    return kernels != NULL;
#else
    return can_run(kernels);
#endif
}

static void *memory(int64_t num_bytes)
{
    void *taken = malloc((size_t)num_bytes);
    if (taken == NULL)
        exit(2);
    return taken;
}

static float drawn(void)
{
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8 & 0xFFFF) / 32768.0f - 1.0f;
}

/* `count` values from -1 to 1, in float32 or bfloat16. */
static void *drawn_values(int64_t count, int is_half)
{
    void *made = memory(count * (is_half ? 2 : 4));
    for (int64_t at = 0; at < count; at++)
        set_element(made, at, drawn(), is_half);
    return made;
}

static void compare(const Kernels *kernels, const char *what, const void *found, const double *exact, int64_t count,
                    int is_half)
{
    for (int64_t at = 0; at < count; at++)
        if (!(fabs(element(found, at, is_half) - exact[at]) <= (is_half ? 4e-3 : 4e-6) * (1.0 + fabs(exact[at])))) {
            num_failures++;
            printf("width %d: %s, half %d: %g in place of %g at %d of %d\n", kernels->width, what, is_half,
                   (double)element(found, at, is_half), exact[at], (int)at, (int)count);
            return;
        }
}

/* ---- Row by row ----------------------------------------------------------------------------------------------------- */

static void check_rows(const Kernels *kernels, int64_t width, int is_half)
{
    void *values = drawn_values(width, is_half), *weight = drawn_values(width, is_half);
    void *output = drawn_values(width, is_half);
    double *exact = memory(8 * width), squares = 0.0;
    for (int64_t at = 0; at < width; at++)
        squares += (double)element(values, at, is_half) * element(values, at, is_half);
    for (int64_t at = 0; at < width; at++)
        exact[at] = element(values, at, is_half) / sqrt(squares / (double)width + 1e-5) * element(weight, at, is_half);
    kernels->normalise(values, weight, output, width, 1e-5, is_half);
    compare(kernels, "normalise", output, exact, width, is_half);

    for (int64_t at = 0; at < width; at++) {
        const double gate = element(values, at, is_half);
        exact[at] = gate / (1.0 + exp(-gate)) * element(weight, at, is_half);
    }
    kernels->gate(values, weight, output, width, is_half);
    compare(kernels, "gate", output, exact, width, is_half);

    const int64_t half = width / 2;
    void *cosines = drawn_values(2 * half, is_half), *sines = drawn_values(2 * half, is_half);
    for (int64_t at = 0; at < half; at++) {
        const double low = element(values, at, is_half), high = element(values, half + at, is_half);
        exact[at] = low * element(cosines, at, is_half) + high * element(sines, at, is_half);
        exact[half + at] = high * element(cosines, half + at, is_half) + low * element(sines, half + at, is_half);
    }
    kernels->turn(values, cosines, sines, 2 * half, is_half);
    compare(kernels, "turn", values, exact, 2 * half, is_half);
    free(values), free(weight), free(output), free(exact), free(cosines), free(sines);
}

static void check_codes(const Kernels *kernels, int64_t width, int is_half, int coding)
{
    const Kernels *generic = &all_kernels[NUM_KERNELS - 1];
    void *values = drawn_values(width, is_half), *codes = memory(width), *expected = memory(width);
    float scale, expected_scale;
    set_element(values, width / 2, 0.001f, is_half);
    kernels->encode(values, width, is_half, coding, codes, &scale);
    generic->encode(values, width, is_half, coding, expected, &expected_scale);
    if (memcmp(codes, expected, (size_t)width) != 0 || scale != expected_scale) {
        num_failures++;
        printf("width %d: other codes, coding %d, half %d, %d values\n", kernels->width, coding, is_half, (int)width);
    }
    free(values), free(codes), free(expected);
}

/* ---- Attention ------------------------------------------------------------------------------------------------------ */

typedef struct {
    int64_t dim, shared_dim, block_size, num_queries, num_tokens, window, stop;
    int is_half, coding, has_sinks;
    float softcap;
} Case;

static double decoded(uint8_t code, int coding)
{
    if (coding == INT8)
        return (int8_t)code;
    const int exponent = code >> 3 & 15;
    const double size = exponent == 0 ? ldexp(code & 7, -9) : ldexp(8 + (code & 7), exponent - 10);
    return code & 0x80 ? -size : size;
}

/* Value `at` of a token, of its keys (part 0) or values (part 1). */
static double kept(const Sight *sight, int64_t token, int part, int64_t at)
{
    const char *page = page_of(sight, token / sight->block_size, part);
    const int64_t place = token % sight->block_size * sight->head_dim + at;
    float scale;
    if (sight->coding == AS_THEY_COME)
        return element(page, place, sight->is_half);
    memcpy(&scale, page + sight->block_size * sight->head_dim + 4 * (token % sight->block_size), 4);
    return decoded((uint8_t)page[place], sight->coding) * scale;
}

static int64_t output_width(const Sight *sight)
{
    return sight->shared_dim > 0 ? sight->shared_dim : sight->head_dim;
}

/* Of row `row` of the strip. */
static void attend_exactly(const Sight *sight, int64_t row, const void *query, double scale, const float *sink,
                           double *output)
{
    const int64_t width = output_width(sight);
    const int part = sight->shared_dim == 0;
    double sum = sink == NULL ? 0.0 : exp((double)*sink);
    memset(output, 0, sizeof(double) * (size_t)width);
    for (int64_t token = first_of(sight, row); token < stop_of(sight, row); token++) {
        double score = 0.0;
        for (int64_t at = 0; at < sight->head_dim; at++)
            score += scale * element(query, at, sight->is_half) * kept(sight, token, 0, at);
        if (sight->softcap > 0.0f)
            score = sight->softcap * tanh(score / sight->softcap);
        sum += exp(score);
        for (int64_t at = 0; at < width; at++)
            output[at] += exp(score) * kept(sight, token, part, sight->head_dim - width + at);
    }
    for (int64_t at = 0; at < width; at++)
        output[at] /= sum;
}

static void check_attention(const Case *c)
{
    const Geometry g = {.num_heads = 2 * c->num_queries, .num_kv_heads = 2, .head_dim = c->dim, .is_half = c->is_half,
                        .block_size = c->block_size, .coding = c->coding};
    const int64_t num_blocks = (c->stop + c->num_tokens - 2) / c->block_size + 1, block_bytes = 4 * page_bytes(&g);
    const int64_t num_rows = c->num_queries * c->num_tokens, size = c->is_half ? 2 : 4;
    const int64_t row_bytes = c->num_queries * c->dim * size;
    int64_t *table = memory(8 * num_blocks);
    char *layer = memory(num_blocks * block_bytes);
    float sinks[8];
    for (int at = 0; at < 8; at++)
        sinks[at] = drawn();
    for (int64_t block = 0; block < num_blocks; block++)
        table[block] = num_blocks - 1 - block;
    const Sight sight = {.layer = layer, .table = table, .stop = c->stop, .window = c->window,
                         .num_tokens = c->num_tokens, .num_queries = c->num_queries, .query_bytes = row_bytes,
                         .output_bytes = row_bytes, .kv_head = 1,
                         .num_kv_heads = 2, .head_dim = c->dim, .shared_dim = c->shared_dim, .block_size = c->block_size, .block_bytes = block_bytes,
                         .page_bytes = page_bytes(&g), .is_half = c->is_half, .coding = c->coding,
                         .softcap = c->softcap, .sinks = c->has_sinks ? sinks : NULL};
    for (int64_t page = 0; page < 4 * num_blocks; page++)
        for (int64_t token = 0; token < c->block_size; token++) {
            char *at = layer + page * page_bytes(&g), *scales = at + c->block_size * c->dim;
            void *head = drawn_values(c->dim, c->is_half);
            if (c->coding == AS_THEY_COME)
                memcpy(at + token * c->dim * item_bytes(&g), head, (size_t)(c->dim * item_bytes(&g)));
            else
                all_kernels[NUM_KERNELS - 1].encode(head, c->dim, c->is_half, c->coding, at + token * c->dim,
                                                    scales + 4 * token);
            free(head);
        }
    char *queries = drawn_values(num_rows * c->dim, c->is_half), *output = drawn_values(num_rows * c->dim, c->is_half);
    double *exact = memory(8 * num_rows * c->dim);
    const int64_t width = output_width(&sight);
    for (int64_t row = 0; row < num_rows; row++)
        attend_exactly(&sight, row, queries + row * c->dim * size, 0.5,
                       c->has_sinks ? sinks + row % c->num_queries : NULL, exact + row * width);
    for (int at = 0; at < NUM_KERNELS; at++)
        if (is_run(&all_kernels[at])) {
            all_kernels[at].attend(&sight, queries, 0.5f, output);
            for (int64_t token = 0; token < c->num_tokens; token++)
                compare(&all_kernels[at], "attend", output + token * row_bytes, exact + token * c->num_queries * width,
                        c->num_queries * width, c->is_half);
        }
    free(table), free(layer), free(queries), free(output), free(exact);
}

int main(void)
{
    static const int64_t widths[] = {1, 2, 15, 33, 96, 200}, dims[] = {6, 16, 32, 40, 64, 80, 128}, blocks[] = {5, 16, 1, 32};
    static const int64_t stops[] = {1, 30, 301}, queries[] = {1, 2, 3, 7};
    for (int at = 0; at < NUM_KERNELS; at++)
        for (int width = 0; is_run(&all_kernels[at]) && width < 6; width++)
            for (int is_half = 0; is_half < 2; is_half++) {
                check_rows(&all_kernels[at], widths[width], is_half);
                check_codes(&all_kernels[at], widths[width], is_half, INT8);
                check_codes(&all_kernels[at], widths[width], is_half, FLOAT8);
            }
    for (int number = 0; number < 7 * 3 * 2 * 3; number++) {
        const int is_shared = number < 42 && number % 4 == 3;
        const Case c = {.dim = dims[number % 7], .shared_dim = is_shared ? dims[number % 7] * 3 / 4 : 0,
                        .stop = stops[number / 7 % 3], .is_half = number / 21 % 2, .coding = number / 42, .block_size = blocks[number % 4], .num_queries = queries[number * 3 / 4 % 4],
                        .window = number % 5 == 0 ? stops[number / 7 % 3] / 3 : 0, .num_tokens = !is_shared && number % 5 < 2 ? 4 : 1, .has_sinks = number % 2,
                        .softcap = number % 3 == 0 ? 3.0f : 0.0f};
        check_attention(&c);
    }
    for (int at = 0; at < NUM_KERNELS; at++)
        if (is_run(&all_kernels[at]))
            printf("%d ", all_kernels[at].width);
    return num_failures != 0;
}
