// Softmax weights of rows of scores, a chunk of keys at a time.
//
// A row's weight for a key is 2^(score log2(e) - base), where the base is the largest score so far in
// these units: the weight of the best key is 1. What was summed before is scaled when the base grows.
// Chunks lie at absolute positions, so bases and weights of a row depend on that row alone. Sums are of
// rounded weights, by which values are multiplied.
#pragma once

#include <cfloat>
#include <cmath>
#include <limits>

#include "attention_pack.h"

#if defined(OUTRIDER_HAS_TILES)

namespace outrider {

// Scores and weights of two tiles of rows stay in the first-level cache.
constexpr int CHUNK_BLOCKS = 16, CHUNK = CHUNK_BLOCKS * BLOCK_KEYS;
// Rows lie an odd number of cache lines apart, as in tiles_linear.cpp.
constexpr int SCORE_STRIDE = sizeof(float) * CHUNK + CACHE_LINE;
constexpr int WEIGHT_STRIDE = sizeof(BFloat16) * CHUNK + CACHE_LINE;

constexpr float LOG2_E = 1.44269504f, LN_2 = 0.69314718f;
constexpr float TO_INTEGER = 12582912.0f;  // as in `exp`
// Of larger ones products and differences are rounded apart, so that no weight is above 1.
constexpr float MAX_BASE = 1 << 21;

// Stores two vectors as bfloat16 and adds what was stored to `sums`, if there are any.
inline void store_rounded(BFloat16* to, Vec low, Vec high, Vec* sums = nullptr) {
#if defined(__AVX512BF16__) && defined(__AVX512F__) && !defined(OUTRIDER_SOFTWARE_PAIRS)
    const auto both = _mm512_cvtne2ps_pbh(cast<__m512>(high), cast<__m512>(low));
    std::memcpy(to, &both, sizeof(both));
    if (sums == nullptr) return;
    const auto ones = cast<__m512bh>(_mm512_set1_epi16(0x3f80));
    *sums = cast<Vec>(_mm512_dpbf16_ps(cast<__m512>(*sums), both, ones));
#else
    low = round_to_bfloat16(low), high = round_to_bfloat16(high);
    store_some(to, low, LANES), store_some(to + LANES, high, LANES);
    if (sums != nullptr) *sums += low + high;
#endif
}

// 2^(x factor + shift) to about 8e-5 relative, a 25th of what rounding to bfloat16 changes. -inf weighs
// nothing; NaN stays NaN.
#if defined(__AVX512DQ__) && !defined(OUTRIDER_PLAIN_DOTS)

inline Vec weight_of(Vec x, Vec factor, Vec shift) {
    constexpr int DOWN = 9;  // rounds to the integer below, without exceptions
    const __m512 power = cast<__m512>(fused(x, factor, shift));
    const Vec rest = cast<Vec>(_mm512_reduce_ps(power, DOWN));
    Vec p = splat(7.8024523e-02f);
    p = fused(p, rest, splat(2.2606716e-01f));
    p = fused(p, rest, splat(6.9583354e-01f));
    p = fused(p, rest, splat(9.9992522e-01f));
    return cast<Vec>(_mm512_scalef_ps(cast<__m512>(p), power));
}

#else

inline Vec weight_of(Vec x, Vec factor, Vec shift) {
    const Vec power = fused(x, factor, shift);
    const Vec shifted = power + TO_INTEGER;
    const Vec rest = power - (shifted - TO_INTEGER);
    Vec p = splat(5.517167e-2f);
    p = fused(p, rest, splat(2.4261112e-1f));
    p = fused(p, rest, splat(6.9326099e-1f));
    p = fused(p, rest, splat(9.9992807e-1f));
    const Vec weight = cast<Vec>(cast<BitVec>(p) + (cast<BitVec>(shifted) << 23));
    return power < -125.0f ? Vec{} : weight;
}

#endif

// two(...) over the lanes of each of `COUNT` vectors, by one tree; vector i's is lane i of the result.
template <int COUNT, class Two>
inline Vec reduced(Vec* vecs, const Two& two) {
    for (int lanes = LANES, count = COUNT; lanes > 1; lanes /= 2) {
        const int other = count > 1;  // the last vector is paired with itself
        count = (count + 1) / 2;
        for (int i = 0; i < count; ++i) {
            const Vec a = vecs[i + i * other], b = vecs[i + i * other + other];
            vecs[i] = two(even_lanes(a, b), odd_lanes(a, b));
        }
    }
    return vecs[0];
}

// The same of any number: vector i's is to[i]. It writes whole vectors, and overwrites `vecs`.
template <class Two>
inline void reduce_lanes(Vec* vecs, int num, float* to, const Two& two) {
    for (int first = 0; first < num; first += LANES, vecs += LANES) {
        const bool are_few = num - first <= 4;
        store(to + first, are_few ? reduced<4>(vecs, two) : reduced<LANES>(vecs, two));
    }
}

constexpr float NONE = -std::numeric_limits<float>::infinity();

// Makes the scores of a block that are not in `seen` -inf.
inline void hide_unseen(float* scores, int begin, Range seen) {
    IntVec at = {};
    for (int lane = 0; lane < LANES; ++lane) at[lane] = begin + lane;
    for (int t = begin; t < begin + BLOCK_KEYS; t += LANES, at += LANES) {
        const IntVec is_seen = (at >= seen.first) & (at < seen.end);
        store(scores + t, is_seen ? load(scores + t) : splat(NONE));
    }
}

// The largest of scores in `seen`, in each lane; in its blocks what is not seen becomes -inf.
inline Vec largest_seen(float* scores, Range seen, float scale, float cap) {
    const int begin = seen.begin(), stop = seen.stop();
    if (cap > 0.0f)
        for (int t = begin; t < stop; t += LANES)
            store(scores + t, capped(load(scores + t) * scale, cap));
    if (begin < seen.first) hide_unseen(scores, begin, seen);
    if (seen.end < stop) hide_unseen(scores, stop - BLOCK_KEYS, seen);
    Vec most = splat(NONE), others = most;
    for (int t = begin; t < stop; t += 2 * LANES) {
        most = larger(load(scores + t), most);
        others = larger(load(scores + t + LANES), others);
    }
    return larger(most, others);
}

// Rounded weights of the blocks of `seen`, whose sums in each lane are added to `sums`.
__attribute__((noinline)) inline void soften_rounded(float* scores, Range seen, float factor,
                                                     float base, BFloat16* weights, Vec* sums) {
    const int begin = seen.begin(), stop = seen.stop();
    if (!(std::abs(base) < MAX_BASE)) {
        for (int t = begin; t < stop; t += LANES) {
            const Vec x = apart(load(scores + t) * factor) - base;
            store(scores + t, x < -1000.0f ? splat(-1000.0f) : x);
        }
        factor = 1.0f, base = 0.0f;
    }
    const Vec times = splat(factor), shift = splat(-base);
    Vec found = {};
    for (int t = begin; t < stop; t += 2 * LANES) {
        const Vec low = weight_of(load(scores + t), times, shift);
        const Vec high = weight_of(load(scores + t + LANES), times, shift);
        store_rounded(weights + t, low, high, &found);
    }
    *sums += found;
}

// The softmax of up to two tiles of rows over the keys of a span.
class Softmax {
  public:
    static constexpr int MAX_ROWS = 2 * TILE_ROWS;

