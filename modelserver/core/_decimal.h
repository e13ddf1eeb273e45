/* Numbers between decimal and binary: what is proven about them, in C, without Python.
 *
 * Everything here needs the table of powers that accelerator.py makes.
 */

#ifndef MODELSERVER_DECIMAL_H
#define MODELSERVER_DECIMAL_H

#include <stdint.h>
#include <string.h>

#ifndef __SIZEOF_INT128__
#error "needs a compiler with 128-bit integers; the server runs without this module"
#endif

typedef unsigned __int128 uint128;

/* ---- From decimal ---------------------------------------------------------------------------------------------------
 *
 * A number is read as w * 10^q, with w of 64 bits, and rounded to a double as Eisel and Lemire do (D. Lemire, "Number
 * Parsing at a Gigabyte per Second", 2021): one product of w with the first 128 bits of 10^q decides, for any w, as
 * N. Mushtak and D. Lemire proved ("Fast Number Parsing Without Fallback", 2023). Within MAX_POWER, results are
 * normal numbers, so there is neither overflow nor underflow.
 */

#define MAX_POWER 64
#define NUM_POWERS (2 * MAX_POWER + 1)

/* The first 128 bits of 10^q for q from -MAX_POWER on, the higher half first; made by accelerator.py. */
static uint64_t powers[NUM_POWERS][2];
static int has_powers = 0;

