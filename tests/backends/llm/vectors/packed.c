/* Every set of instructions of _packed_linear.c against the generic one, bit by bit, and that against float64.
 *
 * It includes the kernels as they are, without Python, and gives them memory of exactly the size that they may use, for
 * the sanitizers. With EMULATED all sets are run; otherwise those that this processor has. It prints their names, and
 * with an argument nothing else.
 */

#define WITHOUT_PYTHON
#include "_packed_linear.c"

#include <math.h>
#include <stdio.h>

#define MOST_COUNT 71
/* Rows of nothing but zeros, with a value that is no number, and with an infinite one. */
enum { ZEROS = 3, NO_NUMBER = 5, INFINITE = 6 };

typedef struct {
    int form;
    int64_t outputs, inputs, group, unit;
    int scheme, is_ordered;
} Case;

/* `per_output` items of `size` bytes for each output, one output after the other. */
typedef struct {
    int64_t kind, per_output, size;
    uint8_t *items;
} Plain;

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

static uint32_t draw(uint32_t limit)
{
    state = state * 1664525u + 1013904223u;
    return (state >> 8) % limit;
}

static void *memory(int64_t num_bytes)
{
    void *taken = malloc((size_t)num_bytes);
    if (taken == NULL)
        exit(2);
    return taken;
}

static float drawn_float(void)
{
    return (float)draw(2001) / 1000.0f - 1.0f;
}

/* ---- Weights -------------------------------------------------------------------------------------------------------- */

static Plain drawn_codes(const Case *c, int64_t width)
{
    static const int bits[NUM_FORMS] = {4, 4, 8, 16, 16, 8, 32, 5, 6};
    Plain made = {NONE, 0, c->form == F16 ? 2 : c->form == FLOAT8 ? 1 : 4, NULL};
    const int64_t num_bytes = c->outputs * width * bits[c->form] / 8;
    made.per_output = width * bits[c->form] / 8 / made.size;
    made.items = memory(num_bytes);
    for (int64_t at = 0; at < num_bytes; at++)
        made.items[at] = c->form == FLOAT8 ? draw(256) & 0xBF : draw(256); /* no float of 8 bits that is no number */
    for (int64_t at = 0; at < c->outputs * width; at++) {
        const float value = drawn_float();
        if (c->form == F32)
            memcpy(made.items + 4 * at, &value, 4);
        if (c->form == BF16)
            memcpy(made.items + 2 * at, (const char *)&value + 2, 2);
        if (c->form == F16)
            ((uint16_t *)made.items)[at] = (uint16_t)(draw(0x3C00) | draw(2) << 15); /* down to the smallest */
    }
    return made;
}

static Plain drawn_values(int64_t kind, int64_t outputs, int64_t per_output)
{
    Plain made = {kind, per_output, kind == FLOAT32 ? 4 : kind >= UINT8 ? 1 : 2, NULL};
    if (kind == NONE || kind == CONSTANT)
        return made;
    made.items = memory(outputs * per_output * made.size);
    for (int64_t at = 0; at < outputs * per_output; at++)
        if (kind == FLOAT32)
            ((float *)made.items)[at] = (float)draw(1000) / 1e5f;
        else if (made.size == 2)
            ((uint16_t *)made.items)[at] = (uint16_t)(kind == FLOAT16 ? 0x2000 + draw(0x1000) : 0x3C00 + draw(0x100));
        else
            made.items[at] = (uint8_t)(kind == UINT8 ? 1 + draw(63) : draw(256));
    return made;
}

/* In blocks of `lanes` outputs: [blocks][items of an output][lanes]. The last block ends with zeros. */
static void *laid_out(const Plain *plain, int64_t outputs, int64_t lanes)
{
    const int64_t blocks = (outputs + lanes - 1) / lanes, num_bytes = blocks * lanes * plain->per_output * plain->size;
    uint8_t *laid = memory(num_bytes);
    memset(laid, 0, (size_t)num_bytes);
    for (int64_t output = 0; output < outputs; output++)
        for (int64_t at = 0; at < plain->per_output; at++)
            memcpy(laid + ((output / lanes * plain->per_output + at) * lanes + output % lanes) * plain->size,
                   plain->items + (output * plain->per_output + at) * plain->size, (size_t)plain->size);
    return laid;
}

static Values values_of(const Plain *plain, int64_t outputs, int64_t lanes)
{
    if (plain->kind == CONSTANT)
        return (Values){CONSTANT, (void *)(intptr_t)8};
    return (Values){plain->kind, plain->kind == NONE ? NULL : laid_out(plain, outputs, lanes)};
}

