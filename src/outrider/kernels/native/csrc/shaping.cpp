// Bias, penalties, masks and bans of a row of logits, as core/logits.py defines them. Bias and penalties
// touch only the ids that a request names or its text has.
#include <algorithm>
#include <limits>
#include <vector>

#include "round.h"

namespace outrider {

namespace {

// Rounded before it is added to anything, as the definition's are.
float product(float a, float b) { return static_cast<float>(static_cast<double>(a) * b); }

constexpr float INF = std::numeric_limits<float>::infinity();

bool is_open(float logit) { return logit > -INF; }

// Leaves out all ids that are not in a mask; false if that would leave none.
bool mask(float* logits, int64_t size, const uint8_t* allowed) {
    bool open = false;
    for (int64_t id = 0; id < size && !open; ++id) open = allowed[id] != 0 && is_open(logits[id]);
    for (int64_t id = 0; id < size && open; ++id) logits[id] = allowed[id] ? logits[id] : -INF;
    return open;
}

}  // namespace

void Shaping::operator()(float* logits, int64_t size, const int32_t* drafted,
                         int num_drafted) const {
    const int32_t *end = drafted + num_drafted, *seen_end = seen_ids + num_seen;
    for (int i = 0; i < num_biases; ++i)
        if (bias_ids[i] < size) logits[bias_ids[i]] += biases[i];
    if (repetition == 1 && frequency == 0 && presence == 0) return;
    const auto penalise = [&](int32_t id, float count) {
        if (id >= size) return;
        const float logit = logits[id];
        const float pushed = logit > 0 ? logit / repetition : product(logit, repetition);
        logits[id] = pushed - product(frequency, count) - (count > 0 ? presence : 0.0f);
    };
    const auto drafts_of = [&](int32_t id) {
        return static_cast<float>(std::count(drafted, end, id));
    };
    for (int i = 0; i < num_seen; ++i) penalise(seen_ids[i], counts[i] + drafts_of(seen_ids[i]));
    for (const int32_t* token = drafted; token < end; ++token)
        if (std::find(drafted, token, *token) == token
            && std::find(seen_ids, seen_end, *token) == seen_end)
            penalise(*token, drafts_of(*token));
}

void Shaping::limit(float* logits, int64_t size, int row) const {
    std::vector<float> kept;
    const auto keep = [&](const int32_t* ids, int count) {
        kept.resize(count);
        for (int i = 0; i < count; ++i) kept[i] = ids[i] < size ? logits[ids[i]] : -INF;
    };
    // Backwards: of an id that is listed twice, the first number counts.
    const auto restore = [&](const int32_t* ids, int count) {
        for (int i = count; i-- > 0;)
            if (ids[i] < size) logits[ids[i]] = kept[i];
    };
    if (allowed != nullptr && !mask(logits, size, allowed + row * size) && num_ends > 0) {
        keep(ends, num_ends);
        std::fill(logits, logits + size, -INF);
        restore(ends, num_ends);
    }
    if (banned == nullptr) return;
    const int32_t *first = banned + ban_starts[row], *last = banned + ban_starts[row + 1];
    const auto count = static_cast<int>(last - first);
    if (count == 0) return;
    keep(first, count);
    for (const int32_t* id = first; id < last; ++id)
        if (*id < size) logits[*id] = -INF;
    if (!std::any_of(logits, logits + size, is_open)) restore(first, count);
}

float* Shaping::shape(const Memory& memory, float* logits, int count, const int32_t* paths,
                      int depth, int vocab_size, std::vector<float>& wide) const {
    if (memory.ids != nullptr) {
        wide.resize(int64_t{count} * vocab_size);
        for (int64_t i = 0; i < count; ++i)
            memory.spread(logits + i * memory.num_logits, wide.data() + i * vocab_size, vocab_size);
        logits = wide.data();
    }
    for (int64_t i = 0; i < count; ++i)
        (*this)(logits + i * vocab_size, vocab_size, paths + i * depth, depth);
    if (find_limits == nullptr) return logits;
    if (!find_limits(index, paths, count, depth)) return nullptr;
    for (int i = 0; i < count; ++i) limit(logits + int64_t{i} * vocab_size, vocab_size, i);
    return logits;
}

int64_t next_token(Team* team, const Memory& memory, const Row& row, float* logits, int64_t best,
                   const int32_t* drafted, int depth, bool shapes, int vocab_size) {
    std::vector<float> wide;
    shapes = shapes && row.shaping != nullptr;
    if (shapes) {
        logits = row.shaping->shape(memory, logits, 1, drafted, depth, vocab_size, wide);
        if (logits == nullptr) return -1;
    }
    if (row.greedy()) {
        if (!shapes) return memory.token(best);
        outrider_argmax(team, logits, &best, 1, vocab_size);
        return best;
    }
    float* distribution = row.drawn_from + static_cast<int64_t>(depth) * vocab_size;
    if (!shapes) logits = const_cast<float*>(memory.spread(logits, distribution, vocab_size));
    make_laws(team, row, logits, distribution, 1, vocab_size);
    return row.draw(team, distribution, depth, depth, vocab_size);
}

}  // namespace outrider
