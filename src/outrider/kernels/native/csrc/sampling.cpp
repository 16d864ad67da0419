// From logits to a drawn token: softmax, the inverse CDF, and what a draft leaves of a distribution.
//
// Every sum is made of the sums of fixed blocks, which are added in order by the caller. So threads
// may split a row, and still its bits depend neither on them nor on the rows beside it.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>

#include "team.h"
#include "vectors.h"

namespace outrider {

namespace {

// Exponentials of one block are read again from the nearest cache; a number is searched for in one
// block of sums.
constexpr int64_t EXP_BLOCK = 4096, SUM_BLOCK = 512;
// Blocks that a thread takes at once; less work than this runs on the caller alone.
constexpr int EXP_GRAIN = 2, SUM_GRAIN = 16;
// How far ahead of its use a distribution is asked for.
constexpr int64_t AHEAD = SUM_BLOCK;
// Numbers a thread works on before the rows so far are scaled, while its second cache has them.
constexpr int64_t GROUP = 1 << 16;
constexpr double LOG2_E = 1.4426950408889634;
constexpr float INF = std::numeric_limits<float>::infinity();

// Sums are made in float64: `Wide` has the lanes of half a vector.
constexpr int WIDE_LANES = LANES / 2;
typedef float Half __attribute__((vector_size(WIDE_LANES * 4)));
typedef double Wide __attribute__((vector_size(WIDE_LANES * 8)));

inline Wide widened(const float* from, int64_t count) {
    Half half = {};
    if (count >= WIDE_LANES) std::memcpy(&half, from, sizeof(half));
    else std::memcpy(&half, from, sizeof(float) * count);
    return __builtin_convertvector(half, Wide);
}

inline Wide lower_half(Vec vec) {
    Half half;
    std::memcpy(&half, &vec, sizeof(half));
    return __builtin_convertvector(half, Wide);
}

inline Wide upper_half(Vec vec) {
    Half halves[2];
    std::memcpy(halves, &vec, sizeof(halves));
    return __builtin_convertvector(halves[1], Wide);
}

inline double sum_of(const Wide (&chains)[4]) {
    const Wide sums = (chains[0] + chains[1]) + (chains[2] + chains[3]);
    double sum = 0;
    for (int lane = 0; lane < WIDE_LANES; ++lane) sum += sums[lane];
    return sum;
}

// A block of a row of exponentials: they are relative to its own largest logit.
struct Part {
    float largest;
    float scale;
    double sum;
};

inline float origin(float largest) { return largest == -INF ? 0.0f : largest; }

inline Vec load_logits(const float* from, int64_t count) {
    if (count >= LANES) return load(from);
    Vec vec = splat(-INF);
    std::memcpy(&vec, from, sizeof(float) * count);
    return vec;
}

// 2^(x * rate) for x <= 0, to about 2e-7 relative: 2^n times a polynomial on [-1/2, 1/2]. Exactly 0
// below 2^-126, and exactly 1 at 0. Half the work of `exp`, which takes numbers of either sign.
inline Vec power_of_two(Vec x, float rate) {
    constexpr float TO_INTEGER = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const Vec shifted = fused(x, splat(rate), splat(TO_INTEGER));
    const Vec f = fused(x, splat(rate), -(shifted - TO_INTEGER));
    Vec p = splat(1.3264727e-3f);
    for (float next : {9.671513e-3f, 5.5507336e-2f, 2.4022242e-1f, 6.9314700e-1f, 1.0f})
        p = fused(p, f, splat(next));
    const BitVec power = cast<BitVec>(p) + (cast<BitVec>(shifted) << 23);
    return shifted < TO_INTEGER - 126.0f ? Vec{} : cast<Vec>(power);
}

// 2^((logit - largest) * rate), written to `out` if there is one, which may be `logits`. The sum is
// NaN if a logit is.
template <bool WRITES>
Part exponentials(const float* logits, float rate, float* out, int64_t size) {
    Vec most[4] = {splat(-INF), splat(-INF), splat(-INF), splat(-INF)};
    IntVec is_nan = {};
    for_vectors<LANES>(size, [&](int64_t at, int64_t count, int chain) {
        const Vec logit = load_logits(logits + at, count);
        most[chain] = larger(logit, most[chain]);
        is_nan |= logit != logit;
    });
    const float largest = largest_lane(larger(larger(most[0], most[1]), larger(most[2], most[3])));
    // Of a block without any mass the differences would not be numbers.
    const Vec top = splat(origin(largest));
    Wide sums[4] = {};
    Vec chains[4] = {};
    for_vectors<LANES>(size, [&](int64_t at, int64_t count, int chain) {
        // The next block comes in while this one is computed.
        __builtin_prefetch(logits + at + EXP_BLOCK);
        const Vec power = power_of_two(load_logits(logits + at, count) - top, rate);
        if (WRITES) store_some(out + at, power, static_cast<int>(count));
        chains[chain] += power;
    });
    for (int chain = 0; chain < 4; ++chain)
        sums[chain] = lower_half(chains[chain]) + upper_half(chains[chain]);
    bool broken = false;
    for (int lane = 0; lane < LANES; ++lane) broken = broken || is_nan[lane];
    return {largest, 0.0f, broken ? std::numeric_limits<double>::quiet_NaN() : sum_of(sums)};
}

// What each block must be scaled by so that the row sums to one: NaN if it has no distribution.
void share_out(Part* parts, int64_t num_parts, float rate) {
    double largest = -INF, total = 0;
    for (int64_t b = 0; b < num_parts; ++b)
        largest = std::max<double>(parts[b].largest, largest);
    const auto weight = [&](const Part& part) {
        return part.largest == -INF ? 0.0 : std::exp2((part.largest - largest) * rate);
    };
    for (int64_t b = 0; b < num_parts; ++b) total += weight(parts[b]) * parts[b].sum;
    for (int64_t b = 0; b < num_parts; ++b) {
        const double scale = weight(parts[b]) / total;
        parts[b].scale = scale < FLT_MIN ? 0.0f : static_cast<float>(scale);
    }
}

// Products too small for a normal number become 0: arithmetic on the others is a hundred times
// slower.
struct Scale {
    float factor;
    Vec least = splat(factor == 0 ? INF : FLT_MIN / factor);