/* What the kinds of scales, zeros, minima and of the factors of scales and of minima are. */
static const int schemes[][5] = {
    {FLOAT16, UINT8, NONE, NONE, NONE},      {UINT8, NONE, UINT8, FLOAT16, FLOAT16}, {INT8, CONSTANT, NONE, FLOAT16, NONE},
    {FLOAT32, CONSTANT, BFLOAT16, NONE, NONE}, {FLOAT16, NONE, NONE, NONE, NONE},
};
#define NUM_SCHEMES ((int)(sizeof schemes / sizeof schemes[0]))

static Matrix matrix_for(const Case *c, int64_t lanes, const Plain *codes, const Plain values[5], const uint8_t *table,
                         const int64_t *order)
{
    Matrix w = {.form = c->form, .lanes = lanes, .num_outputs = c->outputs, .num_inputs = c->inputs, .unit = c->unit,
                .group = c->group, .scale_each = 2, .min_each = 2, .table = table, .order = order};
    w.width = codes->per_output;
    w.num_groups = values[0].kind == NONE ? 1 : values[0].per_output;
    w.num_scale_factors = w.num_min_factors = (w.num_groups + 1) / 2;
    w.codes = laid_out(codes, c->outputs, lanes);
    Values *const all[5] = {&w.scales, &w.zeros, &w.mins, &w.scale_factors, &w.min_factors};
    for (int at = 0; at < 5; at++)
        *all[at] = values_of(&values[at], c->outputs, lanes);
    return w;
}

static void release(const Matrix *w)
{
    const Values *const all[5] = {&w->scales, &w->zeros, &w->mins, &w->scale_factors, &w->min_factors};
    for (int at = 0; at < 5; at++)
        if (all[at]->kind != CONSTANT)
            free((void *)all[at]->data);
    free((void *)w->codes);
}

/* ---- Products ------------------------------------------------------------------------------------------------------- */

static void multiply_rows(const Kernels *kernels, const Matrix *w, const float *rows, int64_t count, float *output,
                          int num_groups, const float *bias)
{
    const int64_t first = num_groups == 1 ? count : count / 2;
    const Group groups[2] = {{w, bias, 0, first}, {w, bias, first, count - first}};
    Product product = {.work = {.num_threads = 1}, .groups = groups, .num_groups = num_groups, .weight = w,
                       .kernels = kernels, .rows = rows, .num_rows = count, .output = output,
                       .output_stride = w->num_outputs};
    if (!multiply_all(&product))
        exit(2);
}

static float *expanded(const Matrix *w)
{
    int64_t *outputs = memory(8 * w->num_outputs);
    float *rows = memory(4 * w->num_outputs * w->num_inputs);
    for (int64_t at = 0; at < w->num_outputs; at++)
        outputs[at] = at;
    Expansion expansion = {.work = {.compute = expand_row}, .weight = w, .outputs = outputs, .rows = rows};
    for (int64_t at = 0; at < w->num_outputs; at++)
        expand_row(&expansion.work, at);
    free(outputs);
    return rows;
}

/* The same bits; one that is no number is like any other. */
static int are_same(const float *found, const float *expected, int64_t count)
{
    for (int64_t at = 0; at < count; at++)
        if (memcmp(found + at, expected + at, 4) != 0 && !(isnan(found[at]) && isnan(expected[at])))
            return 0;
    return 1;
}

/* Weights of more than one segment have fewer rows, or emulation would take minutes. */
static int64_t rows_of(const Case *c)
{
    return c->inputs > SEGMENT ? 17 : MOST_COUNT;
}

/* How far products are from those in float64, as a part of these; rows that are not finite must show it. */
static double error_of(const Matrix *w, const float *weights, const float *rows, int64_t num_rows, const float *products,
                       const float *bias)
{
    double error = 0.0, size = 1e-30;
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t o = 0; o < w->num_outputs; o++) {
            double exact = 0.0;
            const double found = (double)products[row * w->num_outputs + o] - bias[o];
            if (row == NO_NUMBER || row == INFINITE) {
                error += isfinite(found) ? INFINITY : 0.0;
                continue;
            }
            for (int64_t k = 0; k < w->num_inputs; k++)
                exact += (double)rows[row * w->num_inputs + k] * weights[o * w->num_inputs + k];
            error += (exact - found) * (exact - found);
            size += exact * exact;
        }
    return sqrt(error / size);
}

static void say(const Case *c, const Kernels *kernels, const char *what, double number)
{
    num_failures++;
    printf("%s: form %d, %d x %d, group %d, scheme %d, order %d: %s (%g)\n", kernels->name, c->form, (int)c->outputs,
           (int)c->inputs, (int)c->group, c->scheme, c->is_ordered, what, number);
}

