// Blocks of keys and values of bfloat16, packed as steps of tiles (tiles_blocks.h), and weights.
#pragma once

#include "tiles_blocks.h"

#if defined(OUTRIDER_HAS_TILES)

#if defined(__AVX512BW__)
#include <immintrin.h>
#endif

namespace outrider {

constexpr int BLOCK_KEYS = TILE_BLOCK;

// The rows of a block; what no token sees is a row of zeros.
struct BlockRows {
    const BFloat16* at[BLOCK_KEYS];
};

// Asks memory for a cache line of each row, from element `first` on.
inline void ask_rows(const BFloat16* const* rows, int count, int first) {
    for (int i = 0; i < count; ++i) ask_memory(rows[i] + first);
}

// 16 rows of 16 lanes of 32 bits, from byte `first` on, to columns.
template <class Row>
inline void transpose(const Row* const* rows, int first, uint8_t* to, int64_t stride) {
    const auto at = [&](int i) { return reinterpret_cast<const uint8_t*>(rows[i]) + first; };
#if defined(__AVX512BW__)
    __m512i r[16], t[16];
    for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(at(i));
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    // r[i + j] has in its quarter l the column 4 l + j of rows i to i + 3.
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int j = 0; j < 4; ++j) {
        const __m512i a = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
        const __m512i b = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
        const __m512i c = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
        const __m512i d = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
        _mm512_store_si512(to + j * stride, _mm512_shuffle_i32x4(a, b, 0x88));
        _mm512_store_si512(to + (4 + j) * stride, _mm512_shuffle_i32x4(c, d, 0x88));
        _mm512_store_si512(to + (8 + j) * stride, _mm512_shuffle_i32x4(a, b, 0xdd));
        _mm512_store_si512(to + (12 + j) * stride, _mm512_shuffle_i32x4(c, d, 0xdd));
    }
#else
    for (int i = 0; i < 16; ++i)
        for (int column = 0; column < 16; ++column)
            std::memcpy(to + column * stride + 4 * i, at(i) + 4 * column, 4);
#endif
}

// A step for each 32 elements of a key: pairs of them by 32 keys.
inline void pack_keys(const BlockRows& rows, int dim, uint8_t* to) {
    for (int at = 0; at < dim * 2; at += TILE_BYTES, to += STEP_BYTES)
        for (int half = 0; half < 2; ++half)
            transpose(rows.at + half * TILE_COLUMNS, at, to + half * TILE_BYTES, STEP_STRIDE);
}

// A step of values: pairs of keys by 32 elements, from element `first` on, in the order of
// `TileItem::put`; memory is asked for the same elements of `next`. True if all are finite.
inline bool pack_values(const BlockRows& rows, const BlockRows& next, int first, uint8_t* to) {
#if defined(__AVX512BW__)
    const __m512i size = _mm512_set1_epi16(0x7fff), infinite = _mm512_set1_epi16(0x7f80);
    __m512i most = _mm512_setzero_si512();
    for (int i = 0; i < BLOCK_KEYS; i += 2, to += STEP_STRIDE) {
        ask_rows(next.at + i, 2, first);
        const __m512i even = _mm512_loadu_si512(rows.at[i] + first);
        const __m512i odd = _mm512_loadu_si512(rows.at[i + 1] + first);
        _mm512_store_si512(to, _mm512_unpacklo_epi16(even, odd));
        _mm512_store_si512(to + TILE_BYTES, _mm512_unpackhi_epi16(even, odd));
        most = _mm512_max_epu16(most, _mm512_and_si512(even, size));
        most = _mm512_max_epu16(most, _mm512_and_si512(odd, size));
    }
    return _mm512_cmpge_epu16_mask(most, infinite) == 0;
#else
    bool finite = true;
    ask_rows(next.at, BLOCK_KEYS, first);
    for (int i = 0; i < BLOCK_KEYS; ++i)
        for (int d = 0; d < TILE_BLOCK; ++d) {
            const BFloat16 value = rows.at[i][first + d];
            const int column = d % 8 / 4 * TILE_COLUMNS + d / 8 * 4 + d % 4;
            std::memcpy(to + i / 2 * STEP_STRIDE + 4 * column + i % 2 * 2, &value, sizeof(value));
            finite &= (value.bits & 0x7f80) != 0x7f80;
        }
    return finite;
#endif
}

inline void store_rounded(BFloat16* to, Vec low, Vec high) {
#if defined(__AVX512BF16__) && defined(__AVX512F__)
    const auto both = _mm512_cvtne2ps_pbh(cast<__m512>(high), cast<__m512>(low));
    std::memcpy(to, &both, sizeof(both));
#else
    store_some(to, low, LANES), store_some(to + LANES, high, LANES);
#endif
}

// e^x to about 1e-5 relative, for x of 0 and less: weights are rounded to bfloat16. Exactly 0 below
// -87.3; NaN stays NaN.
inline Vec weight_of(Vec x) {
    constexpr float TO_INTEGER = 12582912.0f;  // as in `exp`
    const Vec log2_e = splat(1.44269504f);
    const IntVec is_tiny = x < -87.3f;
    const Vec shifted = fused(x, log2_e, splat(TO_INTEGER));
    const Vec r = fused(x, log2_e, TO_INTEGER - shifted);
    Vec p = splat(9.582852945e-3f);
    p = fused(p, r, splat(5.590642616e-2f));
    p = fused(p, r, splat(2.402409911e-1f));
    p = fused(p, r, splat(6.931241751e-1f));
    p = fused(p, r, splat(1.0f));
    const Vec power = cast<Vec>(cast<BitVec>(p) + (cast<BitVec>(shifted) << 23));
    return is_tiny ? Vec{} : power;
}

}  // namespace outrider

#endif
