/* Instructions of AVX-512 and VNNI for a processor that has AVX2 alone: SIMDe's, and halves of AVX2 where it has none. */

#include <immintrin.h>
#include <simde/x86/avx512.h>

#define TARGET_OF(instructions)
#define IN_THIS_ORDER(vector) (void)(vector) /* no register holds 64 bytes */

#define _mm512_maddubs_epi16(a, b) simde_mm512_maddubs_epi16(a, b)
#define _mm512_madd_epi16(a, b) simde_mm512_madd_epi16(a, b)
#define _mm512_add_epi16(a, b) simde_mm512_add_epi16(a, b)
#define _mm512_set1_epi16(value) simde_mm512_set1_epi16(value)
#define _mm512_dpbusd_epi32(sums, a, b) simde_mm512_dpbusd_epi32(sums, a, b)
#define _mm256_dpbusd_avx_epi32(sums, a, b) simde_mm256_dpbusd_epi32(sums, a, b)
#define _mm512_shuffle_epi8(table, index) simde_mm512_shuffle_epi8(table, index)
#define _mm512_abs_epi8(codes) simde_mm512_abs_epi8(codes)
#define _mm512_mask_sub_epi8(from, mask, a, b) simde_mm512_mask_sub_epi8(from, mask, a, b)
#define _mm512_movepi8_mask(codes) simde_mm512_movepi8_mask(codes)
#define _mm512_setzero_si512() simde_mm512_setzero_si512()
#define _mm512_fmadd_ps(a, b, c) simde_mm512_fmadd_ps(a, b, c)

#define BOTH_HALVES(type, widen, low, high) \
    ({ \
        union { \
            __m256i halves[2]; \
            type whole; \
        } both = {{(__m256i)widen(low), (__m256i)widen(high)}}; \
        both.whole; \
    })
#define LOW(halves) _mm256_castsi256_si128(halves)
#define HIGH(halves) _mm256_extracti128_si256(halves, 1)
#define _mm512_cvtph_ps(halves) BOTH_HALVES(__m512, _mm256_cvtph_ps, LOW(halves), HIGH(halves))
#define _mm512_cvtepu8_epi32(codes) BOTH_HALVES(__m512i, _mm256_cvtepu8_epi32, codes, _mm_srli_si128(codes, 8))
#define _mm512_cvtepi8_epi32(codes) BOTH_HALVES(__m512i, _mm256_cvtepi8_epi32, codes, _mm_srli_si128(codes, 8))
