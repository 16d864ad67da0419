// Dot products of bytes: four inputs a 32-bit lane, unsigned weights by signed activations.
//
// Every version gives the exact sum modulo 2^32, so CPUs differ in speed alone. OUTRIDER_PLAIN_DOTS
// asks for the version that every CPU has.
#pragma once

#include "vectors.h"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace outrider {

constexpr int DOT_INPUTS = 4;

inline BitVec load_bytes(const uint8_t* from) {
    BitVec bytes;
    std::memcpy(&bytes, from, sizeof(bytes));
    return bytes;
}

// The same four inputs in every lane.
inline BitVec splat_inputs(const int8_t* from) {
    uint32_t inputs;
    std::memcpy(&inputs, from, sizeof(inputs));
    return inputs - BitVec{};
}

#if defined(__AVX512VNNI__) && !defined(OUTRIDER_PLAIN_DOTS)

inline BitVec add_dots(BitVec sums, BitVec weights, BitVec inputs) {
    return cast<BitVec>(_mm512_dpbusd_epi32(cast<__m512i>(sums), cast<__m512i>(weights),
                                            cast<__m512i>(inputs)));
}

#elif defined(__AVXVNNI__) && !defined(__AVX512F__) && !defined(OUTRIDER_PLAIN_DOTS)

inline BitVec add_dots(BitVec sums, BitVec weights, BitVec inputs) {
    return cast<BitVec>(_mm256_dpbusd_avx_epi32(cast<__m256i>(sums), cast<__m256i>(weights),
                                                cast<__m256i>(inputs)));
}

#elif defined(__AVX512BW__) && !defined(OUTRIDER_PLAIN_DOTS)

// Pairs of 16-bit products: the instruction that multiplies bytes would saturate.
inline BitVec add_dots(BitVec sums, BitVec weights, BitVec inputs) {
    const __m512i w = cast<__m512i>(weights), x = cast<__m512i>(inputs);
    const __m512i even = _mm512_madd_epi16(_mm512_and_si512(w, _mm512_set1_epi16(255)),
                                           _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8));
    const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(w, 8), _mm512_srai_epi16(x, 8));
    return sums + cast<BitVec>(even) + cast<BitVec>(odd);
}

#elif defined(__AVX2__) && !defined(__AVX512F__) && !defined(OUTRIDER_PLAIN_DOTS)

inline BitVec add_dots(BitVec sums, BitVec weights, BitVec inputs) {
    const __m256i w = cast<__m256i>(weights), x = cast<__m256i>(inputs);
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(255)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(x, 8));
    return sums + cast<BitVec>(even) + cast<BitVec>(odd);
}

#else

inline BitVec add_dots(BitVec sums, BitVec weights, BitVec inputs) {
    for (int byte = 0; byte < DOT_INPUTS; ++byte) {
        const IntVec signed_input = cast<IntVec>(inputs << (24 - 8 * byte)) >> 24;
        sums += ((weights >> (8 * byte)) & 255u) * cast<BitVec>(signed_input);
    }
    return sums;
}

#endif

}  // namespace outrider
