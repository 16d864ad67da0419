// What a call chooses from logits, as pointers (choices.h chooses it).
#pragma once

#include <cstdint>

#include "team.h"

namespace outrider {

struct Row;
struct TreeRow;

// The tree of a text whose positions are drafted at once. Mirrored by `_Wide` in
// plugins/heads/native_choice.py. A drawn tree has a shape, whose nodes are drawn in its order; for a greedy
// one the likeliest tokens of each position are ranked, of which the caller makes a tree.
struct WideTree {
    const Row* row;
    const int32_t *parents, *depths;  // of the shape's places
    int32_t *nodes, *tokens;          // the node at each place; tokens of nodes, or [depth][ranks]
    float* shares;                    // of ranks
    int32_t depth, num_places, num_ranks, num_nodes;
};

// Mirrored by `ChoiceStruct` in plugins/heads/native_choice.py. How each text's chain is drawn, and the
// tokens of chains, [texts][depth]; or the trees that grow; or those of positions at once. Null where there
// are none.
struct Choice {
    Team* team;
    const Row* rows;
    int32_t* drafted;
    TreeRow* trees;
    WideTree* wide;
    const int64_t* ids;  // tokens by what logits are of; null where that is the token
    float* logits;       // [depth][texts][ids]
    int32_t num_texts, depth, num_logits, vocab_size;
    // Whether logits of later positions depend on no draft; the tokens before them are not known then, so
    // the first position alone is shaped.
    int32_t at_once, unused;

    bool makes() const { return rows != nullptr || trees != nullptr || wide != nullptr; }
    int64_t token(int64_t id) const { return ids == nullptr ? id : ids[id]; }
    float* logits_of(int text, int at) const {
        return logits + (int64_t{at} * num_texts + text) * num_logits;
    }
};

}  // namespace outrider
