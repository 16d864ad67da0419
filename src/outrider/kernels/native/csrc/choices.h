// Chains and trees of texts, chosen from logits that paths give, of the likeliest or of drawn tokens.
//
// Tokens are chosen as in round.cpp and tree_drafts.cpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "choice.h"
#include "drawn_trees.h"
#include "vectors.h"

namespace outrider {

// Paths below texts, each with its newest token and a row of `width` numbers: of each text one, until
// others are followed.
class Paths {
  public:
    Paths(int num, int width)
        : num_(num), width_(width), texts_(num), tokens_(num),
          state_(static_cast<size_t>(num) * width) {
        for (int i = 0; i < num; ++i) texts_[i] = i;
    }

    int num() const { return num_; }
    int text(int i) const { return texts_[i]; }
    void put(int i, int64_t token) { tokens_[i] = token; }

    // Goes on along other paths: of `above[i]` one with the token `tokens[i]`, for each i.
    void follow(const std::vector<int>& above, const std::vector<int64_t>& tokens) {
        std::vector<int> texts(above.size());
        std::vector<float> state(above.size() * width_);
        for (size_t i = 0; i < above.size(); ++i) {
            texts[i] = texts_[above[i]];
            std::copy_n(state_.data() + int64_t{above[i]} * width_, width_,
                        state.data() + i * width_);
        }
        num_ = static_cast<int>(above.size());
        texts_ = std::move(texts), state_ = std::move(state), tokens_ = tokens;
        are_texts_ = false;
    }

