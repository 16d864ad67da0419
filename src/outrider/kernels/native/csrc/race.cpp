// Races, as core/rng.py defines them: each token id has an exponential number, a pure function of
// (seed, sample, position, id), and the token wins whose number over its weight is least.
//
// Numbers have the bits of core/rng.py: integers, and a logarithm made of sums, products and one
// division. Ids without weight get none, so what filters leave is quickly drawn from.
#include <limits>

#include "philox.h"
#include "sampling.h"
#include "vectors.h"

// Products and sums are rounded one by one, as in Python: no multiply-add fuses them.
#ifdef __clang__
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

namespace outrider {

namespace {

constexpr int WIDTH = 8;
typedef uint64_t Words __attribute__((vector_size(8 * WIDTH)));
typedef int64_t Signed __attribute__((vector_size(8 * WIDTH)));
typedef double Doubles __attribute__((vector_size(8 * WIDTH)));

constexpr double SQRT_HALF = 0.70710678118654757, LN_2 = 0.69314718055994529;
constexpr double INF = std::numeric_limits<double>::infinity();
constexpr int64_t SPAN = 4096;
constexpr uint32_t RACE = 4;  // as Role in core/rng.py

// Of words below 2^32.
inline Words product(Words a, uint64_t b) {
#if defined(__AVX512F__)
    return cast<Words>(_mm512_mul_epu32(cast<__m512i>(a), _mm512_set1_epi64(b)));
#else
    return a * b;
#endif
}

// Of whole numbers below 2^52.
inline Doubles doubles(Words words) {
    return cast<Doubles>(words | 0x4330000000000000u) - 0x1p52;
}

inline Doubles choose(Signed condition, Doubles yes, Doubles no) { return condition ? yes : no; }

// -log(x) for x in (0, 1): `minus_log` of core/philox.py.
inline Doubles minus_log(Doubles x) {
    const Words bits = cast<Words>(x);
    const Doubles exponent = doubles(bits >> 52) - 1022.0;
    Doubles mantissa = cast<Doubles>((bits & 0x000fffffffffffffu) | 0x3fe0000000000000u);
    const Signed is_low = mantissa < SQRT_HALF;
    mantissa = choose(is_low, 2 * mantissa, mantissa);
    const Doubles s = (mantissa - 1) / (mantissa + 1), square = s * s;
    Doubles series = {};
    for (int n = 11; n >= 0; --n) series = series * square + 1.0 / (2 * n + 1);
    const Doubles whole = choose(is_low, 1 - exponent, -exponent);
    return whole * LN_2 - 2 * s * series;
}

// The exponential numbers of ids in a row.
inline Doubles numbers(uint64_t seed, uint32_t position, uint32_t sample, Words ids) {
    Words c0 = ids, c1 = Words{} + position;
    philox_block<Words>(seed, c0, c1, Words{} + sample, Words{} + RACE, product);
    return minus_log((doubles(c0 << 20 | c1 >> 12) + 0.5) * 0x1p-52);
}

struct Heat {
    double time = INF, total = 0;
    int64_t winner = -1;

    void meet(double other, int64_t index) {
        if (winner < 0 || other < time || (other == time && index < winner))
            time = other, winner = index;
    }
};

Heat heat(const float* weights, int64_t first, int64_t last, uint64_t seed, uint32_t position,
          uint32_t sample) {
    Heat found;
    Doubles best = Doubles{} + INF, sums = {};
    Signed winners = Signed{} - 1;
    for (int64_t start = first; start < last; start += WIDTH) {
        float some[WIDTH] = {};
        std::memcpy(some, weights + start, sizeof(float) * std::min<int64_t>(WIDTH, last - start));
        Doubles weight;
        Words ids;
        for (int i = 0; i < WIDTH; ++i) weight[i] = some[i], ids[i] = start + i;
        sums += weight;
        const Signed takes_part = weight > 0;
        bool any = false;
        for (int i = 0; i < WIDTH; ++i) any |= some[i] > 0;
        if (!any) continue;
        const Doubles times = numbers(seed, position, sample, ids) / weight;
        const Signed wins = takes_part & (times < best);
        best = choose(wins, times, best);
        winners = wins ? cast<Signed>(ids) : winners;
    }
    for (int i = 0; i < WIDTH; ++i) {
        found.total += sums[i];
        if (winners[i] >= 0) found.meet(best[i], winners[i]);
    }
    return found;
}

}  // namespace

}  // namespace outrider

using namespace outrider;

// The winner at `position`; -1 if the weights are no distribution.
extern "C" int64_t outrider_race(Team* team, const float* weights, uint64_t seed, uint32_t position,
                                 uint32_t sample, int64_t size) {
    team = &team->here();
    std::lock_guard<std::mutex> lock(team->entry());
    const int num_spans = static_cast<int>((size + SPAN - 1) / SPAN);
    auto* heats = static_cast<Heat*>(team->shared().take(sizeof(Heat) * num_spans));
    team->run(num_spans, 1, [&](int begin, int end, int) {
        for (int64_t span = begin; span < end; ++span)
            heats[span] = heat(weights, span * SPAN, std::min(size, (span + 1) * SPAN), seed,
                               position, sample);
    });
    Heat all;
    for (int span = 0; span < num_spans; ++span) {
        all.total += heats[span].total;
        if (heats[span].winner >= 0) all.meet(heats[span].time, heats[span].winner);
    }
    return all.total > 0 && all.total < INF ? all.winner : -1;
}