/* Powers of ten that doubles hold exactly. */
static const double exact_powers[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                                      1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
#define MAX_EXACT_POWER 22
#define MAX_EXACT_INTEGER ((uint64_t)1 << 53)

/* w * 10^q to the nearest double, ties to even; w is not 0, and q within MAX_POWER. */
static double rounded(uint64_t w, int q)
{
    const uint64_t *power = powers[q + MAX_POWER];
    int num_leading = __builtin_clzll(w);
    w <<= num_leading;
    uint128 product = (uint128)w * power[0];
    uint64_t high = (uint64_t)(product >> 64), low = (uint64_t)product;
    if ((high & 0x1FF) == 0x1FF) {
        /* The bits that decide may still change: the power's lower half too. */
        uint64_t more = (uint64_t)(((uint128)w * power[1]) >> 64);
        low += more;
        high += low < more;
    }
    /* One bit more than the 53 of a double, to round by. */
    int upper = (int)(high >> 63), shift = upper + 9;
    uint64_t mantissa = high >> shift;
    if (low <= 1 && q >= -4 && q <= 23 && (mantissa & 3) == 1 && mantissa << shift == high)
        mantissa &= ~(uint64_t)1; /* just between two doubles, and the lower one is even */
    mantissa = (mantissa + (mantissa & 1)) >> 1;
    /* 217706 / 2^16 is the binary logarithm of 10; the shift is meant to round down. */
    int exponent = ((217706 * q) >> 16) + 63 + upper - num_leading + 1023;
    if (mantissa == MAX_EXACT_INTEGER) {
        mantissa >>= 1;
        exponent++;
    }
    uint64_t bits = (mantissa & (((uint64_t)1 << 52) - 1)) | (uint64_t)exponent << 52;
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* ---- To decimal -----------------------------------------------------------------------------------------------------
 *
 * A float is written with the fewest digits that are read as that float, and of those with the nearest: as R. Giulietti
 * finds them ("The Schubfach way to render doubles", 2020). What rounds to a float lies between two bounds; scaled by
 * a power of ten, so that the bounds are 2 to 20 apart, the decimal is the one multiple of ten or the integer between
 * them. Whether a product is exact is kept in its lowest bit.
 */

static const char two_digits[] = "00010203040506070809101112131415161718192021222324252627282930313233343536373839"
                                 "40414243444546474849505152535455565758596061626364656667686970717273747576777879"
                                 "8081828384858687888990919293949596979899";

/* The digits of a number, at `end` from behind; where they begin. */
static inline char *digits_before(char *end, uint64_t value)
{
    while (value >= 100) {
        end -= 2;
        memcpy(end, two_digits + 2 * (value % 100), 2);
        value /= 100;
    }
    if (value < 10) {
        *--end = (char)('0' + value);
        return end;
    }
    end -= 2;
    memcpy(end, two_digits + 2 * value, 2);
    return end;
}

static inline char *put_integer(char *out, uint64_t value)
{
    char digits[20], *end = digits + sizeof digits, *start = digits_before(end, value);
    size_t size = (size_t)(end - start);
    memcpy(out, start, size);
    return out + size;
}

/* The upper part of a product with a power that was rounded up; the lowest bit says that something is below it. */
static inline uint32_t scaled(uint64_t power, uint64_t value)
{
    uint128 product = (uint128)power * value;
    return (uint32_t)(product >> 64) | ((uint32_t)(product >> 32) > 1);
}

/* The shortest decimal *w * 10^q of a float's exponent and mantissa; not of zero. Returns q. */
static int shortest(uint32_t exponent, uint32_t mantissa, uint32_t *w)
{
    uint32_t c = exponent ? mantissa | 1u << 23 : mantissa;
    int e = exponent ? (int)exponent - 150 : -149;
    if (e <= 0 && e > -24 && (c & ((1u << -e) - 1)) == 0) {
        *w = c >> -e; /* an integer that it holds exactly */
        return 0;
    }
    /* The float below is half as far away, where the mantissa begins anew. */
    uint32_t is_closer_below = mantissa == 0 && exponent > 1, is_odd = c & 1;
    /* Binary logarithms of powers of ten, and the other way round, by products. */
    int q = (e * 1262611 - (is_closer_below ? 524031 : 0)) >> 22;
    int shift = e + ((-q * 1741647) >> 19) + 1;
    /* 10^-q, rounded up where 64 bits do not hold it. */
    uint64_t power = powers[MAX_POWER - q][0] + (q > 0 || q < -27);
    uint32_t lower = scaled(power, (uint64_t)(4 * c - 2 + is_closer_below) << shift) + is_odd;
    uint32_t value = scaled(power, (uint64_t)(4 * c) << shift);
    uint32_t upper = scaled(power, (uint64_t)(4 * c + 2) << shift) - is_odd;
    uint32_t whole = value / 4, tens = whole / 10;
    if (tens > 0) {
        int is_lower_in = lower <= 40 * tens, is_upper_in = 40 * tens + 40 <= upper;
        if (is_lower_in != is_upper_in) {
            *w = tens + (uint32_t)is_upper_in;
            return q + 1;
        }
    }
    int is_lower_in = lower <= 4 * whole, is_upper_in = 4 * whole + 4 <= upper;
    if (is_lower_in != is_upper_in)
        *w = whole + (uint32_t)is_upper_in;
    else
        *w = whole + (value > 4 * whole + 2 || (value == 4 * whole + 2 && (whole & 1)));
    return q;
}

/* What is not finite is a bare word, as in Python. Written as orjson does: with a point from 1e-6 to below 1e13, with an exponent else. */
static char *put_float(char *out, uint32_t bits)
{
    uint32_t exponent = bits >> 23 & 0xFF, mantissa = bits & 0x7FFFFF, w;
    if (exponent == 0xFF && mantissa != 0) {
        memcpy(out, "NaN", 3);
        return out + 3;
    }
    if (bits >> 31)
        *out++ = '-';
    if (exponent == 0xFF) {
        memcpy(out, "Infinity", 8);
        return out + 8;
    }
    if (exponent == 0 && mantissa == 0) {
        memcpy(out, "0.0", 3);
        return out + 3;
    }
    int q = shortest(exponent, mantissa, &w);
    while (w % 10 == 0) {
        w /= 10;
        q++;
    }
    char digits[10], *end = digits + sizeof digits, *start = digits_before(end, w);
    int count = (int)(end - start), point = count + q; /* as many digits stand before the point */
    if (point > -6 && point <= 0) {
        memcpy(out, "0.00000", 7);
        out += 2 - point;
        memcpy(out, start, (size_t)count);
        return out + count;
    }
    if (point > 0 && point <= 13) {
        int before = point < count ? point : count;
        memcpy(out, start, (size_t)before);
        memset(out + before, '0', (size_t)(point - before));
        out += point;
        *out++ = '.';
        if (before == count) {
            *out++ = '0';
            return out;
        }
        memcpy(out, start + before, (size_t)(count - before));
        return out + count - before;
    }
    *out++ = *start++;
    if (count > 1) {
        *out++ = '.';
        memcpy(out, start, (size_t)(count - 1));
        out += count - 1;
    }
    *out++ = 'e';
    *out++ = point > 0 ? '+' : '-';
    return put_integer(out, (uint64_t)(point > 0 ? point - 1 : 1 - point));
}

static inline char *put_signed(char *out, int64_t value)
{
    if (value >= 0)
        return put_integer(out, (uint64_t)value);
    *out++ = '-';
    return put_integer(out, (uint64_t)0 - (uint64_t)value);
}

#endif
