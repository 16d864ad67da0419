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

// Sums of products by weights of few bits. Where an instruction adds products of bytes in 16 bits,
// those of several steps are added so; `widened` makes 32 bits of them. Elsewhere sums are of 32 bits
// from the beginning.
#if defined(__AVX512VNNI__) || defined(OUTRIDER_PLAIN_DOTS)
constexpr bool HAS_NARROW = false;
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
constexpr bool HAS_NARROW = false;
#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
constexpr bool HAS_NARROW = true;
#else
constexpr bool HAS_NARROW = false;
#endif

constexpr bool is_narrow(int bits) { return HAS_NARROW && bits <= 6; }

// Steps of eight inputs, at most four, whose sums fit: of 15, 31 or 63 times 127, four a lane of 16
// bits.
constexpr int narrow_eights(int bits) {
    return !is_narrow(bits) || bits <= 4 ? 4 : bits == 5 ? 2 : 1;
}

// Compilers would take a chain of additions apart and keep all products until its end.
#if defined(__AVX512BW__)
inline BitVec add_narrow(BitVec sums, BitVec weights, BitVec inputs) {
    const __m512i products = _mm512_maddubs_epi16(cast<__m512i>(weights), cast<__m512i>(inputs));
    __m512i sum = _mm512_add_epi16(cast<__m512i>(sums), products);
    asm("" : "+v"(sum));
    return cast<BitVec>(sum);
}
inline BitVec sum_pairs(BitVec sums, BitVec factors) {
    return cast<BitVec>(_mm512_madd_epi16(cast<__m512i>(sums), cast<__m512i>(factors)));
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
inline BitVec add_narrow(BitVec sums, BitVec weights, BitVec inputs) {
    const __m256i products = _mm256_maddubs_epi16(cast<__m256i>(weights), cast<__m256i>(inputs));
    __m256i sum = _mm256_add_epi16(cast<__m256i>(sums), products);
    asm("" : "+x"(sum));
    return cast<BitVec>(sum);
}
inline BitVec sum_pairs(BitVec sums, BitVec factors) {
    return cast<BitVec>(_mm256_madd_epi16(cast<__m256i>(sums), cast<__m256i>(factors)));
}
#else
inline BitVec add_narrow(BitVec sums, BitVec, BitVec) { return sums; }
inline BitVec sum_pairs(BitVec sums, BitVec) { return sums; }
#endif

// Signed weights of eight bits: their magnitudes times inputs with the weights' signs stay within 16
// bits, which takes fewer steps than `add_dots` where HAS_SIGNED.
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__) && \
    !defined(OUTRIDER_PLAIN_DOTS)
constexpr bool HAS_SIGNED = true;
inline BitVec magnitudes(BitVec weights) {
    return cast<BitVec>(_mm256_abs_epi8(cast<__m256i>(weights)));
}
inline BitVec add_signed(BitVec sums, BitVec weights, BitVec sizes, BitVec inputs) {
    const __m256i turned = _mm256_sign_epi8(cast<__m256i>(inputs), cast<__m256i>(weights));
    const __m256i products = _mm256_maddubs_epi16(cast<__m256i>(sizes), turned);
    return sums + cast<BitVec>(_mm256_madd_epi16(products, _mm256_set1_epi16(1)));
}
#else
constexpr bool HAS_SIGNED = false;
inline BitVec magnitudes(BitVec weights) { return weights; }
inline BitVec add_signed(BitVec sums, BitVec, BitVec, BitVec) { return sums; }
#endif
constexpr uint32_t SIGN_BITS = 0x80808080u;

template <int BITS>
inline BitVec add_products(BitVec sums, BitVec weights, BitVec inputs) {
    if constexpr (is_narrow(BITS)) return add_narrow(sums, weights, inputs);
    return add_dots(sums, weights, inputs);
}

template <int BITS>
inline BitVec widened(BitVec sums) {
    if constexpr (is_narrow(BITS)) return sum_pairs(sums, BitVec{} + 0x10001u);
    return sums;
}

// Times integers of at most 16 bits.
template <int BITS>
inline BitVec scaled(BitVec sums, IntVec factors) {
    if constexpr (is_narrow(BITS))
        return sum_pairs(sums, (cast<BitVec>(factors) & 0xffffu) | (cast<BitVec>(factors) << 16));
    return sums * cast<BitVec>(factors);
}

}  // namespace outrider
