// Nodes of greedy draft trees: the likeliest tokens after each node of a level, and the worthiest
// nodes of all so far. core/sampling.py has the definition.
//
// A vocabulary is never sorted: what is not above the last of the likeliest so far is passed over, a
// few vectors at a time. Rows are shared among threads, and a row's bits depend on that row alone.
#include "trees.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "vectors.h"

namespace outrider {

namespace {

constexpr float INF = std::numeric_limits<float>::infinity();
// Numbers compared with a bound at once; exponentials that are added in float32.
constexpr int64_t CHUNK = 4 * LANES, BLOCK = 64 * CHUNK;

inline Vec load_logits(const float* from, int64_t count) {
    if (count >= LANES) return load(from);
    Vec vec = splat(-INF);
    std::memcpy(&vec, from, sizeof(float) * count);
    return vec;
}

// The likeliest tokens after one node, of equal ones the first, and their chances.
class Ranks {
  public:
    int count() const { return count_; }
    int32_t token(int rank) const { return tokens_[rank]; }
    float share(int rank) const { return shares_[rank]; }

    // False if a number is none. Tokens without any mass are left out.
    bool read(const float* logits, int64_t size, int most, float sharpness) {
        count_ = 0;
        most_ = most;
        IntVec is_nan = {};
        for (int64_t start = 0; start < size; start += CHUNK) {
            const int64_t end = std::min(start + CHUNK, size);
            Vec top = splat(-INF);
            for (int64_t i = start; i < end; i += LANES) {
                const Vec logit = load_logits(logits + i, end - i);
                is_nan |= logit != logit;
                top = larger(logit, top);
            }
            if (!(largest_lane(top) > bound())) continue;
            for (int64_t i = start; i < end; ++i)
                if (logits[i] > bound()) offer(logits[i], static_cast<int32_t>(i));
        }
        for (int lane = 0; lane < LANES; ++lane)
            if (is_nan[lane]) return false;
        share_out(logits, size, sharpness);
        return true;
    }

  private:
    float bound() const { return count_ < most_ ? -INF : logits_[count_ - 1]; }

    // Of equal logits the first stays in front.
    void offer(float logit, int32_t token) {
        int at = count_ < most_ ? count_++ : count_ - 1;
        for (; at > 0 && logits_[at - 1] < logit; --at) {
            logits_[at] = logits_[at - 1];
            tokens_[at] = tokens_[at - 1];
        }
        logits_[at] = logit;
        tokens_[at] = token;
    }

    void share_out(const float* logits, int64_t size, float sharpness) {
        if (count_ == 0 || logits_[0] == INF) {
            count_ = 0;
            return;
        }
        const float largest = logits_[0];
        double total = 0;
        for (int64_t start = 0; start < size; start += BLOCK) {
            const int64_t end = std::min(start + BLOCK, size);
            Vec sums[2] = {};
            for (int64_t i = start, chain = 0; i < end; i += LANES, chain ^= 1)
                sums[chain] += exp((load_logits(logits + i, end - i) - largest) * sharpness);
            total += sum_of_lanes(sums[0] + sums[1]);
        }
        for (int rank = 0; rank < count_; ++rank) {
            const double power = std::exp(double{sharpness} * (double{logits_[rank]} - largest));
            shares_[rank] = static_cast<float>(std::min(power / total, 1.0));
        }
    }

    int count_, most_;
    float logits_[MOST_WIDTH], shares_[MOST_WIDTH];
    int32_t tokens_[MOST_WIDTH];
};

// Ranks of `num_rows` nodes; false if a number is none.
bool rank_rows(Team& team, const float* logits, int num_rows, int64_t size, int most,
               float sharpness, Ranks* ranks) {
    std::atomic<bool> is_broken{false};
    team.run(num_rows, 1, [&](int first, int last, int) {
        for (int row = first; row < last; ++row)
            if (!ranks[row].read(logits + row * size, size, most, sharpness)) is_broken = true;
    });
    return !is_broken;
}

// A node that was just found, below the level's node `row`; `place` is its own among those kept.
struct Found {
    double worth;
    int32_t token, row, order, place;