    Vec operator()(Vec power) const { return (power < least ? Vec{} : power) * factor; }
};

void scale(float* out, float factor, int64_t size) {
    const Scale scaled{factor};
    for_vectors<LANES>(size, [&](int64_t at, int64_t count, int) {
        const int some = static_cast<int>(count);
        store_some(out + at, scaled(load_some(out + at, some)), some);
    });
}

double sum(const float* weights, int64_t size) {
    Wide chains[4] = {};
    for_vectors<WIDE_LANES>(size, [&](int64_t at, int64_t count, int chain) {
        chains[chain] += widened(weights + at, count);
    });
    return sum_of(chains);
}

// out = max(share * p - q, 0) and its sum; no q means 0. What is too small for a normal number is
// 0 too.
// `share` comes as two floats, so that the difference is as good as one that is rounded once.
double leftover(const float* p, const float* q, double share, float* out, int64_t size) {
    const auto high = static_cast<float>(share), low = static_cast<float>(share - high);
    Wide chains[4] = {};
    for_vectors<LANES>(size, [&](int64_t at, int64_t count, int chain) {
        const int some = static_cast<int>(count);
        __builtin_prefetch(p + at + AHEAD);
        if (q != nullptr) __builtin_prefetch(q + at + AHEAD);
        const Vec distribution = load_some(p + at, some);
        const Vec covered = q == nullptr ? Vec{} : load_some(q + at, some);
        Vec left = distribution * low + (distribution * high - covered);
        left = left < FLT_MIN ? Vec{} : left;
        store_some(out + at, left, some);
        chains[chain] += lower_half(left);
        chains[chain] += upper_half(left);
    });
    return sum_of(chains);
}

// The blocks of exponentials of rows, shared among the team.
struct Blocks {
    Team& team;
    const float rate;
    const int64_t size, count;

    Blocks(Team& of, float temperature, int64_t row_size)
        : team(of), rate(static_cast<float>(LOG2_E / temperature)), size(row_size),
          count((row_size + EXP_BLOCK - 1) / EXP_BLOCK) {}

    Part* room(int num_rows) const {
        const size_t bytes = sizeof(Part) * count * std::max(num_rows, 1);
        return static_cast<Part*>(team.shared().take(bytes));
    }

    // Calls body(item, start, length) for all blocks of `num_rows` rows.
    template <class Body>
    void each(int num_rows, const Body& body) const {
        team.run(num_rows * static_cast<int>(count), EXP_GRAIN, [&](int first, int last, int) {
            for (int item = first; item < last; ++item) {
                const int64_t start = item % count * EXP_BLOCK;
                body(item, item / count * size + start, std::min(size - start, EXP_BLOCK));
            }
        });
    }

