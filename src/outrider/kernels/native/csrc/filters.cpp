// Top-k, top-p and min-p: which tokens of a distribution may be drawn (core/sampling.py has the definitions).
//
// A vocabulary is never sorted. Few tokens matter: those above a bound that whole vectors are
// compared with, and only they are looked at one by one. Rows are shared among threads, and a row's
// bits depend on that row alone.
#include <algorithm>
#include <cfloat>
#include <functional>
#include <limits>
#include <numeric>

#include "team.h"
#include "vectors.h"

namespace outrider {

namespace {

constexpr float INF = std::numeric_limits<float>::infinity();
// What no comparison finds.
constexpr float NOTHING = std::numeric_limits<float>::quiet_NaN();
// Numbers compared with a bound at once; only in a span that has one are vectors looked at.
constexpr int64_t SPAN = 64 * LANES;
// By how much the bound of a nucleus is lowered until enough mass lies above it.
constexpr float STEP = 1.0f / 16;
// What a sum whose chunks are added in float32 may come out too large by.
constexpr double SLACK = 2e-6;
constexpr int64_t MIN_ROOM = 1024;

inline Vec load_or(const float* from, int64_t count, float otherwise) {
    if (count >= LANES) return load(from);
    Vec vec = splat(otherwise);
    std::memcpy(&vec, from, sizeof(float) * count);
    return vec;
}

// The largest of some numbers; a NaN counts for nothing.
inline float largest_of(const float* from, int64_t count) {
    Vec most[4] = {splat(-INF), splat(-INF), splat(-INF), splat(-INF)};
    for_vectors<LANES>(count, [&](int64_t at, int64_t some, int chain) {
        most[chain] = larger(load_or(from + at, some, -INF), most[chain]);
    });
    return largest_lane(larger(larger(most[0], most[1]), larger(most[2], most[3])));
}

// Which lanes are at least `bound`: lane 0 is the lowest bit.
inline uint32_t lanes_from(Vec vec, float bound) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(cast<__m512>(vec), _mm512_set1_ps(bound), _CMP_GE_OQ);
#elif defined(__AVX__)
    return _mm256_movemask_ps(
        _mm256_cmp_ps(cast<__m256>(vec), _mm256_set1_ps(bound), _CMP_GE_OQ));
#else
    uint32_t lanes = 0;
    for (int lane = 0; lane < LANES; ++lane) lanes |= uint32_t{vec[lane] >= bound} << lane;
    return lanes;
#endif
}

// Calls body(index) for the numbers that are at least `bound()`, which may rise meanwhile.
template <class Bound, class Body>
void for_large(const float* row, int64_t size, const Bound& bound, const Body& body) {
    for (int64_t span = 0; span < size; span += SPAN) {
        const int64_t last = std::min(span + SPAN, size);
        if (largest_of(row + span, last - span) < bound()) continue;
        for (int64_t start = span; start < last; start += LANES) {
            uint32_t lanes = lanes_from(load_or(row + start, last - start, NOTHING), bound());
            for (; lanes != 0; lanes &= lanes - 1) {
                const int64_t i = start + __builtin_ctz(lanes);
                if (row[i] >= bound()) body(i);
            }
        }
    }
}

// The k-th largest number of a row; -inf if fewer are numbers.
float edge_of(const float* row, int64_t size, int64_t k, Scratch& scratch) {
    const int64_t room = std::max(4 * k, MIN_ROOM);
    auto* found = static_cast<float*>(scratch.take(sizeof(float) * room));
    int64_t num_found = 0;
    float bound = -INF;
    const auto tighten = [&] {
        if (num_found < k) return;
        std::nth_element(found, found + k - 1, found + num_found, std::greater<float>());
        num_found = k;
        bound = found[k - 1];
    };
    for_large(row, size, [&] { return bound; }, [&](int64_t i) {
        found[num_found++] = row[i];
        if (num_found == room) tighten();
    });
    tighten();
    return num_found < k ? -INF : bound;
}

void mask_below(const float* from, float edge, float* out, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) {
        const Vec logit = load_or(from + i, size - i, -INF);
        store_some(out + i, logit < edge ? splat(-INF) : logit, static_cast<int>(size - i));
    }
}

