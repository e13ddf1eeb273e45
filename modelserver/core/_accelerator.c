/* The parts of a small request that are worth a C function; modelserver/core/accelerator.py says what each is for.
 *
 * Every function answers None for input that it does not handle, and its caller then does the same in Python. So a
 * function may refuse anything, but must never answer differently from its twin in Python. Functions hold the GIL, keep
 * no state between calls except the table of powers, and read and write nothing outside the buffers that they are
 * given. Only the stable ABI is used: one build serves Python 3.11 and all later ones.
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <float.h>
#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "_decimal.h"

/* ---- JSON -----------------------------------------------------------------------------------------------------------
 *
 * `at` never passes `end`. A function returns 0 for text that it does not handle.
 */

typedef struct {
    const unsigned char *at, *end;
    unsigned char *out;
    const unsigned char *dims; /* int64 each, perhaps not aligned */
    int num_dims;
    char code;
} Reader;

static inline int is_digit(unsigned char c)
{
    return c >= '0' && c <= '9';
}

static inline void skip_space(Reader *r)
{
    while (r->at < r->end && (*r->at == ' ' || *r->at == '\n' || *r->at == '\r' || *r->at == '\t'))
        r->at++;
}

static inline int take(Reader *r, unsigned char wanted)
{
    if (r->at == r->end || *r->at != wanted)
        return 0;
    r->at++;
    return 1;
}

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define EACH(byte) (0x0101010101010101u * (uint64_t)(byte))

/* Whether these eight characters, the first in the lowest byte, are digits; *value is then their number. */
static inline int read_eight(const unsigned char *at, uint64_t *value)
{
    uint64_t text;
    memcpy(&text, at, sizeof text);
    /* The upper halves of bytes are 3, and stay 3 when 6 is added to the lower ones. */
    if (((text & EACH(0xF0)) ^ EACH(0x30)) | (((text + EACH(6)) & EACH(0xF0)) ^ EACH(0x30)))
        return 0;
    text -= EACH('0');
    text = (text * 10 + (text >> 8)) & 0x00FF00FF00FF00FFu;     /* four numbers of two digits */
    text = (text * 100 + (text >> 16)) & 0x0000FFFF0000FFFFu;   /* two of four */
    *value = (text * 10000 + (text >> 32)) & 0x00000000FFFFFFFFu;
    return 1;
}
#endif

/* Digits, which are added to *w; 0 when there are none, or more than it holds. */
static inline int read_digits(Reader *r, uint64_t *w)
{
    const unsigned char *start = r->at;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    uint64_t eight;
    while (r->end - r->at >= 8 && *w <= (UINT64_MAX - 99999999) / 100000000 && read_eight(r->at, &eight)) {
        *w = *w * 100000000 + eight;
        r->at += 8;
    }
#endif
    while (r->at < r->end && is_digit(*r->at)) {
        if (*w > (UINT64_MAX - 9) / 10)
            return 0;
        *w = *w * 10 + (*r->at++ - '0');
    }
    return r->at > start;
}

/* The digits before a point: no zero leads others. */
static inline int read_whole(Reader *r, uint64_t *w)
{
    if (take(r, '0'))
        return r->at == r->end || !is_digit(*r->at);
    return read_digits(r, w);
}

static int read_exponent(Reader *r, int *exponent)
{
    int is_negative = 0;
    uint64_t digits = 0;
    if (take(r, '-'))
        is_negative = 1;
    else
        take(r, '+');
    if (!read_digits(r, &digits) || digits > 1000)
        return 0;
    *exponent += is_negative ? -(int)digits : (int)digits;
    return 1;
}

static int read_word(Reader *r, const char *word, size_t size)
{
    if ((size_t)(r->end - r->at) < size || memcmp(r->at, word, size) != 0)
        return 0;
    r->at += size;
    return 1;
}

static int read_double(Reader *r, double *value)
{
    int is_negative = take(r, '-'), is_integer = 1, q = 0;
    uint64_t w = 0;
    if (r->at < r->end && !is_digit(*r->at)) {
        if (read_word(r, "Infinity", 8))
            *value = is_negative ? -INFINITY : INFINITY;
        else if (!is_negative && read_word(r, "NaN", 3))
            *value = NAN;
        else
            return 0;
        return 1;
    }
    if (!read_whole(r, &w))
        return 0;
    if (take(r, '.')) {
        is_integer = 0;
        const unsigned char *start = r->at;
        if (!read_digits(r, &w) || r->at - start > 1000)
            return 0;
        q = -(int)(r->at - start);
    }
    if (take(r, 'e') || take(r, 'E')) {
        is_integer = 0;
        if (!read_exponent(r, &q))
            return 0;
    }
    if (w == 0 && is_negative && is_integer)
        return 0; /* some readers take it for an integer without a sign */
    double found;
    if (w == 0)
        found = 0.0;
#if FLT_EVAL_METHOD == 0
    else if (w <= MAX_EXACT_INTEGER && q <= 0 && q >= -MAX_EXACT_POWER)
        found = (double)w / exact_powers[-q]; /* both are exact, and a division rounds right */
#endif
    else if (q < -MAX_POWER || q > MAX_POWER)
        return 0;
    else
        found = rounded(w, q);
    *value = is_negative ? -found : found;
    return 1;
}

/* An integer from `lowest` to `highest`, as the bits of two's complement. */
static inline int read_integer(Reader *r, int64_t lowest, uint64_t highest, uint64_t *bits)
{
    uint64_t w = 0;
    if (take(r, '-')) {
        /* "-0" is left to Python; and -(lowest + 1) + 1 is where -lowest would overflow. */
        if (!read_whole(r, &w) || w == 0 || lowest == 0 || w > (uint64_t)(-(lowest + 1)) + 1)
            return 0;
        *bits = (uint64_t)0 - w;
        return 1;
    }
    if (!read_whole(r, &w) || w > highest)
        return 0;
    *bits = w;
    return 1;
}

#define INTEGER(letter, type, lowest, highest)                                                                         \
    case letter: {                                                                                                     \
        uint64_t bits;                                                                                                 \
        if (!read_integer(r, lowest, highest, &bits))                                                                  \
            return 0;                                                                                                  \
        type value = (type)bits;                                                                                       \
        memcpy(r->out, &value, sizeof value);                                                                          \
        r->out += sizeof value;                                                                                        \
        return 1;                                                                                                      \
    }

