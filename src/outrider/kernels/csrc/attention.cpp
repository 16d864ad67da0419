// Softmax attention of packed tokens over paged keys; the row, not the pass, fixes the arithmetic.
//
// A work item is one token and one key/value head with the query heads that share it. It lists the
// slots of the token's keys in logical order, then, for a query head: a dot product per key, lanes
// summed by one tree; the exact maximum; exponentials, summed per lane of logical position; values
// weighted and added one key after the other. Nothing depends on where the keys lie or on other
// tokens, and only named slots are read.
//
// A bfloat16 row is read as vectors of its even and of its odd elements, and the query is laid out
// to match: widening then takes one instruction a vector.
#include <algorithm>
#include <cmath>
#include <limits>

#include "pass.h"
#include "team.h"
#include "vectors.h"

namespace outrider {

namespace {

// Multiply-adds below which a second thread costs more than it saves.
constexpr int64_t MIN_SPLIT_WORK = 1 << 16;

// A step is the elements that one register of stored row holds; it widens to PARTS vectors.
template <class T>
struct Step;

template <>
struct Step<float> {
    static constexpr int PARTS = 1, SIZE = LANES;
    static void widen(const float* from, Vec* to) { to[0] = load(from); }
    static int place(int element) { return element; }
};

template <>
struct Step<BFloat16> {
    static constexpr int PARTS = 2, SIZE = 2 * LANES;
    static void widen(const BFloat16* from, Vec* to) {
        const BitVec pairs = load_pairs(from);
        to[0] = low_halves(pairs);
        to[1] = high_halves(pairs);
    }
    static int place(int element) { return element % 2 * LANES + element / 2; }
};

// The first `count` elements of a step; what follows them belongs to a slot that is not ours.
template <class T>
void widen_some(const T* from, int count, Vec* to) {
    T padded[Step<T>::SIZE] = {};
    std::memcpy(padded, from, sizeof(T) * count);
    Step<T>::widen(padded, to);
}

// Where element d of a head lies once its steps are widened.
template <class T>
int widened_place(int d) {
    return d / Step<T>::SIZE * Step<T>::SIZE + Step<T>::place(d % Step<T>::SIZE);
}

template <class T>
struct Head {
    int dim;
    const int32_t* slots;
    int num_keys;
    const T *keys, *values;  // of this key/value head
    int64_t slot_stride;

