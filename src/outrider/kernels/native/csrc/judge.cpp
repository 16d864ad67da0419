// The verdict on one row of a round: the rules of verify/exact.py and verify/match.py for chains.
//
// A distribution is made when it is looked at: after a refusal nobody reads what follows. Where all
// that is asked of one is what it has for the drafted token, it is not written.
#include <algorithm>

#include "round.h"

namespace outrider {

// In place of logits; filters apply as in core/sampling.py.
void make_laws(const Round& r, const Row& row, const float* logits, float* out, int num_rows) {
    if (row.top_k > 0 && row.top_k < r.vocab_size) {
        outrider_top_k(r.team, logits, row.top_k, out, num_rows, r.vocab_size);
        logits = out;
    }
    outrider_softmax(r.team, logits, row.temperature, out, num_rows, r.vocab_size);
    if (row.top_p < 1 || row.min_p > 0)
        outrider_keep_likely(r.team, out, row.top_p, row.min_p, num_rows, r.vocab_size);
}

namespace {

// By how much rounding may make a coin of the block rule likelier than its share.
constexpr double SLACK = 1e-4;

// Row i of `logits` is the target's after i drafted tokens.
class Judge {
  public:
    Judge(const Round& round, int index, float* logits)
        : r_(round), row_(round.rows[index]), tokens_(round.drafted(index)), index_(index),
          logits_(logits) {}

    // False if the target's distribution is none.
    bool operator()() {
        if (row_.wants_laws) make(0, row_.depth + 1);
        if (row_.rule == MATCH || row_.rule == COUPLED) return match();
        return row_.rule == BLOCK && r_.draft != nullptr && row_.depth > 0 ? block() : token();
    }

  private:
    float* logits(int node) const { return logits_ + static_cast<int64_t>(node) * r_.vocab_size; }

    // The target's distribution, which takes the place of its logits.
    const float* p(int node) {
        if (!made_[node]) make(node, 1);
        return logits(node);
    }

    void make(int node, int count) {
        make_laws(r_, row_, logits(node), logits(node), count);
        std::fill_n(made_ + node, count, true);
    }

    // Null where the draft was chosen, not drawn: its distribution is a point mass.
    const float* q(int node) const { return r_.draft ? r_.distribution(index_, node) : nullptr; }

    // p / q of the drafted tokens of `count` nodes.
    void find_ratios(int node, int count, double* ratios) {
        if (row_.wants_laws || row_.filters(r_.vocab_size)) {
            if (!row_.wants_laws) make(node, count);
            for (int i = 0; i < count; ++i) ratios[i] = p(node + i)[tokens_[node + i]];
        } else {
            outrider_masses(r_.team, logits(node), row_.temperature, tokens_ + node, ratios, count,
                            r_.vocab_size);
        }
        for (int i = 0; i < count; ++i) {
            const double drawn = q(node) ? q(node + i)[tokens_[node + i]] : 1.0;
            ratios[i] = drawn > 0 ? ratios[i] / drawn : 0.0;
        }
    }

    double left(int node, double share) {
        return outrider_leftover(r_.team, p(node), q(node), tokens_[node], share, r_.leftover,
                                 r_.vocab_size);
    }

    bool end(int num_accepted, const float* weights) {
        const double uniform = row_.uniform(row_.start, num_accepted - 1, NEXT);
        return keep(num_accepted, outrider_pick(r_.team, weights, uniform, r_.vocab_size));
    }

    bool keep(int num_accepted, int64_t next) {
        row_.num_accepted = num_accepted;
        row_.next = static_cast<int32_t>(next);
        return next >= 0;
    }

    bool token() {
        for (int node = 0; node < row_.depth; ++node) {
            double ratio;
            find_ratios(node, 1, &ratio);
            if (row_.coin(ratio, node)) continue;
            const double total = left(node, 1.0);
            if (!(total > 0)) return end(node, p(node));
            const auto divisor = static_cast<float>(total);
            for (int64_t v = 0; v < r_.vocab_size; ++v) r_.leftover[v] /= divisor;
            return end(node, r_.leftover);
        }
        return end(row_.depth, p(row_.depth));
    }

    bool block() {
        double shares[MAX_DEPTH + 1] = {1.0};
        find_ratios(0, row_.depth, shares + 1);
        for (int node = 0; node < row_.depth; ++node)
            shares[node + 1] = std::min(1.0, shares[node] * shares[node + 1]);
        for (int length = row_.depth; length > 0; --length) {
            // No coin is likelier than its share, so most that fall tails need no look at what is
            // left.
            if (row_.uniform(row_.start, length - 1, ACCEPT) > shares[length] * (1 + SLACK))
                continue;
            double chance = shares[length];
            const float* weights = rest(length, &chance);
            if (row_.coin(chance, length - 1)) return end(length, weights);
        }
        double chance = 1.0;
        return end(0, rest(0, &chance));
    }

    // What the draft leaves of the share `chance` of the distribution after `length` tokens, and
    // the coin that keeps them.
    const float* rest(int length, double* chance) {
        if (length == row_.depth) return p(length);
        const double share = *chance, total = left(length, share);
        *chance = total == 0 ? share == 1 : total / (total + 1 - share);
        return total == 0 ? p(length) : r_.leftover;
    }

    bool match() {
        for (int node = 0;; ++node) {
            const int64_t own = draw(node);
            if (own < 0 || node == row_.depth || own != tokens_[node]) return keep(node, own);
        }
    }

    // The target's own token after `node` drafted ones, by numbers that its place has.
    int64_t draw(int node) {
        if (row_.rule == COUPLED) return row_.race(r_.team, p(node), node, r_.vocab_size);
        const double uniform = row_.uniform(row_.start + node, ROOT, POSITION);
        return outrider_pick(r_.team, p(node), uniform, r_.vocab_size);
    }

    const Round& r_;
    Row& row_;
    const int32_t* tokens_;
    int index_;
    float* logits_;
    bool made_[MAX_DEPTH + 1] = {};
};

}  // namespace

bool judge(const Round& round, int index, float* logits) { return Judge(round, index, logits)(); }

}  // namespace outrider