/* One element, written to `out`; the letters are those of Python's `struct`. */
static inline int read_element(Reader *r)
{
    switch (r->code) {
    case 'f': {
        double value;
        if (!read_double(r, &value) || (isfinite(value) && (value > FLT_MAX || value < -FLT_MAX)))
            return 0; /* values that round down to FLT_MAX are left to Python */
        float narrow = (float)value;
        memcpy(r->out, &narrow, sizeof narrow);
        r->out += sizeof narrow;
        return 1;
    }
    case 'd': {
        double value;
        if (!read_double(r, &value))
            return 0;
        memcpy(r->out, &value, sizeof value);
        r->out += sizeof value;
        return 1;
    }
    case '?': {
        unsigned char value = (unsigned char)read_word(r, "true", 4);
        if (!value && !read_word(r, "false", 5))
            return 0;
        *r->out++ = value;
        return 1;
    }
        INTEGER('b', int8_t, INT8_MIN, INT8_MAX)
        INTEGER('h', int16_t, INT16_MIN, INT16_MAX)
        INTEGER('i', int32_t, INT32_MIN, INT32_MAX)
        INTEGER('q', int64_t, INT64_MIN, INT64_MAX)
        INTEGER('B', uint8_t, 0, UINT8_MAX)
        INTEGER('H', uint16_t, 0, UINT16_MAX)
        INTEGER('I', uint32_t, 0, UINT32_MAX)
        INTEGER('Q', uint64_t, 0, UINT64_MAX)
    }
    return 0;
}

static int64_t dim_of(const Reader *r, int level)
{
    int64_t dim;
    memcpy(&dim, r->dims + 8 * level, 8);
    return dim;
}

/* An array of exactly as many arrays, or elements, as the level has. */
static int read_level(Reader *r, int level)
{
    int is_last = level + 1 == r->num_dims;
    if (!take(r, '['))
        return 0;
    for (int64_t left = dim_of(r, level); left > 0; left--) {
        skip_space(r);
        if (!(is_last ? read_element(r) : read_level(r, level + 1)))
            return 0;
        skip_space(r);
        if (!take(r, left > 1 ? ',' : ']'))
            return 0;
    }
    return 1;
}

/* ---- Tensors --------------------------------------------------------------------------------------------------------
 *
 * The expected form of an array is a `bytes`: a letter, and 1 to MAX_DIMS sizes of 8 bytes, none below 1. accelerator.py
 * packs it.
 */

#define MAX_DIMS 32

static Py_ssize_t size_of(char code)
{
    switch (code) {
    case '?':
    case 'b':
    case 'B':
        return 1;
    case 'h':
    case 'H':
        return 2;
    case 'i':
    case 'I':
    case 'f':
        return 4;
    case 'q':
    case 'Q':
    case 'd':
        return 8;
    }
    return 0;
}

/* The array at `at`, as a new `bytes`; NULL without an error for anything else, which leaves `at` undefined. */
static PyObject *read_tensor(Reader *r, PyObject *kind)
{
    char *packed;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(kind, &packed, &size) < 0)
        return NULL;
    Py_ssize_t num_dims = (size - 1) / 8, num_bytes = size > 0 ? size_of(packed[0]) : 0;
    if (num_bytes == 0 || num_dims < 1 || num_dims > MAX_DIMS || size != 1 + 8 * num_dims) {
        PyErr_SetString(PyExc_ValueError, "a kind is a letter of struct and 1 to 32 sizes of 8 bytes");
        return NULL;
    }
    r->code = packed[0];
    r->dims = (const unsigned char *)packed + 1;
    r->num_dims = (int)num_dims;
    /* Each element takes two bytes of text or more, with what follows it: nothing larger is allocated. */
    Py_ssize_t count = 1, most = (r->end - r->at) / 2;
    for (int level = 0; level < r->num_dims; level++) {
        int64_t dim = dim_of(r, level);
        if (dim < 1 || dim > most / count)
            return NULL;
        count *= (Py_ssize_t)dim;
    }
    if (count > PY_SSIZE_T_MAX / num_bytes)
        return NULL;
    PyObject *tensor = PyBytes_FromStringAndSize(NULL, count * num_bytes);
    if (tensor == NULL)
        return NULL;
    r->out = (unsigned char *)PyBytes_AsString(tensor);
    if (!read_level(r, 0)) {
        Py_DECREF(tensor);
        return NULL;
    }
    return tensor;
}

/* NULL with an error stays NULL; any other NULL becomes None. */
static PyObject *refused(void)
{
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *read_array(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    Py_buffer text;
    (void)module;
    if (num_args != 2) {
        PyErr_SetString(PyExc_TypeError, "read_array takes a text and a kind");
        return NULL;
    }
    if (PyObject_GetBuffer(args[0], &text, PyBUF_SIMPLE) < 0)
        return NULL;
    Reader r = {.at = text.buf, .end = (const unsigned char *)text.buf + text.len};
    PyObject *tensor = NULL;
    if (has_powers) {
        skip_space(&r);
        tensor = read_tensor(&r, args[1]);
        skip_space(&r);
        if (tensor != NULL && r.at != r.end)
            Py_CLEAR(tensor);
    }
    PyBuffer_Release(&text);
    return tensor != NULL ? tensor : refused();
}

/* The text number `place` of `texts` must be next. */
static int pass_text(Reader *r, PyObject *texts, Py_ssize_t place)
{
    char *text;
    Py_ssize_t size;
    PyObject *item = PyTuple_GetItem(texts, place);
    if (item == NULL || PyBytes_AsStringAndSize(item, &text, &size) < 0)
        return 0;
    return read_word(r, text, (size_t)size);
}

static PyObject *read_call(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    char *body;
    Py_ssize_t size;
    (void)module;
    if (num_args != 3 || !PyTuple_Check(args[1]) || !PyTuple_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "read_call takes a body, a tuple of texts and a tuple of kinds");
        return NULL;
    }
    if (PyBytes_AsStringAndSize(args[0], &body, &size) < 0)
        return NULL;
    Py_ssize_t num_tensors = PyTuple_Size(args[2]);
    if (PyTuple_Size(args[1]) != num_tensors + 1) {
        PyErr_SetString(PyExc_ValueError, "there is one text more than kinds");
        return NULL;
    }
    Reader r = {.at = (const unsigned char *)body, .end = (const unsigned char *)body + size};
    if (!has_powers || !pass_text(&r, args[1], 0))
        return refused();
    PyObject *tensors = PyTuple_New(num_tensors);
    if (tensors == NULL)
        return NULL;
    for (Py_ssize_t place = 0; place < num_tensors; place++) {
        PyObject *tensor = read_tensor(&r, PyTuple_GetItem(args[2], place));
        if (tensor == NULL || PyTuple_SetItem(tensors, place, tensor) < 0 || !pass_text(&r, args[1], place + 1)) {
            Py_DECREF(tensors);
            return refused();
        }
    }
    if (r.at != r.end) {
        Py_DECREF(tensors);
        return refused();
    }
    return tensors;
}

