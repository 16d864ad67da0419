// What a round is made of, as pointers: models, rows and room (kernels/native/rounds.py).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "pass.h"
#include "philox.h"
#include "sampling.h"
#include "trees.h"

extern "C" int outrider_forward(const void* decoder, const outrider::Pass* pass,
                                const int32_t* tokens, const int32_t* wanted, int num_wanted,
                                float* logits);

namespace outrider {

// The logit of tokens that are not drafted, as in drafters/common/growth.py.
constexpr float NOT_DRAFTED = -1e10f;

// As Role in core/rng.py.
enum Role { DRAFT, ACCEPT, NEXT, POSITION };
enum Rule { TOKEN, BLOCK, MATCH, COUPLED };

// Mirrored by `MemoryStruct` in rounds.py: one model, its arena and room for the plan of a pass.
struct Memory {
    const void* decoder;
    Pass pass;
    int32_t *tokens, *positions, *slots, *seq, *visible, *wanted;
    float* logits;
    // Of draft heads (forward.cpp): the states that a pass reads and leaves. Null for others.
    float *states, *own;
    // The ids that logits are of, where a draft model or heads lack some of the vocabulary, else null.
    const int64_t* ids;

    // Starts a pass that packs no token yet.
    void clear() {
        pass.num_tokens = 0;
        num_wanted = 0;
    }

    int slot(int row, int place) const {
        const int size = pass.page_size;
        const int32_t* pages = pass.pages + static_cast<int64_t>(row) * pass.num_page_columns;
        return pages[place / size] * size + place % size;
    }

    void pack(int row, int token, int position, bool wants) {
        const int n = pass.num_tokens++;
        tokens[n] = token;
        positions[n] = position;
        slots[n] = slot(row, position);
        seq[n] = row;
        visible[n] = position + 1;
        if (wants) wanted[num_wanted++] = n;
    }

    // Numbers of a row that are of no id never win.
    bool run() const {
        if (outrider_forward(decoder, &pass, tokens, wanted, num_wanted, logits) != -1)
            return false;
        for (int64_t m = 0; m < num_wanted && num_ids < num_logits; ++m)
            std::fill(logits + m * num_logits + num_ids, logits + (m + 1) * num_logits,
                      -std::numeric_limits<float>::infinity());
        return true;
    }

    // Gives the next token to be packed the state that the last pass left at its wanted row `m`.
    void carry(int m) {
        if (states == nullptr) return;
        const int64_t size = state_size;
        std::memcpy(states + pass.num_tokens * size, own + wanted[m] * size, sizeof(float) * size);
    }

    int64_t token(int64_t best) const { return ids == nullptr || best < 0 ? best : ids[best]; }

    // A row of logits over the whole vocabulary, in `out` if it has to be made.
    const float* spread(const float* row, float* out, int vocab_size) const {
        if (ids == nullptr) return row;
        std::fill_n(out, vocab_size, NOT_DRAFTED);
        for (int w = 0; w < num_ids; ++w) out[ids[w]] = row[w];
        return out;
    }

    // Logits are rows of `num_logits`, of which the first `num_ids` are of some id.
    int32_t num_wanted, num_logits, state_size, num_ids;
};

// Mirrored by `ShapingStruct` in rounds.py: what bias, penalties, masks and bans of core/logits.py do to a
// row. Ids that the sequence has are listed once, with how often its text has them. Masks have a row
// of `allowed` for each row of logits, bans the ids from one of `ban_starts` to the next; null is none.
struct Shaping {
    const int32_t *bias_ids, *seen_ids;
    const float *biases, *counts;
    const uint8_t* allowed;
    const int32_t *ends, *banned, *ban_starts;
    // Writes into this structure, the one at `index`, the masks and bans of `count` nodes of a draft that
    // grows, each after `depth` tokens of `paths`; 0 if it failed. Null where there are none.
    int32_t (*find_limits)(int32_t index, const int32_t* paths, int32_t count, int32_t depth);
    int32_t num_biases, num_seen, num_ends, index;
    float repetition, frequency, presence, unused;

