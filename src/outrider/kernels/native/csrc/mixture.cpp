// Mixtures of experts: each row goes through the few nets that its router scores highest.
//
// Rows that chose the same expert go through it together, so a pass reads an expert once, and one
// that nobody chose not at all. A row's bits are its own: what its experts give is added in the
// order of their numbers.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "linears.h"

using namespace outrider;

extern "C" {

void outrider_silu_mul(Team*, const float* gate_up, float* out, int num_rows, int size);
void outrider_gelu_mul(Team*, const float* gate_up, float* out, int num_rows, int size);
void outrider_squared_relu(Team*, const float* x, float* out, int num_rows, int size);
}

namespace outrider {

namespace {

// Parts of one piece of memory, each beginning at a cache line.
class Parts {
  public:
    template <class T>
    void add(T*& part, int64_t count) {
        ends_[num_] = reinterpret_cast<void**>(&part);
        size_ = (size_ + 63) / 64 * 64;
        at_[num_++] = size_;
        size_ += count * static_cast<int64_t>(sizeof(T));
    }

    void take(Scratch& scratch) {
        char* memory = static_cast<char*>(scratch.take(size_));
        for (int i = 0; i < num_; ++i) *ends_[i] = memory + at_[i];
    }

  private:
    static constexpr int MOST = 16;
    void** ends_[MOST];
    int64_t at_[MOST], size_ = 0;
    int num_ = 0;
};

// Memory of one call. A choice is a row and one of its experts; choices lie by expert.
struct Memory {
    float *scores, *probs, *weights, *x, *up, *activated, *given, *out, *groups;
    int32_t *chosen, *first, *choices;
};

Memory memory_for(const Mixture& m, int64_t rows) {
    static thread_local Scratch scratch;
    const int64_t choices = rows * m.num_chosen;
    const int64_t widest = rows * std::max(m.ffn_size, m.shared_ffn_size);
    Memory memory;
    Parts parts;
    parts.add(memory.scores, rows * m.num_scores);
    parts.add(memory.probs, m.num_experts);
    parts.add(memory.groups, m.num_groups);
    parts.add(memory.weights, choices);
    parts.add(memory.chosen, choices);
    parts.add(memory.first, m.num_experts + 1);
    parts.add(memory.choices, choices);
    parts.add(memory.x, choices * m.hidden_size);
    parts.add(memory.up, 2 * widest);
    parts.add(memory.activated, widest);
    parts.add(memory.given, std::max(choices, rows) * m.hidden_size);
    parts.add(memory.out, rows * m.hidden_size);
    parts.take(scratch);
    return memory;
}

// Shares of all experts of a row, and their sum: those of the softmax are not divided by it yet.
double shares(const Mixture& m, const float* scores, float* probs) {
    if (m.has_sigmoids) {
        for (int e = 0; e < m.num_experts; ++e)
            probs[e] = static_cast<float>(1 / (1 + std::exp(-static_cast<double>(scores[e]))));
        return 1;
    }
    const float most = *std::max_element(scores, scores + m.num_experts);
    double sum = 0;
    for (int e = 0; e < m.num_experts; ++e) {
        probs[e] = static_cast<float>(std::exp(static_cast<double>(scores[e]) - most));
        sum += probs[e];
    }
    return sum;
}

// Rules out the experts of all groups but the best ones. Of equal groups the first is taken; scores
// that are NaN count as the lowest.
template <class Rank>
void keep_groups(const Mixture& m, const Rank& rank, float* probs, float* groups) {
    constexpr float TAKEN = NAN;
    const int size = m.num_experts / m.num_groups;
    for (int g = 0; g < m.num_groups; ++g) {
        double first = -INFINITY, second = -INFINITY;
        for (int e = g * size; e < (g + 1) * size; ++e) {
            const double score = rank(e);
            second = std::max(second, std::min(first, score));
            first = std::max(first, score);
        }
        const auto sum = static_cast<float>(m.group_best > 1 && size > 1 ? first + second : first);
        groups[g] = std::isnan(sum) ? -INFINITY : sum;
    }
    for (int taken = 0; taken < m.top_groups; ++taken) {
        int best = -1;
        for (int g = 0; g < m.num_groups; ++g)
            if (!std::isnan(groups[g]) && (best < 0 || groups[g] > groups[best])) best = g;
        groups[best] = TAKEN;
    }
    for (int e = 0; e < m.num_experts; ++e)
        if (!std::isnan(groups[e / size])) probs[e] = -1.0f;
}

// The experts of a row, the likeliest first, and their shares. Of equal ones the first is taken; a
// NaN is the least likely of all.
void choose(const Mixture& m, const float* scores, const Memory& memory, int32_t* chosen,
            float* weights) {
    float* probs = memory.probs;
    const double sum = shares(m, scores, probs);
    const auto rank = [&](int e) {
        return m.choice_bias == nullptr ? probs[e] : probs[e] / sum + m.choice_bias[e];
    };
    if (m.top_groups < m.num_groups) keep_groups(m, rank, probs, memory.groups);
    double kept = 0;
    for (int q = 0; q < m.num_chosen; ++q) {
        int best = -1;
        for (int e = 0; e < m.num_experts; ++e)
            if (probs[e] >= 0.0f && (best < 0 || rank(e) > rank(best))) best = e;
        if (best < 0)
            for (best = 0; probs[best] < 0.0f;) ++best;
        chosen[q] = best;
        weights[q] = probs[best];
        kept += probs[best];
        probs[best] = -1.0f;
    }
    const double whole = m.normalise ? kept : sum;
    for (int q = 0; q < m.num_chosen; ++q)
        weights[q] = static_cast<float>(weights[q] / whole) * m.scale;
}

// Choices by expert, and of each expert the first.
void sort_by_expert(const Mixture& m, int num_choices, const Memory& memory) {
    std::fill(memory.first, memory.first + m.num_experts + 1, 0);
    for (int c = 0; c < num_choices; ++c) ++memory.first[memory.chosen[c] + 1];
    for (int e = 0; e < m.num_experts; ++e) memory.first[e + 1] += memory.first[e];
    // Each expert's first moves on as its choices are placed, up to that of the next one.
    for (int c = 0; c < num_choices; ++c) memory.choices[memory.first[memory.chosen[c]]++] = c;
    for (int e = m.num_experts; e > 0; --e) memory.first[e] = memory.first[e - 1];
    memory.first[0] = 0;
}

// As gpt-oss gates: min(g, limit) * sigmoid(alpha * g) * (clamp(u) + 1).
void clamped_mul(const Mixture& m, const float* gate_up, float* out, int num_rows, int size) {
    const Vec high = splat(m.limit), low = splat(-m.limit);
    for (int n = 0; n < num_rows; ++n, gate_up += 2 * size, out += size)
        for (int i = 0; i < size; i += LANES) {
            // Limits come first: of a NaN the second is what these give.
            const Vec g = smaller(high, load_some(gate_up + i, size - i));
            const Vec u = smaller(high, larger(low, load_some(gate_up + size + i, size - i)));
            store_some(out + i, g / (exp(g * -m.alpha) + 1.0f) * (u + 1.0f), size - i);
        }
}

// Products of a net before the last one.
int num_up(const Mixture& m) { return m.gating == SQUARED ? 1 : 2; }

void activate(const Mixture& m, const float* gate_up, float* out, int num_rows, int size) {
    if (m.gating == SQUARED) return outrider_squared_relu(m.team, gate_up, out, num_rows, size);
    if (m.gating == CLAMPED) return clamped_mul(m, gate_up, out, num_rows, size);
    const auto gate = m.gating == GELU ? outrider_gelu_mul : outrider_silu_mul;
    gate(m.team, gate_up, out, num_rows, size);
}

void add_scaled(const float* from, float scale, float* to, int size) {
    for (int i = 0; i < size; i += LANES) {
        const Vec sum = load_some(to + i, size - i);
        store_some(to + i, fused(load_some(from + i, size - i), splat(scale), sum), size - i);
    }
}

// The net that every row goes through, whole or by the part that its own score gives it.
void add_shared(const Mixture& m, const float* x, int num_rows, const Memory& memory) {
    const int ffn = m.shared_ffn_size;
    m.shared.gate_up(x, memory.up, num_rows, num_up(m) * ffn, false);
    activate(m, memory.up, memory.activated, num_rows, ffn);
    m.shared.down(memory.activated, memory.given, num_rows, m.hidden_size, false);
    for (int64_t n = 0; n < num_rows; ++n) {
        const double score = m.gates_shared ? memory.scores[n * m.num_scores + m.num_experts] : 0;
        const auto part = m.gates_shared ? static_cast<float>(1 / (1 + std::exp(-score))) : 1.0f;
        add_scaled(memory.given + n * m.hidden_size, part, memory.out + n * m.hidden_size,
                   m.hidden_size);
    }
}

}  // namespace

float* mixed(const Mixture& m, const float* x, int num_rows) {
    const Memory memory = memory_for(m, num_rows);
    const int num_choices = num_rows * m.num_chosen, ffn = m.ffn_size;
    const int64_t size = m.hidden_size;
    m.router(x, memory.scores, num_rows, m.num_scores, false);
    for (int64_t n = 0; n < num_rows; ++n)
        choose(m, memory.scores + n * m.num_scores, memory, memory.chosen + n * m.num_chosen,
               memory.weights + n * m.num_chosen);
    sort_by_expert(m, num_choices, memory);
    for (int64_t i = 0; i < num_choices; ++i)
        std::memcpy(memory.x + i * size, x + memory.choices[i] / m.num_chosen * size,
                    sizeof(float) * size);
    for (int e = 0; e < m.num_experts; ++e) {
        const int64_t first = memory.first[e];
        const int count = static_cast<int>(memory.first[e + 1] - first);
        if (count == 0) continue;
        const Net& net = m.experts[e];
        net.gate_up(memory.x + first * size, memory.up, count, num_up(m) * ffn, false);
        activate(m, memory.up, memory.activated, count, ffn);
        net.down(memory.activated, memory.given + first * size, count, m.hidden_size, false);
    }
    std::fill(memory.out, memory.out + num_rows * size, 0.0f);
    for (int64_t i = 0; i < num_choices; ++i) {
        const int choice = memory.choices[i];
        add_scaled(memory.given + i * size, memory.weights[choice],
                   memory.out + choice / m.num_chosen * size, m.hidden_size);
    }
    if (m.shared.gate_up.call != nullptr) add_shared(m, x, num_rows, memory);
    return memory.out;
}

}  // namespace outrider

extern "C" void outrider_mixture(const Mixture* mixture, const float* x, float* out,
                                 int num_rows) {
    const float* from = mixed(*mixture, x, num_rows);
    std::memcpy(out, from, sizeof(float) * num_rows * static_cast<int64_t>(mixture->hidden_size));
}