// The sum of what is at least `bound`, made in float64 a span at a time.
double mass_above(const float* distribution, int64_t size, float bound) {
    double mass = 0;
    for (int64_t span = 0; span < size; span += SPAN) {
        Vec sums[4] = {};
        for_vectors<LANES>(std::min(SPAN, size - span), [&](int64_t at, int64_t some, int chain) {
            const Vec p = load_or(distribution + span + at, some, 0);
            sums[chain] += p < bound ? Vec{} : p;
        });
        mass += sum_of_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
    return mass;
}

// A likely token as one number: sorted downwards, the likelier comes first, and of equal ones the
// first of the row.
struct Candidate {
    uint64_t key;

    Candidate(float p, int64_t index)
        : key(uint64_t{cast<uint32_t>(p)} << 32 | (0xffffffffu - static_cast<uint32_t>(index))) {}
    float p() const { return cast<float>(static_cast<uint32_t>(key >> 32)); }
    int64_t index() const { return 0xffffffffu - static_cast<uint32_t>(key); }
    bool operator<(const Candidate& other) const { return key > other.key; }
};

double sum_of(const Candidate* first, const Candidate* last) {
    return std::accumulate(first, last, 0.0, [](double sum, const Candidate& one) {
        return sum + one.p();
    });
}

// Numbers between two neighbouring ones of 7 bits of mantissa, those of bfloat16.
inline int64_t bucket_of(float p) { return cast<uint32_t>(p) >> 16; }

// Puts the likeliest candidates that together reach `top_p` first, at least one; how many, and
// their sum. The masses of buckets tell in which of them the last one is, and only that is sorted.
// `masses` has room for the buckets of `bound` to `most`, between which all candidates lie.
int64_t nucleus(Candidate* candidates, int64_t count, double top_p, float bound, float most,
                double* masses, double* sum) {
    const int64_t low = bucket_of(bound), num_buckets = bucket_of(most) - low + 1;
    std::fill(masses, masses + num_buckets, 0.0);
    for (int64_t i = 0; i < count; ++i)
        masses[bucket_of(candidates[i].p()) - low] += candidates[i].p();
    int64_t border = num_buckets - 1;
    for (*sum = 0; border > 0 && *sum + masses[border] < top_p; --border) *sum += masses[border];
    const auto is_above = [&](const Candidate& one) { return bucket_of(one.p()) > low + border; };
    const auto is_in = [&](const Candidate& one) { return bucket_of(one.p()) == low + border; };
    Candidate* kept = std::partition(candidates, candidates + count, is_above);
    Candidate* end = std::partition(kept, candidates + count, is_in);
    std::sort(kept, end);
    for (; kept < end && (kept == candidates || *sum < top_p); ++kept) *sum += kept->p();
    return kept - candidates;
}

// Keeps the likeliest tokens whose mass reaches top_p, then of these what is at least min_p of the
// likeliest, and makes what is left sum to one each time.
void keep_nucleus(float* distribution, int64_t size, double top_p, float min_p, Scratch& scratch) {
    const float most = largest_of(distribution, size);
    if (!(most > 0 && most < INF)) return;  // no distribution; whoever draws from it will say so
    float bound = most * STEP;
    while (bound > FLT_MIN && mass_above(distribution, size, bound) < top_p + SLACK) bound *= STEP;
    bound = std::min(std::max(bound, FLT_MIN), most);
    const int64_t num_buckets = bucket_of(most) - bucket_of(bound) + 1;
    auto* masses = static_cast<double*>(
        scratch.take(sizeof(double) * num_buckets + sizeof(Candidate) * size));
    auto* candidates = reinterpret_cast<Candidate*>(masses + num_buckets);
    int64_t count = 0;
    for_large(distribution, size, [&] { return bound; },
              [&](int64_t i) { candidates[count++] = Candidate(distribution[i], i); });
    double sum;
    const int64_t kept = nucleus(candidates, count, top_p, bound, most, masses, &sum);
    const auto total = static_cast<float>(sum);
    const float floor = min_p * (most / total);
    const auto is_near = [&](const Candidate& one) { return one.p() / total >= floor; };
    const int64_t likely = std::partition(candidates, candidates + kept, is_near) - candidates;
    const auto rest = static_cast<float>(sum_of(candidates, candidates + likely) / total);
    const float divisor = likely < kept ? rest : 1.0f;
    std::fill(distribution, distribution + size, 0.0f);
    for (int64_t i = 0; i < likely; ++i)
        distribution[candidates[i].index()] = candidates[i].p() / total / divisor;
}

void keep_near_likeliest(float* distribution, int64_t size, float min_p) {
    const float floor = min_p * largest_of(distribution, size);
    const auto total = static_cast<float>(mass_above(distribution, size, floor));
    for (int64_t i = 0; i < size; i += LANES) {
        const Vec p = load_or(distribution + i, size - i, 0);
        store_some(distribution + i, (p < floor ? Vec{} : p) / total, static_cast<int>(size - i));
    }
}

}  // namespace

}  // namespace outrider

using namespace outrider;

extern "C" {

// Rows of logits with -inf for what is below the k-th largest; `out` may be `logits`.
void outrider_top_k(Team* team, const float* logits, int64_t k, float* out, int num_rows,
                    int64_t size) {
    team = &team->here();
    std::lock_guard<std::mutex> lock(team->entry());
    team->run(num_rows, 1, [&](int first, int last, int thread) {
        for (int64_t row = first; row < last; ++row) {
            const float* from = logits + row * size;
            mask_below(from, edge_of(from, size, k, team->own(thread)), out + row * size, size);
        }
    });
}

// Rows of distributions without their unlikely tokens, in place. 1 keeps all of top-p, 0 all of min-p.
void outrider_keep_likely(Team* team, float* distributions, double top_p, double min_p, int num_rows,
                          int64_t size) {
    team = &team->here();
    std::lock_guard<std::mutex> lock(team->entry());
    const auto least = static_cast<float>(min_p);
    team->run(num_rows, 1, [&](int first, int last, int thread) {
        for (int64_t row = first; row < last; ++row) {
            float* distribution = distributions + row * size;
            if (top_p < 1) keep_nucleus(distribution, size, top_p, least, team->own(thread));
            else if (min_p > 0) keep_near_likeliest(distribution, size, least);
        }
    });
}
}