/* ---- Arrays as JSON ---------------------------------------------------------------------------------------------- */

#define MAX_TEXT 21      /* of an element with the comma behind it: an integer of 64 bits has 20 characters at most */
#define MAX_ON_STACK 128 /* elements whose text is made on the stack */

#define ELEMENT(put, wide, type)                                                                                       \
    {                                                                                                                  \
        type value;                                                                                                    \
        memcpy(&value, at, sizeof value);                                                                              \
        return put(out, (wide)value);                                                                                  \
    }

#define INTEGER_ELEMENT(put, wide, type)                                                                               \
    switch (size) {                                                                                                    \
    case 1:                                                                                                            \
        ELEMENT(put, wide, type##8_t)                                                                                  \
    case 2:                                                                                                            \
        ELEMENT(put, wide, type##16_t)                                                                                 \
    case 4:                                                                                                            \
        ELEMENT(put, wide, type##32_t)                                                                                 \
    default:                                                                                                           \
        ELEMENT(put, wide, type##64_t)                                                                                 \
    }

/* One element of `size` bytes; NULL for a value that is not written here. `code` is a letter of `struct`. */
static inline char *put_element(char *out, const char *at, char code, Py_ssize_t size)
{
    switch (code) {
    case 'f':
        ELEMENT(put_float, uint32_t, uint32_t)
    case 'b':
    case 'h':
    case 'i':
    case 'l':
    case 'q':
        INTEGER_ELEMENT(put_signed, int64_t, int)
    case 'B':
    case 'H':
    case 'I':
    case 'L':
    case 'Q':
        INTEGER_ELEMENT(put_integer, uint64_t, uint)
    }
    return NULL;
}

/* The elements of a buffer, as text that `out` has room for; NULL if one of them is not written here. */
static char *put_elements(char *out, const Py_buffer *data)
{
    const char *at = data->buf, *end = at + data->len;
    *out++ = '[';
    for (; at < end; at += data->itemsize) {
        out = put_element(out, at, data->format[0], data->itemsize);
        if (out == NULL)
            return NULL;
        *out++ = ',';
    }
    out[data->len > 0 ? -1 : 0] = ']';
    return out + (data->len == 0);
}

static PyObject *write_array(PyObject *module, PyObject *array)
{
    Py_buffer data;
    (void)module;
    if (PyObject_GetBuffer(array, &data, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0) {
        PyErr_Clear(); /* left to Python, which makes it contiguous */
        Py_RETURN_NONE;
    }
    PyObject *written = NULL;
    char on_stack[MAX_ON_STACK * MAX_TEXT], *text = on_stack;
    /* One letter means the byte order of the system. */
    if (!has_powers || data.format == NULL || data.format[0] == 0 || data.format[1] != 0 || data.itemsize < 1 ||
        data.itemsize > 8 || data.len / data.itemsize >= PY_SSIZE_T_MAX / MAX_TEXT)
        goto done;
    Py_ssize_t count = data.len / data.itemsize;
    if (count >= MAX_ON_STACK && (text = PyMem_Malloc((size_t)(count + 1) * MAX_TEXT)) == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    char *end = put_elements(text, &data);
    if (end != NULL)
        written = PyBytes_FromStringAndSize(text, end - text);
    if (text != on_stack)
        PyMem_Free(text);
done:
    PyBuffer_Release(&data);
    return written != NULL ? written : refused();
}

/* ---- HTTP/2 ---------------------------------------------------------------------------------------------------------
 *
 * The frames of a small answer to a unary gRPC call: HEADERS, DATA and the trailers' HEADERS, of one stream.
 */

#define FRAME_HEAD 9
#define PREFIX 5
#define MAX_PARTS 16
#define MAX_ANSWER (1 << 20) /* far below what a frame's 24 bits can count */

static inline unsigned char *put_u32(unsigned char *out, uint32_t value)
{
    out[0] = (unsigned char)(value >> 24);
    out[1] = (unsigned char)(value >> 16);
    out[2] = (unsigned char)(value >> 8);
    out[3] = (unsigned char)value;
    return out + 4;
}

/* A whole frame, with the given stream's id in place of its own. */
static unsigned char *put_frame(unsigned char *out, const char *frame, Py_ssize_t size, uint32_t stream_id)
{
    memcpy(out, frame, (size_t)size);
    put_u32(out + 5, stream_id);
    return out + size;
}

static unsigned char *put_data_head(unsigned char *out, uint32_t stream_id, uint32_t message_size)
{
    uint32_t length = message_size + PREFIX;
    *out++ = (unsigned char)(length >> 16);
    *out++ = (unsigned char)(length >> 8);
    *out++ = (unsigned char)length;
    *out++ = 0; /* DATA */
    *out++ = 0; /* no flags */
    out = put_u32(out, stream_id);
    *out++ = 0; /* not compressed */
    return put_u32(out, message_size);
}

static PyObject *join_answer(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    Py_buffer parts[MAX_PARTS];
    char *first, *last;
    Py_ssize_t first_size, last_size, num_parts = 0, size = 0;
    PyObject *answer = NULL;
    (void)module;
    if (num_args != 4 || !PyTuple_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "join_answer takes a stream's id, a tuple of parts and two frames");
        return NULL;
    }
    unsigned long stream_id = PyLong_AsUnsignedLong(args[0]);
    if (stream_id > 0x7FFFFFFF) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_OverflowError, "a stream's id has 31 bits");
        return NULL;
    }
    if (PyBytes_AsStringAndSize(args[2], &first, &first_size) < 0 ||
        PyBytes_AsStringAndSize(args[3], &last, &last_size) < 0)
        return NULL;
    if (first_size < FRAME_HEAD || last_size < FRAME_HEAD || first_size > MAX_ANSWER || last_size > MAX_ANSWER) {
        PyErr_SetString(PyExc_ValueError, "a frame has 9 bytes or more, and here a MiB at most");
        return NULL;
    }
    Py_ssize_t count = PyTuple_Size(args[1]);
    if (count > MAX_PARTS)
        Py_RETURN_NONE;
    while (num_parts < count) {
        Py_buffer *part = &parts[num_parts];
        if (PyObject_GetBuffer(PyTuple_GetItem(args[1], num_parts), part, PyBUF_SIMPLE) < 0) {
            PyErr_Clear(); /* Python says what is wrong with it */
            goto done;
        }
        num_parts++;
        if (part->len > MAX_ANSWER - size)
            goto done; /* left to Python */
        size += part->len;
    }
    answer = PyBytes_FromStringAndSize(NULL, first_size + FRAME_HEAD + PREFIX + size + last_size);
    if (answer == NULL)
        goto done;
    unsigned char *out = put_frame((unsigned char *)PyBytes_AsString(answer), first, first_size, (uint32_t)stream_id);
    out = put_data_head(out, (uint32_t)stream_id, (uint32_t)size);
    for (Py_ssize_t place = 0; place < num_parts; place++) {
        if (parts[place].len > 0)
            memcpy(out, parts[place].buf, (size_t)parts[place].len);
        out += parts[place].len;
    }
    put_frame(out, last, last_size, (uint32_t)stream_id);
done:
    while (num_parts > 0)
        PyBuffer_Release(&parts[--num_parts]);
    return answer != NULL ? answer : refused();
}

static inline uint32_t get_u32(const unsigned char *in)
{
    return (uint32_t)in[0] << 24 | (uint32_t)in[1] << 16 | (uint32_t)in[2] << 8 | in[3];
}

enum { DATA = 0, HEADERS = 1, WINDOW_UPDATE = 8, END_STREAM = 1, END_HEADERS = 4 };
#define MAX_BLOCK 512

/* The frame at `in`, of which `left` bytes have arrived; NULL without an error for a frame of an unusual kind. */
static PyObject *usual_frame(const unsigned char *in, Py_ssize_t left, Py_ssize_t position, Py_ssize_t max_data)
{
    if (left < FRAME_HEAD)
        return NULL;
    Py_ssize_t length = (Py_ssize_t)in[0] << 16 | (Py_ssize_t)in[1] << 8 | in[2];
    int kind = in[3], flags = in[4];
    uint32_t stream_id = get_u32(in + 5);
    if (length > left - FRAME_HEAD || stream_id > 0x7FFFFFFF)
        return NULL;
    const unsigned char *content = in + FRAME_HEAD;
    PyObject *payload;
    if (kind == DATA) {
        /* The one message of a call, complete and uncompressed. */
        if (flags != END_STREAM || length < PREFIX || length > max_data || content[0] != 0 ||
            get_u32(content + 1) != (uint32_t)(length - PREFIX))
            return NULL;
        payload = PyBytes_FromStringAndSize((const char *)content + PREFIX, length - PREFIX);
    } else if (kind == HEADERS && flags == END_HEADERS && length <= MAX_BLOCK)
        payload = PyBytes_FromStringAndSize((const char *)content, length);
    else if (kind == WINDOW_UPDATE && length == 4)
        payload = PyLong_FromUnsignedLong(get_u32(content) & 0x7FFFFFFF);
    else
        return NULL;
    PyObject *values[4] = {
        PyLong_FromLong(kind),
        PyLong_FromUnsignedLong(stream_id),
        payload,
        PyLong_FromSsize_t(position + FRAME_HEAD + length),
    };
    PyObject *frame = PyTuple_New(4);
    int is_whole = frame != NULL;
    for (int place = 0; place < 4; place++) {
        if (values[place] == NULL || !is_whole) {
            Py_XDECREF(values[place]);
            is_whole = 0;
        } else
            PyTuple_SetItem(frame, place, values[place]);
    }
    if (!is_whole)
        Py_CLEAR(frame);
    return frame;
}

static PyObject *read_frame(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    Py_buffer data;
    (void)module;
    if (num_args != 4) {
        PyErr_SetString(PyExc_TypeError, "read_frame takes data, a position, an end and the size of the largest DATA");
        return NULL;
    }
    Py_ssize_t position = PyLong_AsSsize_t(args[1]), end = PyLong_AsSsize_t(args[2]);
    Py_ssize_t max_data = PyLong_AsSsize_t(args[3]);
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &data, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *frame = NULL;
    if (position >= 0 && position <= end && end <= data.len)
        frame = usual_frame((const unsigned char *)data.buf + position, end - position, position, max_data);
    PyBuffer_Release(&data);
    return frame != NULL ? frame : refused();
}

/* ---- Long JSON ------------------------------------------------------------------------------------------------------
 *
 * Long texts are cut up here before they are parsed in pieces. Only their structure is read, so the pieces still have to
 * be parsed. The interpreter's lock is released meanwhile.
 */

#define MAX_LEVELS 1024
#define MAX_CUTS 4096
#define MAX_PLACEHOLDER 24 /* "[4095]" and more */

enum { WHOLE = 0, TOO_DEEP = 1, TOO_MANY = 2, NOT_WHOLE = 3, ESCAPED = 4 };

/* The position after the string that begins at `at`; NULL when the string has no end. */
static const unsigned char *behind_string(const unsigned char *at, const unsigned char *end)
{
    for (at++; at < end; at++) {
        if (*at == '"')
            return at + 1;
        if (*at == '\\' && ++at == end)
            return NULL;
    }
    return NULL;
}

typedef struct {
    Py_ssize_t num_values; /* commas, colons and brackets: no text has more values */
    int depth, max_depth;
} Measure;

/* The position after the value that begins at `at` with a bracket. */
static int pass_value(const unsigned char **at, const unsigned char *end, Measure *m)
{
    const unsigned char *c = *at;
    int depth = m->depth;
    while (c < end) {
        switch (*c) {
        case '"':
            if ((c = behind_string(c, end)) == NULL)
                return NOT_WHOLE;
            continue;
        case '[':
        case '{':
            m->num_values++;
            if (++depth > m->max_depth)
                return TOO_DEEP;
            break;
        case ']':
        case '}':
            if (--depth == m->depth) {
                *at = c + 1;
                return WHOLE;
            }
            break;
        case ',':
        case ':':
            m->num_values++;
        }
        c++;
    }
    return NOT_WHOLE;
}

static PyObject *measure_json(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    Py_buffer text;
    (void)module;
    if (num_args != 2) {
        PyErr_SetString(PyExc_TypeError, "measure_json takes a text and the most levels");
        return NULL;
    }
    Py_ssize_t max_depth = PyLong_AsSsize_t(args[1]);
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &text, PyBUF_SIMPLE) < 0)
        return NULL;
    Measure m = {.max_depth = max_depth > MAX_LEVELS ? MAX_LEVELS : (int)max_depth};
    const unsigned char *at = text.buf, *end = at + text.len;
    int state = WHOLE;
    Py_BEGIN_ALLOW_THREADS
    while (at < end && state == WHOLE) {
        if (*at == '"') {
            const unsigned char *behind = behind_string(at, end);
            state = behind == NULL ? NOT_WHOLE : WHOLE;
            at = behind;
        } else if (*at == '[' || *at == '{')
            state = pass_value(&at, end, &m);
        else
            at++;
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&text);
    return Py_BuildValue("(in)", state, m.num_values);
}

typedef struct {
    unsigned char *out, *out_end;
    int64_t spans[2 * MAX_CUTS];
    Py_ssize_t num_cuts, size;
} Cuts;

/* The text of an object without the arrays named `data` in the members of its arrays: "[0]" stands for the first. */
static int cut(const unsigned char *text, Py_ssize_t size, Measure *m, Py_ssize_t max_values, Cuts *cuts)
{
    const unsigned char *at = text, *end = text + size, *kept = text;
    unsigned char *out = cuts->out;
    char kinds[MAX_LEVELS + 1];
    int is_key = 0, is_data = 0;
    while (at < end) {
        const unsigned char *start = at;
        switch (*at) {
        case '"':
            if ((at = behind_string(at, end)) == NULL)
                return NOT_WHOLE;
            if (is_key && m->depth == 3 && memchr(start, '\\', (size_t)(at - start)) != NULL)
                return ESCAPED; /* it may spell `data` */
            if (is_key)
                is_data = m->depth == 3 && kinds[2] == '[' && at - start == 6 && memcmp(start, "\"data\"", 6) == 0;
            is_key = 0;
            continue;
        case '[':
            if (is_data && !is_key && m->depth == 3) {
                Py_ssize_t num_values = m->num_values;
                int state = pass_value(&at, end, m);
                m->num_values = num_values;
                if (state != WHOLE)
                    return state;
                if (cuts->num_cuts == MAX_CUTS || start - kept > cuts->out_end - out - MAX_PLACEHOLDER)
                    return TOO_MANY;
                memcpy(out, kept, (size_t)(start - kept));
                out += start - kept;
                kept = at;
                *out++ = '[';
                out = (unsigned char *)put_integer((char *)out, (uint64_t)cuts->num_cuts);
                *out++ = ']';
                cuts->spans[2 * cuts->num_cuts] = start - text;
                cuts->spans[2 * cuts->num_cuts++ + 1] = at - text;
                is_data = 0;
                continue;
            }
            /* fall through */
        case '{':
            m->num_values++;
            if (++m->depth > m->max_depth)
                return TOO_DEEP;
            kinds[m->depth] = (char)*at;
            is_key = *at == '{';
            is_data = 0;
            break;
        case ']':
        case '}':
            if (m->depth == 0)
                return NOT_WHOLE;
            m->depth--;
            is_key = is_data = 0;
            break;
        case ',':
            is_key = m->depth > 0 && kinds[m->depth] == '{';
            is_data = 0;
            m->num_values++;
            break;
        case ':':
            m->num_values++;
        }
        if (m->num_values > max_values)
            return TOO_MANY;
        at++;
    }
    if (m->depth != 0)
        return NOT_WHOLE;
    if (end - kept > cuts->out_end - out)
        return TOO_MANY;
    memcpy(out, kept, (size_t)(end - kept));
    cuts->size = out + (end - kept) - cuts->out;
    return WHOLE;
}

static PyObject *cut_data(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    Py_buffer text;
    (void)module;
    if (num_args != 4) {
        PyErr_SetString(PyExc_TypeError, "cut_data takes a text, the most levels, the most values and the most bytes");
        return NULL;
    }
    Py_ssize_t max_depth = PyLong_AsSsize_t(args[1]), max_values = PyLong_AsSsize_t(args[2]);
    Py_ssize_t max_bytes = PyLong_AsSsize_t(args[3]);
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &text, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *found = NULL;
    Measure m = {.max_depth = max_depth > MAX_LEVELS ? MAX_LEVELS : (int)max_depth};
    Cuts *cuts = PyMem_Malloc(sizeof *cuts);
    Py_ssize_t room = (text.len < max_bytes ? text.len : max_bytes) + MAX_CUTS * MAX_PLACEHOLDER;
    unsigned char *out = PyMem_Malloc((size_t)room);
    if (cuts == NULL || out == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    *cuts = (Cuts){.out = out, .out_end = out + room};
    int state;
    Py_BEGIN_ALLOW_THREADS
    state = cut(text.buf, text.len, &m, max_values, cuts);
    Py_END_ALLOW_THREADS
    found = Py_BuildValue("(iy#y#)", state, out, state == WHOLE ? cuts->size : 0, cuts->spans,
                          2 * cuts->num_cuts * (Py_ssize_t)sizeof *cuts->spans);
done:
    PyMem_Free(cuts);
    PyMem_Free(out);
    PyBuffer_Release(&text);
    return found;
}

/* Grows the list; NULL if there is no memory. */
typedef struct {
    int64_t *items;
    Py_ssize_t count, room;
} Numbers;

static int put_number(Numbers *numbers, int64_t number)
{
    if (numbers->count == numbers->room) {
        Py_ssize_t room = numbers->room ? 2 * numbers->room : 256;
        int64_t *items = realloc(numbers->items, (size_t)room * sizeof *items);
        if (items == NULL)
            return 0;
        numbers->items = items;
        numbers->room = room;
    }
    numbers->items[numbers->count++] = number;
    return 1;
}

/* An array of any depth as a flat one: every bracket becomes a space. `out` has as many bytes as the text.
 *
 * Pieces end at commas: each is a place and the number of elements before it. An array whose rows differ in length or
 * depth has one level, of all its elements; empty rows leave no comma. Returns -1, or the position of the error.
 */
static Py_ssize_t flatten(const unsigned char *text, Py_ssize_t size, unsigned char *out, Py_ssize_t piece_bytes,
                          int64_t *dims, int *num_dims, Numbers *pieces, int *is_out_of_memory)
{
    const unsigned char *at = text, *end = text + size;
    int64_t counts[MAX_DIMS + 1];
    int depth = 0, leaf_depth = 0, deepest = 0, is_filled = 0, is_regular = 1;
    Py_ssize_t piece_start = 0, comma = 0;
    int64_t num_elements = 0;
    for (int level = 0; level <= MAX_DIMS; level++)
        dims[level] = -1;
    memset(out, ' ', (size_t)size);
    while (at < end) {
        const unsigned char *start = at;
        switch (*at) {
        case ' ':
        case '\t':
        case '\n':
        case '\r':
            at++;
            continue;
        case '[':
            if (is_filled || depth == MAX_DIMS || (depth == 0 && at != text))
                return at - text;
            counts[++depth] = 0;
            deepest = depth > deepest ? depth : deepest;
            at++;
            continue;
        case ']':
            if (depth == 0 || (!is_filled && counts[depth] > 0))
                return at - text;
            counts[depth] += is_filled;
            if (dims[depth] != -1 && dims[depth] != counts[depth])
                is_regular = 0;
            dims[depth] = counts[depth];
            depth--;
            is_filled = 1;
            at++;
            continue;
        case ',':
            if (!is_filled || depth == 0)
                return at - text;
            counts[depth]++;
            is_filled = 0;
            comma = at - text;
            at++;
            continue;
        case '{':
        case '}':
        case ':':
            return at - text;
        case '"':
            if ((at = behind_string(at, end)) == NULL)
                return start - text;
            break;
        default:
            while (at < end && *at != ',' && *at != ']' && *at != ' ' && *at != '[' && *at != '"' && *at != '\n' &&
                   *at != '\r' && *at != '\t' && *at != '{' && *at != '}' && *at != ':')
                at++;
        }
        if (is_filled || depth == 0)
            return start - text;
        is_regular = is_regular && (leaf_depth == 0 || leaf_depth == depth);
        leaf_depth = depth;
        is_filled = 1;
        if (num_elements > 0) {
            out[comma] = ',';
            if (comma - piece_start >= piece_bytes) {
                piece_start = comma;
                if (!put_number(pieces, comma) || !put_number(pieces, num_elements)) {
                    *is_out_of_memory = 1;
                    return 0;
                }
            }
        }
        num_elements++;
        memcpy(out + (start - text), start, (size_t)(at - start));
    }
    if (depth != 0 || !is_filled)
        return size;
    is_regular = is_regular && (leaf_depth == 0 || leaf_depth == deepest);
    if (!is_regular)
        dims[1] = num_elements;
    *num_dims = is_regular ? deepest : 1;
    if (!put_number(pieces, size) || !put_number(pieces, num_elements))
        *is_out_of_memory = 1;
    return -1;
}

static PyObject *flat_array(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    Py_buffer text, flat;
    (void)module;
    if (num_args != 3) {
        PyErr_SetString(PyExc_TypeError, "flat_array takes a text, the size of a piece, and memory");
        return NULL;
    }
    Py_ssize_t piece_bytes = PyLong_AsSsize_t(args[1]);
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &text, PyBUF_SIMPLE) < 0)
        return NULL;
    if (PyObject_GetBuffer(args[2], &flat, PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&text);
        return NULL;
    }
    int64_t dims[MAX_DIMS + 1];
    Numbers pieces = {NULL, 0, 0};
    int num_dims = 0, is_out_of_memory = 0;
    Py_ssize_t wrong_at = 0;
    PyObject *found = NULL;
    if (flat.len < text.len) {
        PyErr_SetString(PyExc_ValueError, "the memory is smaller than the text");
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    wrong_at = flatten(text.buf, text.len, flat.buf, piece_bytes, dims, &num_dims, &pieces, &is_out_of_memory);
    Py_END_ALLOW_THREADS
    if (is_out_of_memory)
        PyErr_NoMemory();
    else if (wrong_at >= 0)
        found = PyLong_FromSsize_t(wrong_at);
    else
        found = Py_BuildValue("(y#y#)", dims + 1, (Py_ssize_t)(num_dims * sizeof *dims), pieces.items,
                              pieces.count * (Py_ssize_t)sizeof *pieces.items);
done:
    free(pieces.items);
    PyBuffer_Release(&flat);
    PyBuffer_Release(&text);
    return found;
}

/* Ends of members of the array or object in the text, about `piece_bytes` apart, or one longer member apart; None for
 * an incomplete text.
 */
static PyObject *cut_members(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    Py_buffer text;
    (void)module;
    if (num_args != 2) {
        PyErr_SetString(PyExc_TypeError, "cut_members takes a text and the size of a piece");
        return NULL;
    }
    Py_ssize_t piece_bytes = PyLong_AsSsize_t(args[1]);
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &text, PyBUF_SIMPLE) < 0)
        return NULL;
    Numbers ends = {NULL, 0, 0};
    PyObject *found = NULL;
    int is_whole = text.len >= 2, is_stored = 1;
    Py_BEGIN_ALLOW_THREADS
    const unsigned char *first = text.buf, *at = first + 1, *last = first + text.len - 1;
    Py_ssize_t piece_start = 1, member_start = 1;
    Measure m = {.max_depth = INT32_MAX};
    while (is_whole && is_stored && at <= last) {
        if (*at == '"')
            is_whole = (at = behind_string(at, last)) != NULL;
        else if (*at == '[' || *at == '{')
            is_whole = pass_value(&at, last, &m) == WHOLE;
        else if (*at == ',' || at == last) {
            Py_ssize_t place = at - first;
            if (place - piece_start >= piece_bytes || at == last) {
                /* A member longer than a piece gets a piece of its own, so the members before it end here. */
                if (place - member_start >= piece_bytes && member_start > piece_start)
                    is_stored = put_number(&ends, member_start - 1);
                is_stored = is_stored && put_number(&ends, place);
                piece_start = place + 1;
            }
            member_start = place + 1;
            at++;
        } else
            at++;
    }
    Py_END_ALLOW_THREADS
    if (!is_stored)
        PyErr_NoMemory();
    else if (is_whole)
        found = PyBytes_FromStringAndSize((const char *)ends.items, ends.count * (Py_ssize_t)sizeof *ends.items);
    free(ends.items);
    PyBuffer_Release(&text);
    return found != NULL ? found : refused();
}

