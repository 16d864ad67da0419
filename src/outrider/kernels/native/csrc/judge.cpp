// The verdict on one row of a round: the rules of verify/exact.py.
//
// A distribution is made when it is looked at: after a refusal nothing reads what follows. If only
// the chance of the drafted token is needed, the distribution is not written.
#include <algorithm>

#include "round.h"

namespace outrider {

// Filters apply as in core/sampling.py.
void make_laws(Team* team, const Row& row, const float* logits, float* out, int count,
               int64_t size) {
    if (row.top_k > 0 && row.top_k < size) {
        outrider_top_k(team, logits, row.top_k, out, count, size);
        logits = out;
    }
    outrider_softmax(team, logits, row.temperature, out, count, size);
    if (row.top_p < 1 || row.min_p > 0)
        outrider_keep_likely(team, out, row.top_p, row.min_p, count, size);
}

namespace {

// By how much rounding may make a coin of the block rule likelier than its share.
constexpr double SLACK = 1e-4;

// Row i + 1 of `logits` is the target's after drafted node i, row 0 after the root.
class Judge {
  public:
    Judge(const Round& round, int index, float* logits)
        : r_(round), row_(round.rows[index]), tokens_(round.drafted(index)),
          path_(round.path(index)), logits_(logits) {}

    // False if the target's distribution is none.
    bool operator()() {
        row_.num_accepted = 0;
        if (row_.wants_laws) make(0, row_.num_drafted + 1);
        if (row_.rule == MATCH || row_.rule == COUPLED) return match();
        const bool is_drawn_chain = row_.drawn_from != nullptr && row_.parents == nullptr;
        return row_.rule == BLOCK && is_drawn_chain && row_.num_drafted > 0 ? block() : token();
    }

  private:
    float* logits(int row) const { return logits_ + static_cast<int64_t>(row) * r_.vocab_size; }

    // The target's distribution, which takes the place of its logits.
    const float* p(int row) {
        if (!made_[row]) make(row, 1);
        return logits(row);
    }

    void make(int row, int count) {
        make_laws(r_.team, row_, logits(row), logits(row), count, r_.vocab_size);
        std::fill_n(made_ + row, count, true);
    }

    // Null where the draft was chosen, not drawn: its distribution is a point mass.
    const float* q(int node) const {
        return row_.drawn_from ? row_.drawn_from + static_cast<int64_t>(node) * r_.vocab_size
                               : nullptr;
    }

    double over_q(double mass, int node) const {
        const double drawn = q(node) ? q(node)[tokens_[node]] : 1.0;
        return drawn > 0 ? mass / drawn : 0.0;
    }

    // p / q of nodes from `node` on, by rows of logits from `row` on.
    void find_ratios(int row, int node, int count, double* ratios) {
        if (!made_[row] && row_.filters(r_.vocab_size)) make(row, count);
        if (made_[row]) {
            for (int i = 0; i < count; ++i) ratios[i] = logits(row + i)[tokens_[node + i]];
        } else {
            outrider_masses(r_.team, logits(row), row_.temperature, tokens_ + node, ratios, count,
                            r_.vocab_size);
        }
        for (int i = 0; i < count; ++i) ratios[i] = over_q(ratios[i], node + i);
    }

    // What `node` leaves of a share of `weights`, in `leftover`; its sum.
    double left(const float* weights, int node, double share) {
        return outrider_leftover(r_.team, weights, q(node), tokens_[node], share, r_.leftover,
                                 r_.vocab_size);
    }

    void keep(int node) { path_[row_.num_accepted++] = node; }

    bool end(int node, const float* weights) {
        const double uniform = row_.uniform(row_.start, node, NEXT);
        return end_with(outrider_pick(r_.team, weights, uniform, r_.vocab_size));
    }

    bool end_with(int64_t next) {
        row_.next = static_cast<int32_t>(next);
        return next >= 0;
    }

    bool token() {
        int node = ROOT;
        // What refused siblings left of the distribution after `node`; all of it if null.
        const float* rest = nullptr;
        for (int child = row_.child(ROOT, 0); child < row_.num_drafted;
             child = row_.child(node, child + 1)) {
            double ratio;
            if (rest == nullptr) find_ratios(node + 1, child, 1, &ratio);
            else ratio = over_q(rest[tokens_[child]], child);
            if (row_.coin(ratio, child)) {
                keep(node = child);
                rest = nullptr;
                continue;
            }
            const double total = left(rest ? rest : p(node + 1), child, 1.0);
            // Only where a drafter gave its token no mass: if nothing is left to draw from, the stages
            // decide.
            if (!(total > 0)) continue;
            const auto divisor = static_cast<float>(total);
            for (int64_t v = 0; v < r_.vocab_size; ++v) r_.leftover[v] /= divisor;
            rest = r_.leftover;
        }
        return end(node, rest ? rest : p(node + 1));
    }

    bool block() {
        double shares[MOST_NODES + 1] = {1.0};
        find_ratios(0, 0, row_.num_drafted, shares + 1);
        for (int node = 0; node < row_.num_drafted; ++node)
            shares[node + 1] = std::min(1.0, shares[node] * shares[node + 1]);
        for (int length = row_.num_drafted; length > 0; --length) {
            // No coin is likelier than its share, so most that fall tails need no look at what is
            // left.
            if (row_.uniform(row_.start, length - 1, ACCEPT) > shares[length] * (1 + SLACK))
                continue;
            double chance = shares[length];
            const float* weights = rest(length, &chance);
            if (row_.coin(chance, length - 1)) return end_block(length, weights);
        }
        double chance = 1.0;
        return end_block(0, rest(0, &chance));
    }

    bool end_block(int length, const float* weights) {
        for (int node = 0; node < length; ++node) keep(node);
        return end(length - 1, weights);
    }

    // What the draft leaves of the share `chance` of the distribution after `length` tokens, and
    // the coin that keeps them.
    const float* rest(int length, double* chance) {
        if (length == row_.num_drafted) return p(length);
        const double share = *chance, total = left(p(length), length, share);
        *chance = total == 0 ? share == 1 : total / (total + 1 - share);
        return total == 0 ? p(length) : r_.leftover;
    }

    // Down the tree along the target's own tokens.
    bool match() {
        for (int node = ROOT;;) {
            const int64_t own = draw_at(row_.num_accepted, p(node + 1));
            int child = row_.child(node, 0);
            while (child < row_.num_drafted && tokens_[child] != own)
                child = row_.child(node, child + 1);
            if (own < 0 || child == row_.num_drafted) return end_with(own);
            keep(node = child);
        }
    }

    // The target's own token `depth` places after the round's start, by numbers of that place.
    int64_t draw_at(int depth, const float* weights) const {
        if (row_.rule == COUPLED) return row_.race(r_.team, weights, depth, r_.vocab_size);
        const double uniform = row_.uniform(row_.start + depth, ROOT, POSITION);
        return outrider_pick(r_.team, weights, uniform, r_.vocab_size);
    }

    const Round& r_;
    Row& row_;
    const int32_t* tokens_;
    int32_t* path_;
    float* logits_;
    bool made_[MOST_NODES + 1] = {};
};

}  // namespace

bool judge(const Round& round, int index, float* logits) { return Judge(round, index, logits)(); }

}  // namespace outrider