  protected:
    int num_, width_;
    bool are_texts_ = true;
    std::vector<int> texts_;
    std::vector<int64_t> tokens_;
    std::vector<float> state_;
};

inline void read_row(const void* table, int dtype, int64_t index, int size, float* to) {
    const int64_t at = index * size;
    switch (dtype) {
        case FLOAT32: return copy_row(static_cast<const float*>(table) + at, to, size);
        case BFLOAT16: return copy_row(static_cast<const BFloat16*>(table) + at, to, size);
        default: return copy_row(static_cast<const Float16*>(table) + at, to, size);
    }
}

// The ids that logits are of.
inline Memory memory_of(const Choice& c) {
    Memory ids{};
    ids.ids = c.ids;
    ids.num_ids = ids.num_logits = c.num_logits;
    return ids;
}

// The functions below return false if some numbers are none, or masks failed. Where all positions are drafted
// at once, `shaped` are the logits of the first one, over the vocabulary, if anything shapes them, else null.
inline bool rank_positions(const Choice& c, const WideTree& tree, int text, const float* shaped) {
    for (int depth = 0; depth < tree.depth; ++depth) {
        const int64_t at = int64_t{depth} * tree.num_ranks;
        int32_t* tokens = tree.tokens + at;
        const bool is_shaped = depth == 0 && shaped != nullptr;
        if (!outrider_rank(c.team, is_shaped ? shaped : c.logits_of(text, depth), 1,
                           is_shaped ? c.vocab_size : c.num_logits, tree.num_ranks, 1.0f, tokens,
                           tree.shares + at))
            return false;
        for (int rank = 0; rank < tree.num_ranks && !is_shaped; ++rank)
            tokens[rank] = static_cast<int32_t>(c.token(tokens[rank]));
    }
    return true;
}

// Siblings are drawn one by one, each of what its elder ones left; drafters/common/growth.py defines it.
inline bool draw_nodes(const Choice& c, WideTree& tree, int text, const float* shaped) {
    const Row& row = *tree.row;
    const auto q = [&](int node) { return row.drawn_from + int64_t{node} * c.vocab_size; };
    // The newest child of each node, the root's first; the first node drawn of a position's whole
    // distribution.
    std::vector<int> newest(tree.num_places + 1, ROOT), whole(tree.depth, ROOT);
    tree.num_nodes = 0;
    for (int place = 0; place < tree.num_places; ++place) {
        const int above = tree.parents[place], depth = tree.depths[place], node = tree.num_nodes;
        const int parent = above == ROOT ? ROOT : tree.nodes[above];
        tree.nodes[place] = NOT_DRAWN;
        if (parent == NOT_DRAWN) continue;
        int& elder = newest[parent + 1];
        if (elder == ROOT && whole[depth] == ROOT) {
            const float* logits = depth == 0 ? shaped : nullptr;
            if (logits == nullptr)
                logits = memory_of(c).spread(c.logits_of(text, depth), q(node), c.vocab_size);
            make_laws(c.team, row, logits, q(node), 1, c.vocab_size);
            whole[depth] = node;
        } else if (elder == ROOT) {
            std::copy_n(q(whole[depth]), c.vocab_size, q(node));
        } else {
            const double total = outrider_leftover(c.team, q(elder), nullptr, tree.tokens[elder],
                                                   1.0, q(node), c.vocab_size);
            if (!(total > 0)) continue;
            for (int v = 0; v < c.vocab_size; ++v) q(node)[v] /= static_cast<float>(total);
        }
        const int64_t token = row.draw(c.team, q(node), node, depth, c.vocab_size);
        if (token < 0) return false;
        tree.tokens[node] = static_cast<int32_t>(token);
        tree.nodes[place] = elder = node;
        ++tree.num_nodes;
    }
    return true;
}

inline bool shape_trees(const Choice& c) {
    for (int text = 0; text < c.num_texts; ++text) {
        WideTree& tree = c.wide[text];
        const Shaping* shaping = tree.row->shaping;
        std::vector<float> wide;
        float* shaped = nullptr;
        if (shaping != nullptr) {
            shaped = shaping->shape(memory_of(c), c.logits_of(text, 0), 1, nullptr, 0, c.vocab_size,
                                    wide);
            if (shaped == nullptr) return false;
        }
        if (!(tree.row->greedy() ? rank_positions(c, tree, text, shaped)
                                 : draw_nodes(c, tree, text, shaped)))
            return false;
    }
    return true;
}

// `path.logits(depth)` are rows after the newest token of each path, which may be written into.
template <class Path>
bool choose_chains(const Choice& c, Path& path) {
    const int num = c.num_texts;
    int deepest = 0;
    for (int i = 0; i < num; ++i) deepest = std::max(deepest, c.rows[i].num_drafted);
    std::vector<int64_t> best(num);
    const Memory ids = memory_of(c);
    for (int depth = 0; depth < deepest; ++depth) {
        float* logits = path.logits(depth);
        outrider_argmax(c.team, logits, best.data(), num, c.num_logits);
        for (int i = 0; i < num; ++i) {
            if (c.rows[i].num_drafted <= depth) continue;
            int32_t* drafted = c.drafted + int64_t{i} * c.depth;
            const bool shapes = depth == 0 || !c.at_once;
            // Of shaped logits those count that masks leave.
            if (best[i] < 0 && !(shapes && c.rows[i].shaping != nullptr)) return false;
            const int64_t token = next_token(c.team, ids, c.rows[i], logits + int64_t{i} * c.num_logits,
                                             best[i], drafted, depth, shapes, c.vocab_size);
            if (token < 0) return false;
            drafted[depth] = static_cast<int32_t>(token);
            path.put(i, token);
        }
    }
    return true;
}

template <class Path>
bool grow_trees(const Choice& c, Path& path) {
    Memory ids = memory_of(c);
    const TreeDrafts drafts{c.team, &ids, c.trees, nullptr, c.num_texts, c.vocab_size};
    for (int depth = 0; path.num() > 0; ++depth) {
        float* logits = path.logits(depth);
        std::vector<int> above;
        std::vector<int64_t> tokens;
        for (int i = 0, count; i < path.num(); i += count) {
            const TreeRow& row = c.trees[path.text(i)];
            const Tree& tree = *row.tree;
            count = tree.num_level;
            if (!grow(drafts, row, logits + int64_t{i} * c.num_logits)) return false;
            for (int n = 0; n < tree.num_level; ++n) {
                above.push_back(i + tree.above[n]);
                tokens.push_back(drafts.token(row, tree.level[n]));
            }
        }
        path.follow(above, tokens);
    }
    drafts.name_tokens();
    return true;
}

template <class Path>
bool choose(const Choice& c, Path& path) {
    if (c.wide != nullptr) return shape_trees(c);
    return c.trees != nullptr ? grow_trees(c, path) : choose_chains(c, path);
}

}  // namespace outrider