    const T* key(int t) const { return keys + slots[t] * slot_stride; }
    const T* value(int t) const { return values + slots[t] * slot_stride; }
};

// STEPS > 0 says that the head has exactly that many whole steps.
template <class T, int STEPS>
Vec dot(const Vec* query, const T* key, int dim) {
    constexpr int PARTS = Step<T>::PARTS, SIZE = Step<T>::SIZE;
    const int steps = STEPS > 0 ? STEPS : dim / SIZE;
    Vec sum = {}, parts[PARTS];
    for (int s = 0; s < steps; ++s) {
        Step<T>::widen(key + s * SIZE, parts);
        for (int p = 0; p < PARTS; ++p) sum += query[s * PARTS + p] * parts[p];
    }
    if (STEPS == 0 && dim > steps * SIZE) {
        widen_some(key + steps * SIZE, dim - steps * SIZE, parts);
        for (int p = 0; p < PARTS; ++p) sum += query[steps * PARTS + p] * parts[p];
    }
    return sum;
}

// Scores of COUNT keys from `first`, a key a lane group: the tree sums of LANES keys make one
// vector. `last` is the token's last key, which stands in for those past it.
template <class T, int STEPS, int COUNT>
inline Vec dots(const Vec* query, const Head<T>& head, int first, int last) {
    if constexpr (COUNT == 1) {
        return dot<T, STEPS>(query, head.key(std::min(first, last)), head.dim);
    } else {
        return pair_sums(dots<T, STEPS, COUNT / 2>(query, head, first, last),
                         dots<T, STEPS, COUNT / 2>(query, head, first + COUNT / 2, last));
    }
}

template <class T, int STEPS>
void score(const Vec* query, const Head<T>& head, float scale, float* scores) {
    for (int t = 0; t < head.num_keys; t += LANES)
        store(scores + t, dots<T, STEPS, LANES>(query, head, t, head.num_keys - 1) * scale);
}

template <class T>
void score_all(const Vec* query, const Head<T>& head, float scale, float* scores) {
    constexpr int SIZE = Step<T>::SIZE;
    switch (head.dim % SIZE == 0 ? head.dim / SIZE : 0) {
        case 2: return score<T, 2>(query, head, scale, scores);
        case 4: return score<T, 4>(query, head, scale, scores);
        case 8: return score<T, 8>(query, head, scale, scores);
        default: return score<T, 0>(query, head, scale, scores);
    }
}

// Turns scores into weights e^(score - max), zero past the last key; returns 1 / their sum.
float soften(float* scores, int num_keys) {
    const int padded = (num_keys + LANES - 1) / LANES * LANES;
    for (int t = num_keys; t < padded; ++t) scores[t] = -std::numeric_limits<float>::infinity();
    Vec most = load(scores);
    for (int t = LANES; t < padded; t += LANES) most = larger(load(scores + t), most);
    const float max = largest_lane(most);
    Vec sum = {};
    for (int t = 0; t < padded; t += LANES) {
        const Vec weight = exp(load(scores + t) - max);
        store(scores + t, weight);
        sum += weight;
    }
    return 1.0f / sum_of_lanes(sum);
}

// Adds the weighted values of STEPS steps (or the first `count` elements of one) for HEADS heads.
template <class T, int HEADS, int STEPS>
void mix(const float* const* weights, const Head<T>& head, int first, int count, Vec* out) {
    constexpr int PARTS = Step<T>::PARTS, SIZE = Step<T>::SIZE, VECS = STEPS * PARTS;
    Vec acc[HEADS][VECS] = {};
    for (int t = 0; t < head.num_keys; ++t) {
        const T* value = head.value(t) + first;
        for (int s = 0; s < STEPS; ++s) {
            Vec parts[PARTS];
            if (count < STEPS * SIZE) widen_some(value, count, parts);
            else Step<T>::widen(value + s * SIZE, parts);
            for (int h = 0; h < HEADS; ++h)
                for (int p = 0; p < PARTS; ++p) acc[h][s * PARTS + p] += parts[p] * weights[h][t];
        }
    }
    for (int h = 0; h < HEADS; ++h)
        for (int v = 0; v < VECS; ++v) out[h * VECS + v] = acc[h][v];
}

template <class T, int STEPS>
void write(const Vec* mixed, float scale, int count, float* out) {
    float widened[STEPS * Step<T>::SIZE];
    for (int v = 0; v < STEPS * Step<T>::PARTS; ++v) store(widened + v * LANES, mixed[v] * scale);
    for (int d = 0; d < count; ++d) out[d] = widened[widened_place<T>(d)];
}

template <class T, int HEADS>
void mix_all(const float* const* weights, const float* scales, const Head<T>& head, float* out) {
    constexpr int SIZE = Step<T>::SIZE, STEPS = 4 / Step<T>::PARTS;
    constexpr int VECS = STEPS * Step<T>::PARTS;
    Vec mixed[HEADS * VECS];
    int d = 0;
    for (; d + STEPS * SIZE <= head.dim; d += STEPS * SIZE) {
        mix<T, HEADS, STEPS>(weights, head, d, STEPS * SIZE, mixed);
        for (int h = 0; h < HEADS; ++h)
            write<T, STEPS>(mixed + h * VECS, scales[h], STEPS * SIZE, out + h * head.dim + d);
    }
    for (; d < head.dim; d += SIZE) {
        const int count = std::min(SIZE, head.dim - d);
        mix<T, HEADS, 1>(weights, head, d, count, mixed);
        for (int h = 0; h < HEADS; ++h)
            write<T, 1>(mixed + h * Step<T>::PARTS, scales[h], count, out + h * head.dim + d);
    }
}

struct Query {
    const float* qkv;
    float* out;
    float scale;
};

void list_slots(const Pass& pass, int n, int32_t* slots) {
    const int32_t* pages = pass.pages + static_cast<int64_t>(pass.seq[n]) * pass.num_page_columns;
    const int visible = pass.visible[n];
    for (int t = 0; t < visible; t += pass.page_size, ++pages) {
        const int count = std::min(pass.page_size, visible - t), base = *pages * pass.page_size;
        for (int i = 0; i < count; ++i) slots[t + i] = base + i;
    }
    const int num_extra = pass.num_extra(n);
    if (num_extra > 0)
        std::copy_n(pass.extra_slots + pass.extra_offsets[n], num_extra, slots + visible);
}

template <class T>
void attend(const Pass& pass, const Query& q, const Arena<T>& arena, int item, Scratch& scratch) {
    constexpr int SIZE = Step<T>::SIZE, MAX_SHARED = 2;
    const int dim = pass.head_dim, group = pass.num_heads / pass.num_kv_heads;
    const int n = item / pass.num_kv_heads, g = item % pass.num_kv_heads;
    const int num_keys = pass.num_keys(n);
    const size_t padded_keys = (num_keys + LANES - 1) / LANES * LANES;
    const size_t padded_dim = (dim + SIZE - 1) / SIZE * SIZE;
    auto* query = static_cast<float*>(
        scratch.take(sizeof(float) * (padded_dim + (MAX_SHARED + 1) * padded_keys)));
    float* scores = query + padded_dim;
    auto* slots = reinterpret_cast<int32_t*>(scores + MAX_SHARED * padded_keys);
    list_slots(pass, n, slots);
    const Head<T> head{dim, slots, num_keys, arena.key(g, 0), arena.value(g, 0), arena.slot_stride};
    const float* from = q.qkv + static_cast<int64_t>(n) * pass.row_size + g * group * dim;
    float* out = q.out + (static_cast<int64_t>(n) * pass.num_heads + g * group) * dim;
    std::fill_n(query, padded_dim, 0.0f);
    for (int h = 0, shared; h < group; h += shared) {
        shared = std::min(MAX_SHARED, group - h);
        const float* weights[MAX_SHARED];
        float scales[MAX_SHARED];
        for (int i = 0; i < shared; ++i, from += dim) {
            for (int d = 0; d < dim; ++d) query[widened_place<T>(d)] = from[d];
            float* head_scores = scores + i * padded_keys;
            score_all(reinterpret_cast<const Vec*>(query), head, q.scale, head_scores);
            scales[i] = soften(head_scores, num_keys);
            weights[i] = head_scores;
        }
        if (shared == 2) mix_all<T, 2>(weights, scales, head, out + h * dim);
        else mix_all<T, 1>(weights, scales, head, out + h * dim);
    }
}

template <class T>
void attention(const Pass& pass, const Query& q, const Arena<T>& arena) {
    std::lock_guard<std::mutex> lock(pass.team->entry());
    int64_t num_keys = 0;
    for (int n = 0; n < pass.num_tokens; ++n) num_keys += pass.num_keys(n);
    const int items = pass.num_tokens * pass.num_kv_heads;
    const int64_t work = num_keys * pass.num_heads * pass.head_dim * 2;
    const int64_t grain = work < 2 * MIN_SPLIT_WORK ? items : MIN_SPLIT_WORK * items / work;
    pass.team->run(items, static_cast<int>(std::max<int64_t>(grain, 1)),
                   [&](int first, int last, int thread) {
                       for (int item = first; item < last; ++item)
                           attend(pass, q, arena, item, pass.team->own(thread));
                   });
}

}  // namespace

}  // namespace outrider

using namespace outrider;

extern "C" {

void outrider_attention_float32(const Pass* pass, const float* qkv, float* keys, float* values,
                                float scale, float* out) {
    attention<float>(*pass, {qkv, out, scale}, {*pass, keys, values});
}

void outrider_attention_bfloat16(const Pass* pass, const float* qkv, BFloat16* keys,
                                 BFloat16* values, float scale, float* out) {
    attention<BFloat16>(*pass, {qkv, out, scale}, {*pass, keys, values});
}
}