    bool operator<(const Found& other) const {
        return worth != other.worth ? worth > other.worth : order < other.order;
    }
};

// What may be kept of all that follows the level's nodes, the worthiest first; how many they are.
int find(const Tree& tree, const Ranks* ranks, Found* found) {
    int num_found = 0;
    // What is not worthier than the last of a full tree can never be kept.
    const double least = tree.num_kept < tree.num_nodes ? 0.0 : tree.worths[tree.num_kept - 1];
    for (int row = 0; row < tree.num_level; ++row) {
        const int parent = tree.level[row];
        const double worth_above = parent == ROOT ? 1.0 : tree.worths[parent];
        for (int rank = 0; rank < ranks[row].count(); ++rank) {
            const double worth = worth_above * ranks[row].share(rank);
            if (!(worth > least)) continue;
            found[num_found] = {worth, ranks[row].token(rank), row, num_found, ROOT};
            ++num_found;
        }
    }
    std::sort(found, found + num_found);
    return num_found;
}

// Keeps the worthiest of the tree's nodes and of these. Both lists are sorted; of equal nodes the
// older ones come first. How many of the found ones are kept: those in front.
int merge(Tree& tree, Found* found, int num_found) {
    const Tree old = tree;
    int32_t moved[MOST_NODES];
    int at = 0, next = 0;
    for (tree.num_kept = 0; tree.num_kept < tree.num_nodes; ++tree.num_kept) {
        const int place = tree.num_kept;
        const bool has_old = at < old.num_kept, has_new = next < num_found;
        if (!has_old && !has_new) break;
        const bool takes_old = has_old && (!has_new || old.worths[at] >= found[next].worth);
        const int parent = takes_old ? old.parents[at] : old.level[found[next].row];
        tree.worths[place] = takes_old ? old.worths[at] : found[next].worth;
        tree.tokens[place] = takes_old ? old.tokens[at] : found[next].token;
        tree.parents[place] = parent == ROOT ? ROOT : moved[parent];
        if (takes_old) moved[at++] = place;
        else found[next++].place = place;
    }
    return next;
}

// Makes a level of the worthiest of the nodes that were found and kept, if there is to be one more.
void descend(Tree& tree, const Found* found, int count) {
    tree.num_level = 0;
    if (++tree.depth >= tree.most_depth) return;
    for (int i = 0; i < std::min(count, tree.width); ++i) {
        if (found[i].worth < tree.least_read) return;
        tree.level[i] = found[i].place;
        tree.above[i] = found[i].row;
        ++tree.num_level;
    }
}

}  // namespace

bool Tree::grow(Team& team, const float* logits, int64_t vocab_size) {
    Ranks ranks[MOST_WIDTH];
    const int most = static_cast<int>(std::min<int64_t>(std::min(width, num_nodes), vocab_size));
    if (!rank_rows(team, logits, num_level, vocab_size, most, sharpness, ranks)) return false;
    Found found[MOST_WIDTH * MOST_WIDTH];
    const int num_found = find(*this, ranks, found);
    descend(*this, found, merge(*this, found, num_found));
    return true;
}

}  // namespace outrider

using namespace outrider;

extern "C" {

// Whether all numbers were some.
int outrider_grow_tree(Team* team, Tree* tree, const float* logits, int64_t vocab_size) {
    team = &team->here();
    std::lock_guard<std::mutex> lock(team->entry());
    return tree->grow(*team, logits, vocab_size);
}

// Rows of `most` tokens and their chances, 0 for those that a row lacks. Whether all numbers were
// some.
int outrider_rank(Team* team, const float* logits, int num_rows, int64_t vocab_size, int most,
                  float sharpness, int32_t* tokens, float* shares) {
    team = &team->here();
    std::lock_guard<std::mutex> lock(team->entry());
    Ranks ranks[MOST_WIDTH];
    if (!rank_rows(*team, logits, num_rows, vocab_size, most, sharpness, ranks)) return 0;
    for (int row = 0; row < num_rows; ++row)
        for (int rank = 0; rank < most; ++rank) {
            const bool is_there = rank < ranks[row].count();
            *tokens++ = is_there ? ranks[row].token(rank) : 0;
            *shares++ = is_there ? ranks[row].share(rank) : 0.0f;
        }
    return 1;
}
}
