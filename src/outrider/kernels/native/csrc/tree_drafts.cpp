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

#include "drawn_trees.h"
#include "sights.h"

namespace outrider {

namespace {

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
        d_.name_tokens();
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
            float* logits = memory_.logits + at * memory_.num_logits;
            if (!grow(d_, row, logits)) return false;
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
                const int32_t own = d_.token(row, tree.level[i]);
                const Sight& sight = readings_[b].sights[parent];
                next.sights.push_back(pass_.pack(b, own, place, sight, true));
                stage(row, own, readings_[b].first_staged + parent);
            }
            readings_[b] = std::move(next);
        }
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
