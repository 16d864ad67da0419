// Trees of a batch while they grow: greedy ones (trees.h), and nodes that are drawn, as
// drafters/common/growth.py defines it.
#pragma once

#include <algorithm>
#include <vector>

#include "round.h"

namespace outrider {

// Mirrored by `Drawing` in kernels/native/sampling.py: how the nodes of a tree are drawn, in a shape of
// `num_places` that is settled, level by level. `nodes` has the node at each place that was come to.
struct Drawing {
    const Row* row;
    const int32_t* shape;  // parents: places, or ROOT
    int32_t num_places, num_done;
    int32_t nodes[MOST_NODES];

    bool has_children(int place) const {
        return std::find(shape + place + 1, shape + num_places, place) < shape + num_places;
    }
};

// At a place whose distribution had no token left, and at those below it.
constexpr int32_t NOT_DRAWN = -2;

// Mirrored by `TreeRow` in kernels/native/sampling.py: one sequence, whose tree is greedy if there is
// no `drawing`. What was read is told in `tokens` and `parents`, with room for all that may be;
// parents are places in there, or ROOT.
struct TreeRow {
    Tree* tree;
    Drawing* drawing;
    const Shaping* shaping;
    int32_t *tokens, *parents;
    int32_t length, num_unread, num_staged, unused;
};

// Mirrored by `TreeDrafts` in kernels/native/sampling.py.
struct TreeDrafts {
    Team* team;
    Memory* memory;
    TreeRow* rows;
    const int32_t* unread;
    int32_t num_rows, vocab_size;

    // Of heads that know fewer ids, greedy nodes have their own numbers, if nothing shapes them.
    int32_t token(const TreeRow& row, int node) const {
        const int32_t own = row.tree->tokens[node];
        const bool is_named = row.drawing != nullptr || row.shaping != nullptr;
        return is_named ? own : static_cast<int32_t>(memory->token(own));
    }

    // The tokens that lead to each node of the level, as many as the tree is deep.
    std::vector<int32_t> paths(const TreeRow& row) const {
        const Tree& tree = *row.tree;
        std::vector<int32_t> found(int64_t{tree.num_level} * tree.depth);
        for (int i = 0; i < tree.num_level; ++i) {
            int32_t* end = found.data() + int64_t{i + 1} * tree.depth;
            for (int node = tree.level[i]; node != ROOT; node = tree.parents[node])
                *--end = token(row, node);
        }
        return found;
    }

    // Gives all nodes the target's numbers, once trees are grown.
    void name_tokens() const {
        for (int b = 0; b < num_rows; ++b) {
            Tree& tree = *rows[b].tree;
            for (int i = 0; i < tree.num_kept; ++i) tree.tokens[i] = token(rows[b], i);
        }
    }
};

// The nodes of a level's tree that are drawn by what follows each of them: siblings one by one, each
// of what its elder ones left.
class Draws {
  public:
    Draws(const TreeDrafts& drafts, const TreeRow& row, const float* logits)
        : d_(drafts), tree_(*row.tree), drawing_(*row.drawing), row_(*drawing_.row),
          logits_(logits), is_shaped_(row.shaping != nullptr) {
        std::fill_n(newest_, MOST_WIDTH, ROOT);
    }

    // False if some numbers are none. The tree's level is the next one then.
    bool operator()() {
        for (; drawing_.num_done < drawing_.num_places; ++drawing_.num_done) {
            const int place = drawing_.num_done, above = drawing_.shape[place];
            const int parent = above == ROOT ? ROOT : drawing_.nodes[above];
            int32_t& node = drawing_.nodes[place];
            node = NOT_DRAWN;
            if (parent == NOT_DRAWN) continue;
            const int32_t *level = tree_.level, *end = level + tree_.num_level;
            const auto at = static_cast<int>(std::find(level, end, parent) - level);
            if (at == tree_.num_level) break;
            if (!prepare(at)) continue;
            node = newest_[at] = tree_.num_kept++;
            const int64_t token = row_.draw(d_.team, q(node), node, tree_.depth, d_.vocab_size);
            if (token < 0) return false;
            tree_.tokens[node] = static_cast<int32_t>(token);
            tree_.parents[node] = parent;
            if (!drawing_.has_children(place)) continue;
            level_[num_level_] = node;
            above_[num_level_++] = at;
        }
        std::copy_n(level_, num_level_, tree_.level);
        std::copy_n(above_, num_level_, tree_.above);
        tree_.num_level = num_level_;
        ++tree_.depth;
        return true;
    }

  private:
    float* q(int node) const { return row_.drawn_from + static_cast<int64_t>(node) * d_.vocab_size; }

    // Makes what the next child of the level's node `at` is drawn from; false if nothing is left.
    bool prepare(int at) const {
        float* own = q(tree_.num_kept);
        const int newest = newest_[at];
        if (newest == ROOT) {
            const int64_t width = is_shaped_ ? d_.vocab_size : d_.memory->num_logits;
            const float* logits = logits_ + at * width;
            if (!is_shaped_) logits = d_.memory->spread(logits, own, d_.vocab_size);
            make_laws(d_.team, row_, logits, own, 1, d_.vocab_size);
            return true;
        }
        const double total = outrider_leftover(d_.team, q(newest), nullptr, tree_.tokens[newest],
                                               1.0, own, d_.vocab_size);
        const auto divisor = static_cast<float>(total);
        for (int v = 0; total > 0 && v < d_.vocab_size; ++v) own[v] /= divisor;
        return total > 0;
    }

    const TreeDrafts& d_;
    Tree& tree_;
    Drawing& drawing_;
    const Row& row_;
    const float* logits_;
    const bool is_shaped_;
    // Of each node of the level, its newest child; ROOT while it has none.
    int32_t newest_[MOST_WIDTH];
    int32_t level_[MOST_WIDTH], above_[MOST_WIDTH], num_level_ = 0;
};

// Grows a row's tree by the logits after its level, which it may change. False if some numbers are none, or
// masks failed.
inline bool grow(const TreeDrafts& drafts, const TreeRow& row, float* logits) {
    std::vector<float> wide;
    Tree* tree = row.tree;
    if (row.shaping != nullptr)
        logits = row.shaping->shape(*drafts.memory, logits, tree->num_level,
                                    drafts.paths(row).data(), tree->depth, drafts.vocab_size, wide);
    if (logits == nullptr) return false;
    if (row.drawing != nullptr) return Draws(drafts, row, logits)();
    const int width = row.shaping != nullptr ? drafts.vocab_size : drafts.memory->num_logits;
    return outrider_grow_tree(drafts.team, tree, logits, width);
}

}  // namespace outrider