/* ---- BYTES ----------------------------------------------------------------------------------------------------------
 *
 * Four bytes of length, lowest first, stand before each element. A call handles a slice of a tensor, so that other
 * threads get their turn between two calls.
 */

#define MAX_SLICE_BYTES (1 << 20)
#define MIN_UNLOCKED_BYTES (1 << 18) /* copied without the GIL */

static inline uint32_t get_u32_le(const unsigned char *in)
{
    return in[0] | (uint32_t)in[1] << 8 | (uint32_t)in[2] << 16 | (uint32_t)in[3] << 24;
}

static PyObject *copied(const unsigned char *from, Py_ssize_t size)
{
    if (size < MIN_UNLOCKED_BYTES)
        return PyBytes_FromStringAndSize((const char *)from, size);
    PyObject *copy = PyBytes_FromStringAndSize(NULL, size);
    if (copy == NULL)
        return NULL;
    char *to = PyBytes_AsString(copy);
    Py_BEGIN_ALLOW_THREADS
    memcpy(to, from, (size_t)size);
    Py_END_ALLOW_THREADS
    return copy;
}

/* `count` elements from `offset` on, or a slice of them, and where they end; None when an element is incomplete. */
static PyObject *split_elements(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    Py_buffer data;
    (void)module;
    if (num_args != 3) {
        PyErr_SetString(PyExc_TypeError, "split_elements takes data, an offset and a count");
        return NULL;
    }
    Py_ssize_t offset = PyLong_AsSsize_t(args[1]), count = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &data, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *found = NULL, *elements = NULL;
    if (offset < 0 || offset > data.len || count < 0 || count > (data.len - offset) / 4)
        goto done;
    Py_ssize_t first = offset, place = 0;
    elements = PyList_New(0);
    while (elements != NULL && place < count && offset - first < MAX_SLICE_BYTES) {
        if (data.len - offset < 4)
            goto done;
        const unsigned char *at = (const unsigned char *)data.buf + offset;
        Py_ssize_t length = (Py_ssize_t)get_u32_le(at);
        if (length > data.len - offset - 4)
            goto done;
        PyObject *element = copied(at + 4, length);
        if (element == NULL || PyList_Append(elements, element) < 0) {
            Py_XDECREF(element);
            goto done;
        }
        Py_DECREF(element);
        offset += 4 + length;
        place++;
    }
    if (elements != NULL)
        found = Py_BuildValue("(On)", elements, offset);
done:
    Py_XDECREF(elements);
    PyBuffer_Release(&data);
    return found != NULL ? found : refused();
}