    // A row that sees `keys` of the span. A sink counts as a key without a value.
    void begin(int row, Range keys, const float* sink) {
        seen_[row] = keys;
        bases_[row] = -FLT_MAX, factors_[row] = 1.0f;
        parts_[row] = Vec{};
        if (sink == nullptr) return;
        bases_[row] = larger(splat(*sink * LOG2_E), splat(-FLT_MAX))[0];
        parts_[row][0] = 1.0f;
    }

    // The largest scores so far, with those of a chunk; `factor(row)` is what earlier sums are then worth.
    __attribute__((noinline)) void follow(uint8_t* scores, int num_rows, int chunk, const Look& look) {
        Vec most[MAX_ROWS];
        alignas(CACHE_LINE) float largest[MAX_ROWS];
        for (int row = 0; row < num_rows; ++row)
            most[row] = largest_seen(reinterpret_cast<float*>(scores + row * SCORE_STRIDE),
                                     in_chunk(row, chunk), look.scale, look.cap);
        for (int row = num_rows; row % LANES != 0; ++row) most[row] = Vec{};
        reduce_lanes(most, num_rows, largest, [](Vec a, Vec b) { return larger(a, b); });
        factor_ = look.cap > 0.0f ? LOG2_E : look.scale * LOG2_E;
        for (int row = 0; row < num_rows; row += LANES) {
            const Vec found = apart(load(largest + row) * factor_), before = load(bases_ + row);
            const Vec after = larger(found, before);
            store(bases_ + row, after);
            store(factors_ + row, after > before ? exp((before - after) * LN_2) : splat(1.0f));
        }
        for (int row = 0; row < num_rows; ++row) parts_[row] *= factors_[row];
    }

    float factor(int row) const { return factors_[row]; }
    Range in_chunk(int row, int chunk) const { return seen_[row].within(chunk * CHUNK, CHUNK); }

    void soften(uint8_t* scores, int row, int chunk, BFloat16* weights) {
        soften_rounded(reinterpret_cast<float*>(scores + row * SCORE_STRIDE),
                       in_chunk(row, chunk), factor_, bases_[row], weights, &parts_[row]);
    }

    // Sums of weights, after the last chunk.
    void end(int num_rows) {
        reduce_lanes(parts_, num_rows, sums_, [](Vec a, Vec b) { return a + b; });
    }
    Attended attended(int row, float* mixed) const {
        return {mixed, bases_[row] * LN_2, sums_[row]};
    }

  private:
    alignas(CACHE_LINE) Vec parts_[MAX_ROWS] = {};
    alignas(CACHE_LINE) float bases_[MAX_ROWS] = {}, factors_[MAX_ROWS] = {}, sums_[MAX_ROWS] = {};
    Range seen_[MAX_ROWS];
    float factor_ = 0.0f;
};

}  // namespace outrider

#endif