    // Of a row of `size` logits after `num_drafted` tokens; ids beyond it have none.
    void operator()(float* logits, int64_t size, const int32_t* drafted, int num_drafted) const;
    // Of row `row` of a sequence, after the change above.
    void limit(float* logits, int64_t size, int row) const;
    // Of `count` rows of `memory`, whose nodes follow `depth` tokens of `paths` each: in place, or, where
    // they are of some ids alone, over the vocabulary in `wide`. Null if masks or bans failed.
    float* shape(const Memory& memory, float* logits, int count, const int32_t* paths, int depth,
                 int vocab_size, std::vector<float>& wide) const;
};

// Mirrored by `Row` in rounds.py: one sequence. What a model has not read begins in its
// memory's `tokens` at the sum of the counts before. `next` is the target's own token.
struct Row {
    uint64_t seed;
    uint32_t sample, start;
    float temperature;    // 0 is greedy
    int32_t num_drafted;  // tokens to draft, or drafted already: MOST_NODES at most
    int32_t target_length, target_unread, draft_length, draft_unread;
    int32_t num_accepted, next;
    int32_t wants_laws;  // whether all distributions are to lie in place of logits
    // Of a draft that branches off a staged one: the first of the places of its own, which follow what
    // is staged; it sees them and the `draft_length` places before the branch. 0: it goes on there.
    int32_t branch_place;
    int32_t rule, unused;
    int64_t top_k;               // 0 keeps all
    double top_p, min_p;
    const Shaping* shaping;  // null changes no logits
    const int32_t* parents;  // of each node of a tree that was drafted already; null is a chain
    // [num_drafted][vocabulary], what each node was or is drawn from; null where they are chosen.
    float* drawn_from;

    bool greedy() const { return temperature == 0; }
    int parent(int node) const { return parents == nullptr ? node - 1 : parents[node]; }
    // The first child of `node` from `first` on; `num_drafted` if there is none.
    int child(int node, int first) const {
        while (first < num_drafted && parent(first) != node) ++first;
        return first;
    }
    double uniform(uint32_t from, int node, Role role) const {
        return philox_uniform(seed, node + 1, from, sample, role);
    }
    bool filters(int64_t vocab_size) const {
        return (top_k > 0 && top_k < vocab_size) || top_p < 1 || min_p > 0;
    }
    // The winner of the race at a place, `depth` tokens after the round's start.
    int64_t race(Team* team, const float* weights, int depth, int64_t size) const {
        return outrider_race(team, weights, seed, start + depth, sample, size);
    }
    // The token of a draft's node at such a place.
    int64_t draw(Team* team, const float* weights, int node, int depth, int64_t size) const {
        if (rule == COUPLED) return race(team, weights, depth, size);
        return outrider_pick(team, weights, uniform(start, node, DRAFT), size);
    }
    bool coin(double probability, int node) const {
        return probability >= 1 || uniform(start, node, ACCEPT) < probability;
    }
};

// Mirrored by `RoundStruct` in rounds.py. Without a `draft` memory the drafts are given. `drafts` and
// `paths`, the nodes that were kept, have room for `most_drafted` a row.
struct Round {
    Team* team;
    Memory *target, *draft;
    Row* rows;
    // The mask, or -1 for none, is read in place of tokens that are not drafted yet, so that one pass drafts
    // all; it follows the pending token.
    int32_t num_rows, most_drafted, vocab_size, mask_token;
    int32_t *drafts, *paths, *unread_target, *unread_draft;
    float* leftover;  // [vocabulary]
    int64_t* best;    // room for an argmax of every logits row
    double draft_seconds, verify_seconds;
    // The target's likeliest tokens after each row of logits, as trees.cpp ranks them, and their shares.
    int32_t* likely;
    float* shares;
    int32_t num_likely, unused;

    bool at_once() const { return mask_token >= 0; }
    int32_t* drafted(int row) const { return drafts + static_cast<int64_t>(row) * most_drafted; }
    int32_t* path(int row) const { return paths + static_cast<int64_t>(row) * most_drafted; }
};

// `count` distributions of `size` numbers as core/sampling.py makes them; `out` may be `logits`
// (judge.cpp).
void make_laws(Team* team, const Row& row, const float* logits, float* out, int count,
               int64_t size);
// The token that follows the `depth` drafted ones of a row's chain, by a row of logits of `memory`, whose first
// maximum is `best`; these are shaped first if the draft `shapes` them. -1 if some number is none, or masks
// failed (shaping.cpp).
int64_t next_token(Team* team, const Memory& memory, const Row& row, float* logits, int64_t best,
                   const int32_t* drafted, int depth, bool shapes, int vocab_size);
// Decides row `index` of the round, whose rows of logits lie at `logits` and become distributions.
// False if one that is looked at is none.
bool judge(const Round& round, int index, float* logits);

}  // namespace outrider