/* ---- Protobuf: the end of the first field from `at` on that ends at or after `until`; None if no field is complete. */

static int read_varint(const unsigned char **at, const unsigned char *end, uint64_t *value)
{
    *value = 0;
    for (int shift = 0; shift < 70 && *at < end; shift += 7) {
        unsigned char byte = *(*at)++;
        if (shift < 64)
            *value |= (uint64_t)(byte & 0x7F) << shift;
        if (byte < 0x80)
            return 1;
    }
    return 0;
}

static int pass_field(const unsigned char **at, const unsigned char *end)
{
    uint64_t tag, size = 0;
    if (!read_varint(at, end, &tag))
        return 0;
    switch (tag & 7) {
    case 0:
        return read_varint(at, end, &size);
    case 1:
        size = 8;
        break;
    case 2:
        if (!read_varint(at, end, &size))
            return 0;
        break;
    case 5:
        size = 4;
        break;
    default:
        return 0;
    }
    if (size > (uint64_t)(end - *at))
        return 0;
    *at += size;
    return 1;
}

static PyObject *pass_fields(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    Py_buffer data;
    (void)module;
    if (num_args != 3) {
        PyErr_SetString(PyExc_TypeError, "pass_fields takes data and two offsets");
        return NULL;
    }
    Py_ssize_t offset = PyLong_AsSsize_t(args[1]), until = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &data, PyBUF_SIMPLE) < 0)
        return NULL;
    const unsigned char *first = data.buf, *end = first + data.len;
    int is_whole = offset >= 0 && offset <= data.len;
    const unsigned char *at = is_whole ? first + offset : end;
    while (is_whole && at < end && at - first < until)
        is_whole = pass_field(&at, end);
    Py_ssize_t place = at - first;
    PyBuffer_Release(&data);
    return is_whole ? PyLong_FromSsize_t(place) : refused();
}

