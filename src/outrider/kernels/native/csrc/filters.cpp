// Top-k, top-p and min-p: which tokens of a distribution may be drawn (core/sampling.py has the definitions).
//
// A vocabulary is never sorted. Few tokens matter: those above a bound that whole vectors are
// compared with, and only they are looked at one by one. Rows are shared among threads, and a row's
// bits depend on that row alone.
#include <algorithm>
#include <cfloat>
#include <functional>
#include <limits>

#include "team.h"
#include "vectors.h"

namespace outrider {

namespace {

constexpr float INF = std::numeric_limits<float>::infinity();
// Numbers compared with a bound at once.
constexpr int64_t CHUNK = 4 * LANES;
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

// The largest of a chunk; a NaN counts for nothing.
inline float largest_of(const float* from, int64_t count) {
    Vec most = splat(-INF);
    for (int64_t i = 0; i < count; i += LANES)
        most = larger(load_or(from + i, count - i, -INF), most);
    return largest_lane(most);
}

// Calls body(index) for the numbers that are at least `bound()`, which may rise meanwhile.
template <class Bound, class Body>
void for_large(const float* row, int64_t size, const Bound& bound, const Body& body) {
    for (int64_t start = 0; start < size; start += CHUNK) {
        const int64_t count = std::min(size - start, CHUNK);
        if (!(largest_of(row + start, count) >= bound())) continue;
        for (int64_t i = start; i < start + count; ++i)
            if (row[i] >= bound()) body(i);
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

// The sum of what is at least `bound`, made in float64 a chunk at a time.
double mass_above(const float* distribution, int64_t size, float bound) {
    double mass = 0;
    for (int64_t start = 0; start < size; start += CHUNK) {
        Vec sum = {};
        const int64_t end = std::min(start + CHUNK, size);
        for (int64_t i = start; i < end; i += LANES) {
            const Vec p = load_or(distribution + i, end - i, 0);
            sum += p < bound ? Vec{} : p;
        }
        mass += sum_of_lanes(sum);
    }
    return mass;
}

float largest(const float* distribution, int64_t size) {
    float most = -INF;
    for (int64_t start = 0; start < size; start += CHUNK)
        most = std::max(most, largest_of(distribution + start, std::min(size - start, CHUNK)));
    return most;
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

// The first of `count` sorted candidates that together reach `top_p`, at least one; their sum.
int64_t nucleus(const Candidate* candidates, int64_t count, double top_p, double* sum) {
    int64_t kept = 0;
    for (*sum = 0; kept < count && (kept == 0 || *sum < top_p); ++kept)
        *sum += candidates[kept].p();
    return kept;
}

// Keeps the likeliest tokens whose mass reaches top_p, then of these what is at least min_p of the
// likeliest, and makes what is left sum to one each time.
void keep_nucleus(float* distribution, int64_t size, double top_p, float min_p, Scratch& scratch) {
    const float most = largest(distribution, size);
    if (!(most > 0 && most < INF)) return;  // no distribution; whoever draws from it will say so
    float bound = most * STEP;
    while (bound > FLT_MIN && mass_above(distribution, size, bound) < top_p + SLACK) bound *= STEP;
    bound = std::max(bound, FLT_MIN);
    auto* candidates = static_cast<Candidate*>(scratch.take(sizeof(Candidate) * size));
    int64_t count = 0;
    for_large(distribution, size, [&] { return bound; },
              [&](int64_t i) { candidates[count++] = Candidate(distribution[i], i); });
    std::sort(candidates, candidates + count);
    double sum;
    int64_t kept = nucleus(candidates, count, top_p, &sum);
    const auto total = static_cast<float>(sum);
    const float floor = min_p * (candidates[0].p() / total);
    double rest = 0;
    int64_t likely = 0;
    for (; likely < kept && candidates[likely].p() / total >= floor; ++likely)
        rest += candidates[likely].p() / total;
    const float divisor = likely < kept ? static_cast<float>(rest) : 1.0f;
    std::fill(distribution, distribution + size, 0.0f);
    for (int64_t i = 0; i < likely; ++i)
        distribution[candidates[i].index()] = candidates[i].p() / total / divisor;
}

void keep_near_likeliest(float* distribution, int64_t size, float min_p) {
    const float floor = min_p * largest(distribution, size);
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