    void share_out(Part* parts, int num_rows) const {
        for (int row = 0; row < num_rows; ++row)
            outrider::share_out(parts + row * count, count, rate);
    }
};

// Calls body(start, count, block) for the blocks of [0, size), shared among the team.
template <class Body>
void for_blocks(Team& team, int64_t size, const Body& body) {
    const int num_blocks = static_cast<int>((size + SUM_BLOCK - 1) / SUM_BLOCK);
    team.run(num_blocks, SUM_GRAIN, [&](int first, int last, int) {
        for (int64_t block = first; block < last; ++block)
            body(block * SUM_BLOCK, std::min(size - block * SUM_BLOCK, SUM_BLOCK), block);
    });
}

double* block_sums(Team& team, int64_t size) {
    return static_cast<double*>(team.shared().take(sizeof(double) * (size / SUM_BLOCK + 1)));
}

double total_of(const double* sums, int64_t size) {
    double total = 0;
    for (int64_t start = 0; start < size; start += SUM_BLOCK) total += *sums++;
    return total;
}

// Where the sum of a block, which begins at `before`, first exceeds `threshold`. Rounding may keep
// a sum that is made one by one below it: then it is the last weight.
int64_t search(const float* weights, int64_t size, double before, double threshold) {
    int64_t last = 0;
    double sum = 0;
    for (int64_t i = 0; i < size; ++i) {
        if (!(weights[i] > 0)) continue;
        last = i;
        sum += weights[i];
        if (before + sum > threshold) break;
    }
    return last;
}

}  // namespace

}  // namespace outrider

using namespace outrider;

extern "C" {

// Rows of softmax(logits / temperature); `out` may be `logits`.
void outrider_softmax(Team* team, const float* logits, float temperature, float* out, int num_rows,
                      int64_t size) {
    team = &team->here();
    std::lock_guard<std::mutex> lock(team->entry());
    const Blocks blocks(*team, temperature, size);
    const int group = static_cast<int>(
        std::min<int64_t>(num_rows, std::max<int64_t>(1, team->num_threads() * GROUP / size)));
    Part* parts = blocks.room(group);
    for (int first = 0; first < num_rows; first += group) {
        const int count = std::min(group, num_rows - first);
        const float* from = logits + first * size;
        float* to = out + first * size;
        blocks.each(count, [&](int item, int64_t at, int64_t length) {
            parts[item] = exponentials<true>(from + at, blocks.rate, to + at, length);
        });
        blocks.share_out(parts, count);
        blocks.each(count, [&](int item, int64_t at, int64_t length) {
            scale(to + at, parts[item].scale, length);
        });
    }
}

// What those rows have for a token each, bit for bit; no row is written.
void outrider_masses(Team* team, const float* logits, float temperature, const int32_t* tokens,
                     double* out, int num_rows, int64_t size) {
    team = &team->here();
    std::lock_guard<std::mutex> lock(team->entry());
    const Blocks blocks(*team, temperature, size);
    Part* parts = blocks.room(num_rows);
    blocks.each(num_rows, [&](int item, int64_t at, int64_t length) {
        parts[item] = exponentials<false>(logits + at, blocks.rate, nullptr, length);
    });
    blocks.share_out(parts, num_rows);
    for (int64_t row = 0; row < num_rows; ++row) {
        const Part& part = parts[row * blocks.count + tokens[row] / EXP_BLOCK];
        const Vec above = splat(logits[row * size + tokens[row]] - origin(part.largest));
        out[row] = Scale{part.scale}(power_of_two(above, blocks.rate))[0];
    }
}

// The index at which the running sum first exceeds `uniform` of the total; -1 if there is no distribution.
int64_t outrider_pick(Team* team, const float* weights, double uniform, int64_t size) {
    team = &team->here();
    std::lock_guard<std::mutex> lock(team->entry());
    double* sums = block_sums(*team, size);
    for_blocks(*team, size, [&](int64_t start, int64_t count, int64_t block) {
        sums[block] = sum(weights + start, count);
    });
    const double total = total_of(sums, size);
    if (!(total > 0 && total < INF)) return -1;
    // Rounding may reach the total itself; step back to the last real increase.
    const double threshold = std::min(uniform * total, std::nextafter(total, 0.0));
    double before = 0;
    int64_t block = 0;
    for (; before + sums[block] <= threshold; ++block) before += sums[block];
    const int64_t start = block * SUM_BLOCK;
    return start + search(weights + start, std::min(size - start, SUM_BLOCK), before, threshold);
}

// out = what q leaves of share * p, and its sum. Without a q it is a point mass on `token`.
double outrider_leftover(Team* team, const float* p, const float* q, int64_t token, double share,
                         float* out, int64_t size) {
    team = &team->here();
    std::lock_guard<std::mutex> lock(team->entry());
    double* sums = block_sums(*team, size);
    for_blocks(*team, size, [&](int64_t start, int64_t count, int64_t block) {
        const float* covered = q == nullptr ? nullptr : q + start;
        sums[block] = leftover(p + start, covered, share, out + start, count);
        if (q == nullptr && token >= start && token < start + count) {
            out[token] = 0;
            sums[block] = sum(out + start, count);
        }
    });
    return total_of(sums, size);
}
}