static void check_kernels(const Case *c, const Kernels *kernels, const Matrix *w, const float *rows, const float *bias,
                          const float *expected, const float *weights)
{
    float *found = memory(4 * MOST_COUNT * c->outputs), *own = expanded(w);
    if (!are_same(own, weights, c->outputs * c->inputs))
        say(c, kernels, "other weights", 0.0);
    for (int64_t count = 1; count <= rows_of(c); count += count == 17 ? MOST_COUNT - 17 : c->inputs > SEGMENT ? 4 : 1)
        for (int groups = 1; groups <= 2 && groups <= count; groups++) {
            multiply_rows(kernels, w, rows, count, found, groups, bias);
            if (!are_same(found, expected, count * c->outputs))
                say(c, kernels, "other products of rows", (double)count);
        }
    free(found), free(own);
}

static void check(const Case *c)
{
    const int is_float_form = c->form >= BF16 && c->form <= F32, *kinds = schemes[c->scheme];
    const int64_t width = is_float_form ? (c->inputs + 1) / 2 * 2 : (c->inputs + 31) / 32 * 32;
    const int64_t num_groups = c->group >= c->inputs ? 1 : (width + c->group - 1) / c->group;
    Plain codes = drawn_codes(c, width), values[5];
    for (int at = 0; at < 5; at++) {
        const int is_there = !is_float_form || (c->form == FLOAT8 && at == 0);
        values[at] = drawn_values(is_there ? kinds[at] : NONE, c->outputs, at < 3 ? num_groups : (num_groups + 1) / 2);
    }
    uint8_t *table = memory(16);
    for (int at = 0; at < 16; at++)
        table[at] = (uint8_t)draw(256);
    int64_t *order = memory(8 * c->inputs);
    for (int64_t at = 0; at < c->inputs; at++)
        order[at] = c->inputs - 1 - at;
    float *rows = memory(4 * MOST_COUNT * c->inputs), *bias = memory(4 * c->outputs);
    for (int64_t at = 0; at < MOST_COUNT * c->inputs; at++)
        rows[at] = at / c->inputs == ZEROS ? 0.0f : drawn_float();
    rows[NO_NUMBER * c->inputs + c->inputs / 2] = NAN;
    rows[INFINITE * c->inputs + c->inputs / 2] = INFINITY;
    for (int64_t at = 0; at < c->outputs; at++)
        bias[at] = drawn_float();
    float *expected = memory(4 * MOST_COUNT * c->outputs), *weights = NULL;
    for (int at = NUM_KERNELS - 1; at >= 0; at--) {
        const Kernels *kernels = &all_kernels[at];
        if (!is_run(kernels))
            continue;
        Matrix w = matrix_for(c, kernels->lanes, &codes, values, table, c->is_ordered ? order : NULL);
        w.width = width;
        if (kernels->isa == GENERIC) {
            weights = expanded(&w);
            for (int64_t row = 0; row < rows_of(c); row++)
                multiply_rows(kernels, &w, rows + row * c->inputs, 1, expected + row * c->outputs, 1, bias);
            const double error = error_of(&w, weights, rows, rows_of(c), expected, bias);
            if (!(error < (is_float_form ? 1e-5 : 0.02)))
                say(c, kernels, "off by", error);
        }
        check_kernels(c, kernels, &w, rows, bias, expected, weights);
        release(&w);
    }
    for (int at = 0; at < 5; at++)
        free(values[at].items);
    free(codes.items), free(table), free(order), free(rows), free(bias), free(expected), free(weights);
}

int main(int num_arguments, char **arguments)
{
    static const int64_t shapes[][2] = {{1, 32}, {13, 100}, {37, 96}, {19, 2144}}, groups[] = {16, 32, 64, 1 << 20};
    (void)arguments;
    for (int shape = 0; shape < 4 && num_arguments < 2; shape++)
        for (int form = 0; form < NUM_FORMS; form++)
            for (int group = 0; group < 4; group++)
                for (int scheme = 0; scheme < NUM_SCHEMES; scheme++) {
                    const int is_float_form = form >= BF16 && form <= F32, has_scales = !is_float_form || form == FLOAT8;
                    Case c = {form, shapes[shape][0], shapes[shape][1], groups[group], 32, scheme, 0};
                    if ((form == CODES5 || is_float_form) && c.group == 16)
                        continue;
                    if (!has_scales && (scheme > 0 || c.group < c.inputs))
                        continue;
                    if (c.inputs > SEGMENT && (group + scheme) % 3 > 0)
                        continue;
                    c.unit = form == CODES6 || c.group == 16 ? 16 : 32;
                    c.is_ordered = !is_float_form && (group + scheme) % 2 == 0;
                    check(&c);
                }
    for (int at = 0; at < NUM_KERNELS; at++)
        if (is_run(&all_kernels[at]))
            printf("%s ", all_kernels[at].name);
    return num_failures != 0;
}
