// A greedy draft tree while it grows (kernels/native/sampling.py; core/sampling.py defines it).
#pragma once

#include <cstdint>

#include "team.h"

namespace outrider {

constexpr int MOST_NODES = 256, MOST_WIDTH = 16;
constexpr int ROOT = -1;

// Mirrored by `TreeStruct` in kernels/native/sampling.py. Nodes are sorted, the worthiest first and, of
// equal ones, those that were found first; so parents come before children, and are given by index.
struct Tree {
    int32_t num_nodes, most_depth, width;  // limits
    float sharpness;
    int32_t num_kept, depth, num_level, unused;
    double least_read;  // no node that is worth less is read
    double worths[MOST_NODES];
    int32_t tokens[MOST_NODES], parents[MOST_NODES];
    // The nodes that are read next, and where in the level before their parents stand. At first the
    // root alone.
    int32_t level[MOST_WIDTH], above[MOST_WIDTH];

    // Looks at what follows the nodes of the level, by a row of logits each. Whether all numbers of
    // these were some; if not, the tree is no use any more.
    bool grow(Team& team, const float* logits, int64_t vocab_size);
};

}  // namespace outrider

// Tree::grow on the team that serves the caller.
extern "C" int outrider_grow_tree(outrider::Team* team, outrider::Tree* tree, const float* logits,
                                  int64_t vocab_size);
extern "C" int outrider_rank(outrider::Team* team, const float* logits, int num_rows,
                             int64_t vocab_size, int most, float sharpness, int32_t* tokens,
                             float* shares);