typedef struct {
    const char *bytes;
    Py_ssize_t length;
} Element;

static void join_all(unsigned char *out, const Element *elements, Py_ssize_t count)
{
    for (Py_ssize_t place = 0; place < count; place++) {
        Py_ssize_t length = elements[place].length;
        for (int byte = 0; byte < 4; byte++)
            *out++ = (unsigned char)((uint32_t)length >> 8 * byte);
        memcpy(out, elements[place].bytes, (size_t)length);
        out += length;
    }
}

/* The elements of a list with their lengths; None when one of them is not `bytes`, or is too long.
 *
 * Many bytes are copied without the GIL: no other thread may change the list meanwhile.
 */
static PyObject *join_elements(PyObject *module, PyObject *list)
{
    (void)module;
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "join_elements takes a list");
        return NULL;
    }
    Py_ssize_t count = PyList_Size(list), size = 0;
    Element *elements = PyMem_Malloc((size_t)count * sizeof *elements);
    if (elements == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t place = 0; place < count; place++) {
        PyObject *item = PyList_GetItem(list, place);
        Py_ssize_t length = PyBytes_Check(item) ? PyBytes_Size(item) : -1;
        if (length < 0 || length > (Py_ssize_t)UINT32_MAX || length > PY_SSIZE_T_MAX - 4 - size) {
            PyMem_Free(elements);
            Py_RETURN_NONE;
        }
        elements[place] = (Element){PyBytes_AsString(item), length};
        size += 4 + length;
    }
    PyObject *joined = PyBytes_FromStringAndSize(NULL, size);
    if (joined != NULL) {
        unsigned char *out = (unsigned char *)PyBytes_AsString(joined);
        if (size < MIN_UNLOCKED_BYTES)
            join_all(out, elements, count);
        else {
            Py_BEGIN_ALLOW_THREADS
            join_all(out, elements, count);
            Py_END_ALLOW_THREADS
        }
    }
    PyMem_Free(elements);
    return joined;
}

