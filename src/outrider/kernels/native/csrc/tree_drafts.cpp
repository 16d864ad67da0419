// Trees of a batch in one call: the pass over what is new in each text, then a pass a level.
//
// Passes are those of forward.cpp, greedy nodes are chosen by trees.cpp, and others are drawn here,
// as drafters/common/growth.py defines it; so trees are those that Python grows level by level. What is
// saved is the way through Python between them. Only heads that know fewer ids than the target may
// differ in greedy trees, where worths are all but equal: here a distribution is summed over those
// ids alone, and ties go to the first of them, not to the lowest id of the target. Memory is not
// committed here.
#include <algorithm>
#include <vector>

#include "sights.h"

namespace outrider {

namespace {

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
};

// The nodes of a level's tree that are drawn by what follows each of them: siblings one by one, each
// of what its elder ones left.
class Draws {
  public:
    Draws(const TreeDrafts& drafts, const TreeRow& row, const float* logits)
        : d_(drafts), tree_(*row.tree), drawing_(*row.drawing), row_(*drawing_.row),
          logits_(logits) {
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
            const int64_t start = static_cast<int64_t>(at) * d_.memory->num_logits;
            const float* logits = d_.memory->spread(logits_ + start, own, d_.vocab_size);
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
    // Of each node of the level, its newest child; ROOT while it has none.
    int32_t newest_[MOST_WIDTH];
    int32_t level_[MOST_WIDTH], above_[MOST_WIDTH], num_level_ = 0;
};

// The nodes of one row that were read last: their sights, the first one's place among all that was
// staged, and its row among the pass's logits.
struct Reading {
    std::vector<Sight> sights;
    int32_t first_staged = 0;
    int first_row = 0;
};

class Growth {
  public:
    explicit Growth(const TreeDrafts& drafts)
        : d_(drafts), memory_(*drafts.memory), pass_(memory_), readings_(drafts.num_rows) {}

    // False if some numbers are none, or a token is not in the vocabulary.
    bool operator()() {
        read_texts();
        while (memory_.pass.num_tokens > 0) {
            if (!pass_.run() || !choose()) return false;
            read_levels();
        }
        for (int b = 0; b < d_.num_rows; ++b) {
            Tree& tree = *d_.rows[b].tree;
            for (int i = 0; i < tree.num_kept; ++i) tree.tokens[i] = token(d_.rows[b], i);
        }
        return true;
    }

  private:
    void read_texts() {
        const int32_t* unread = d_.unread;
        for (int b = 0; b < d_.num_rows; ++b) {
            TreeRow& row = d_.rows[b];
            row.num_staged = 0;
            readings_[b].first_row = memory_.num_wanted;
            Sight sight = {row.length, {}};
            for (int i = 0; i < row.num_unread; ++i) {
                sight = pass_.pack(b, *unread, row.length + i, sight, i == row.num_unread - 1);
                stage(row, *unread++, i - 1);
            }
            readings_[b].sights.assign(1, sight);
            readings_[b].first_staged = row.num_unread - 1;
        }
    }

    bool choose() {
        for (int b = 0; b < d_.num_rows; ++b) {
            const TreeRow& row = d_.rows[b];
            if (row.tree->num_level == 0) continue;
            const int64_t at = readings_[b].first_row;
            const float* logits = memory_.logits + at * memory_.num_logits;
            const bool grown =
                row.drawing != nullptr
                    ? Draws(d_, row, logits)()
                    : outrider_grow_tree(d_.team, row.tree, logits, memory_.num_logits);
            if (!grown) return false;
        }
        return true;
    }

    // Packs the next level of every tree that has one.
    void read_levels() {
        const std::vector<int32_t> above(memory_.wanted, memory_.wanted + memory_.num_wanted);
        pass_.clear();
        for (int b = 0; b < d_.num_rows; ++b) {
            TreeRow& row = d_.rows[b];
            const Tree& tree = *row.tree;
            Reading next;
            next.first_row = memory_.num_wanted;
            next.first_staged = row.num_staged;
            for (int i = 0; i < tree.num_level; ++i) {
                const int parent = tree.above[i], place = row.length + row.num_staged;
                carry(above[readings_[b].first_row + parent]);
                const int32_t own = token(row, tree.level[i]);
                const Sight& sight = readings_[b].sights[parent];
                next.sights.push_back(pass_.pack(b, own, place, sight, true));
                stage(row, own, readings_[b].first_staged + parent);
            }
            readings_[b] = std::move(next);
        }
    }

    // Of heads that know fewer ids, greedy nodes have their own numbers.
    int32_t token(const TreeRow& row, int node) const {
        const int32_t own = row.tree->tokens[node];
        return row.drawing != nullptr ? own : static_cast<int32_t>(memory_.token(own));
    }

    // Gives the next token to be packed the state that the last pass left at its token `n`.
    void carry(int32_t n) {
        if (memory_.states == nullptr) return;
        const int64_t size = memory_.state_size;
        std::memcpy(memory_.states + memory_.pass.num_tokens * size, memory_.own + n * size,
                    sizeof(float) * size);
    }

    static void stage(TreeRow& row, int32_t token, int32_t parent) {
        row.tokens[row.num_staged] = token;
        row.parents[row.num_staged++] = parent;
    }

    const TreeDrafts& d_;
    Memory& memory_;
    SightedPass pass_;
    std::vector<Reading> readings_;
};

}  // namespace

}  // namespace outrider

// Whether all numbers were some and all tokens in the vocabulary. If not, nothing counts.
extern "C" int outrider_tree_drafts(const outrider::TreeDrafts* drafts) {
    return outrider::Growth(*drafts)();
}
