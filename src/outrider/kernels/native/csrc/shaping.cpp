// Bias and penalties of a row of logits, as core/logits.py defines them: only the ids that a request
// names or its text has are touched.
#include <algorithm>

#include "round.h"

namespace outrider {

namespace {

// Rounded before it is added to anything, as the definition's are.
float product(float a, float b) { return static_cast<float>(static_cast<double>(a) * b); }

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

}  // namespace outrider