static PyObject *set_powers(PyObject *module, PyObject *table)
{
    char *bytes;
    Py_ssize_t size;
    (void)module;
    if (PyBytes_AsStringAndSize(table, &bytes, &size) < 0)
        return NULL;
    if (size != sizeof powers) {
        PyErr_Format(PyExc_ValueError, "expected a table of %zd bytes, got %zd", (Py_ssize_t)sizeof powers, size);
        return NULL;
    }
    memcpy(powers, bytes, sizeof powers);
    has_powers = 1;
    Py_RETURN_NONE;
}

/* ---- Mapped files of others ------------------------------------------------------------------------------------------
 *
 * Another process can shrink a file that is mapped here. Touching the missing pages raises a SIGBUS, which would end this
 * process. Within the ranges registered by `guard`, the rest of the range becomes zeros instead, and the range is broken
 * from then on. A SIGBUS anywhere else goes to the handler that was installed before.
 */

typedef struct {
    volatile uintptr_t start, end; /* whole pages; end is 0 where there is no range */
    volatile sig_atomic_t is_broken;
} Range;

#define MAX_RANGES 4096
static Range ranges[MAX_RANGES];
static struct sigaction former_action;
static uintptr_t page_size;

static void on_bus_error(int number, siginfo_t *info, void *context)
{
    uintptr_t at = (uintptr_t)info->si_addr;
    (void)context;
    for (int place = 0; place < MAX_RANGES; place++) {
        Range *range = &ranges[place];
        uintptr_t end = range->end, page = at & ~(page_size - 1);
        if (at < range->start || at >= end)
            continue;
        if (mmap((void *)page, end - page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
            MAP_FAILED)
            break;
        range->is_broken = 1;
        return; /* the failed access is repeated */
    }
    sigaction(number, &former_action, NULL); /* the access fails again, under the former handler */
}

static PyObject *guard(PyObject *module, PyObject *mapping)
{
    Py_buffer memory;
    int place = 0;
    (void)module;
    if (page_size == 0) {
        struct sigaction action;
        memset(&action, 0, sizeof action);
        action.sa_sigaction = on_bus_error;
        action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
        sigemptyset(&action.sa_mask);
        page_size = (uintptr_t)sysconf(_SC_PAGESIZE);
        if (sigaction(SIGBUS, &action, &former_action) < 0) {
            page_size = 0;
            return PyErr_SetFromErrno(PyExc_OSError);
        }
    }
    while (place < MAX_RANGES && ranges[place].end != 0)
        place++;
    if (place == MAX_RANGES)
        Py_RETURN_NONE;
    if (PyObject_GetBuffer(mapping, &memory, PyBUF_SIMPLE) < 0)
        return NULL;
    uintptr_t start = (uintptr_t)memory.buf, size = (uintptr_t)memory.len;
    PyBuffer_Release(&memory);
    ranges[place].is_broken = 0;
    ranges[place].start = start;
    ranges[place].end = (start + size + page_size - 1) & ~(page_size - 1);
    return PyLong_FromLong(place);
}

static Range *find_range(PyObject *number)
{
    long place = PyLong_AsLong(number);
    if (place >= 0 && place < MAX_RANGES && ranges[place].end != 0)
        return &ranges[place];
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "expected a number that guard() has given");
    return NULL;
}

