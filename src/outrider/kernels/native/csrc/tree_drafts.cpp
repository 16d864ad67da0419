// Greedy trees of a batch in one call: the pass over what is new in each text, then a pass a level.
//
// Passes are those of forward.cpp and nodes are chosen by trees.cpp, so trees are those that Python
// grows level by level; what is saved is the way through Python between them. Only heads that know
// fewer ids than the target may differ where worths are all but equal: here a distribution is summed over
// those ids alone, and ties go to the first of them, not to the lowest id of the target. Memory is
// not committed here.
#include <vector>

#include "round.h"
#include "trees.h"

namespace outrider {

namespace {

// Mirrored by `TreeRow` in kernels/native/trees.py: one sequence. What was read is told in `tokens`
// and `parents`, with room for all that may be; parents are places in there, or ROOT.
struct TreeRow {
    Tree* tree;
    int32_t *tokens, *parents;
    int32_t length, num_unread, num_staged, unused;
};

// Mirrored by `TreeDrafts` in kernels/native/trees.py.
struct TreeDrafts {
    Team* team;
    Memory* memory;
    TreeRow* rows;
    const int32_t* unread;
    int32_t num_rows, unused;
};

// What a node sees of its text, itself included: the first `visible` places, then these slots.
struct Sight {
    int32_t visible = 0;
    std::vector<int32_t> extra;

    int32_t num_keys() const { return visible + static_cast<int32_t>(extra.size()); }

    // What a child sees that is staged at `place` of the sequence, in `slot`.
    Sight followed_by(int32_t place, int32_t slot) const {
        Sight child = *this;
        if (place == visible) ++child.visible;
        else child.extra.push_back(slot);
        return child;
    }
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
        : d_(drafts), memory_(*drafts.memory), readings_(drafts.num_rows) {}

    // The pass is not to point to vectors that are gone.
    ~Growth() { clear(); }

    // False if some numbers are none, or a token is not in the vocabulary.
    bool operator()() {
        read_texts();
        while (memory_.pass.num_tokens > 0) {
            if (!memory_.run() || !choose()) return false;
            read_levels();
        }
        for (int b = 0; b < d_.num_rows; ++b) {
            Tree& tree = *d_.rows[b].tree;
            for (int i = 0; i < tree.num_kept; ++i)
                tree.tokens[i] = static_cast<int32_t>(memory_.token(tree.tokens[i]));
        }
        return true;
    }

  private:
    void clear() {
        memory_.clear();
        memory_.pass.extra_offsets = memory_.pass.extra_slots = nullptr;
    }

    void read_texts() {
        clear();
        const int32_t* unread = d_.unread;
        for (int b = 0; b < d_.num_rows; ++b) {
            TreeRow& row = d_.rows[b];
            row.num_staged = 0;
            for (int i = 0; i < row.num_unread; ++i) {
                const bool is_last = i == row.num_unread - 1;
                if (is_last) readings_[b].first_row = memory_.num_wanted;
                memory_.pack(b, *unread, row.length + i, is_last);
                stage(row, *unread++, i - 1);
            }
            readings_[b].sights.assign(1, {row.length + row.num_unread, {}});
            readings_[b].first_staged = row.num_unread - 1;
        }
    }

    bool choose() {
        for (int b = 0; b < d_.num_rows; ++b) {
            Tree& tree = *d_.rows[b].tree;
            if (tree.num_level == 0) continue;
            const int64_t at = readings_[b].first_row;
            const float* logits = memory_.logits + at * memory_.num_logits;
            if (!outrider_grow_tree(d_.team, &tree, logits, memory_.num_logits)) return false;
        }
        return true;
    }

    // Packs the next level of every tree that has one.
    void read_levels() {
        const std::vector<int32_t> above(memory_.wanted, memory_.wanted + memory_.num_wanted);
        clear();
        offsets_.assign(1, 0);
        extra_.clear();
        for (int b = 0; b < d_.num_rows; ++b) {
            TreeRow& row = d_.rows[b];
            const Tree& tree = *row.tree;
            Reading next;
            next.first_row = memory_.num_wanted;
            next.first_staged = row.num_staged;
            for (int i = 0; i < tree.num_level; ++i) {
                const int parent = tree.above[i];
                carry(above[readings_[b].first_row + parent]);
                const auto token = static_cast<int32_t>(memory_.token(tree.tokens[tree.level[i]]));
                next.sights.push_back(pack(b, token, readings_[b].sights[parent]));
                stage(row, token, readings_[b].first_staged + parent);
            }
            readings_[b] = std::move(next);
        }
        memory_.pass.extra_offsets = offsets_.data();
        memory_.pass.extra_slots = extra_.data();
    }

    // Gives the next token to be packed the state that the last pass left at its token `n`.
    void carry(int32_t n) {
        if (memory_.states == nullptr) return;
        const int64_t size = memory_.state_size;
        std::memcpy(memory_.states + memory_.pass.num_tokens * size, memory_.own + n * size,
                    sizeof(float) * size);
    }

    Sight pack(int b, int32_t token, const Sight& above) {
        const int n = memory_.pass.num_tokens, place = d_.rows[b].length + d_.rows[b].num_staged;
        memory_.pack(b, token, place, true);
        Sight own = above.followed_by(place, memory_.slots[n]);
        memory_.positions[n] = own.num_keys() - 1;
        memory_.visible[n] = own.visible;
        extra_.insert(extra_.end(), own.extra.begin(), own.extra.end());
        offsets_.push_back(static_cast<int32_t>(extra_.size()));
        return own;
    }

    static void stage(TreeRow& row, int32_t token, int32_t parent) {
        row.tokens[row.num_staged] = token;
        row.parents[row.num_staged++] = parent;
    }

    const TreeDrafts& d_;
    Memory& memory_;
    std::vector<Reading> readings_;
    std::vector<int32_t> offsets_, extra_;
};

}  // namespace

}  // namespace outrider

// Whether all numbers were some and all tokens in the vocabulary. If not, nothing counts.
extern "C" int outrider_tree_drafts(const outrider::TreeDrafts* drafts) {
    return outrider::Growth(*drafts)();
}