static PyObject *is_broken(PyObject *module, PyObject *number)
{
    Range *range = find_range(number);
    (void)module;
    return range == NULL ? NULL : PyBool_FromLong(range->is_broken);
}

static PyObject *unguard(PyObject *module, PyObject *number)
{
    Range *range = find_range(number);
    (void)module;
    if (range == NULL)
        return NULL;
    range->end = 0;
    Py_RETURN_NONE;
}

/* ---- The module --------------------------------------------------------------------------------------------------- */

#define FAST(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    FAST(read_array),
    FAST(read_call),
    FAST(join_answer),
    FAST(read_frame),
    FAST(split_elements),
    FAST(pass_fields),
    FAST(measure_json),
    FAST(cut_data),
    FAST(flat_array),
    FAST(cut_members),
    {"write_array", write_array, METH_O, NULL},
    {"join_elements", join_elements, METH_O, NULL},
    {"set_powers", set_powers, METH_O, NULL},
    {"guard", guard, METH_O, NULL},
    {"is_broken", is_broken, METH_O, NULL},
    {"unguard", unguard, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_accelerator", "See accelerator.py.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__accelerator(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddIntConstant(module, "MAX_POWER", MAX_POWER) < 0)
        Py_CLEAR(module);
#ifdef SOURCE_DIGEST
    if (module != NULL && PyModule_AddStringConstant(module, "SOURCE_DIGEST", SOURCE_DIGEST) < 0)
        Py_CLEAR(module);
#endif
    return module;
}
