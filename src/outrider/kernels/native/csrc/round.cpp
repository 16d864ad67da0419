// A whole speculative round of a batch in one call: draft, verify, accept.
//
// Nothing new is computed here. Passes, softmax, draws and leftovers are the operators that the
// stages in Python call one by one, in the same order, and the rules are those of verify/exact.py
// and verify/match.py for chains; so the tokens are the same. What is saved is the way through
// Python between them: a plan, a distribution and a random number for every drafted token.
//
// Memory is not committed here: the text may end before the round does, and only Python knows.
#include <algorithm>
#include <chrono>

#include "round.h"

using namespace outrider;

extern "C" {

void outrider_argmax(Team*, const float* logits, int64_t* out, int num_rows, int64_t size);
void outrider_softmax(Team*, const float* logits, float temperature, float* out, int num_rows,
                      int64_t size);
void outrider_top_k(Team*, const float* logits, int64_t k, float* out, int num_rows, int64_t size);
void outrider_keep_likely(Team*, float* distributions, double top_p, double min_p, int num_rows,
                          int64_t size);
int64_t outrider_pick(Team*, const float* weights, double uniform, int64_t size);
double outrider_leftover(Team*, const float* p, const float* q, int64_t token, double share,
                         float* out, int64_t size);
}

namespace outrider {

namespace {

double now() {
    using std::chrono::steady_clock;
    return std::chrono::duration<double>(steady_clock::now().time_since_epoch()).count();
}

// Rows of distributions as core/sampling.py makes them; `out` may be `logits`.
void make_laws(const Round& r, const Row& row, const float* logits, float* out, int num_rows) {
    if (row.top_k > 0 && row.top_k < r.vocab_size) {
        outrider_top_k(r.team, logits, row.top_k, out, num_rows, r.vocab_size);
        logits = out;
    }
    outrider_softmax(r.team, logits, row.temperature, out, num_rows, r.vocab_size);
    if (row.top_p < 1 || row.min_p > 0)
        outrider_keep_likely(r.team, out, row.top_p, row.min_p, num_rows, r.vocab_size);
}

// One token of every row that drafts to this depth, from the logits in their order.
bool choose(const Round& r, int depth) {
    const Memory& memory = *r.draft;
    const auto is_greedy = [&](const Row& row) { return row.depth > depth && row.greedy(); };
    if (std::any_of(r.rows, r.rows + r.num_rows, is_greedy))
        outrider_argmax(r.team, memory.logits, r.best, memory.num_wanted, memory.num_logits);
    for (int b = 0, m = 0; b < r.num_rows; ++b) {
        const Row& row = r.rows[b];
        if (row.depth <= depth) continue;
        const float* logits = memory.logits + static_cast<int64_t>(m) * memory.num_logits;
        int64_t token = memory.token(r.best[m++]);
        if (!row.greedy()) {
            float* distribution = r.distribution(b, depth);
            make_laws(r, row, memory.spread(logits, distribution, r.vocab_size), distribution, 1);
            token = outrider_pick(r.team, distribution, row.uniform(row.start, depth, DRAFT), r.vocab_size);
        }
        if (token < 0) return false;
        r.drafted(b)[depth] = static_cast<int32_t>(token);
    }
    return true;
}

// Every row's chain; the last token of one is not read, since nothing follows it.
bool draft(const Round& r) {
    Memory& memory = *r.draft;
    memory.clear();
    const int32_t* unread = r.unread_draft;
    int deepest = 0;
    for (int b = 0; b < r.num_rows; ++b) {
        const Row& row = r.rows[b];
        if (row.depth == 0) continue;
        for (int i = 0; i < row.draft_unread; ++i)
            memory.pack(b, *unread++, row.draft_length + i, i == row.draft_unread - 1);
        deepest = std::max(deepest, row.depth);
    }
    for (int depth = 0; depth < deepest; ++depth) {
        if (!memory.run() || !choose(r, depth)) return false;
        memory.clear();
        for (int b = 0, m = -1; b < r.num_rows; ++b) {
            const Row& row = r.rows[b];
            m += row.depth > depth;
            if (row.depth <= depth + 1) continue;
            const int position = row.draft_length + row.draft_unread + depth;
            memory.carry(m);
            memory.pack(b, r.drafted(b)[depth], position, true);
        }
    }
    return true;
}

bool verify(const Round& r) {
    Memory& memory = *r.target;
    memory.clear();
    const int32_t* unread = r.unread_target;
    for (int b = 0; b < r.num_rows; ++b) {
        const Row& row = r.rows[b];
        int position = row.target_length;
        for (int i = 0; i < row.target_unread; ++i)
            memory.pack(b, *unread++, position++, i == row.target_unread - 1);
        for (int i = 0; i < row.depth; ++i) memory.pack(b, r.drafted(b)[i], position++, true);
    }
    return memory.run();
}

// A row under judgement: entry i of `p` is the target's distribution after i drafted tokens.
class Judge {
  public:
    Judge(const Round& round, int index, float* p)
        : r_(round), row_(round.rows[index]), tokens_(round.drafted(index)), index_(index), p_(p) {}

    // False if the target's distribution is none.
    bool operator()() const {
        make_laws(r_, row_, p_, p_, row_.depth + 1);
        if (r_.rule == MATCH) return match();
        return r_.rule == BLOCK && r_.draft != nullptr && row_.depth > 0 ? block() : token();
    }

  private:
    float* p(int node) const { return p_ + static_cast<int64_t>(node) * r_.vocab_size; }
    // Null where the draft was chosen, not drawn: its distribution is a point mass.
    const float* q(int node) const { return r_.draft ? r_.distribution(index_, node) : nullptr; }

    double ratio(int node) const {
        const double drawn = q(node) ? q(node)[tokens_[node]] : 1.0;
        return drawn > 0 ? p(node)[tokens_[node]] / drawn : 0.0;
    }

    double left(int node, double share) const {
        return outrider_leftover(r_.team, p(node), q(node), tokens_[node], share, r_.leftover,
                                 r_.vocab_size);
    }

    bool end(int num_accepted, const float* weights) const {
        const double uniform = row_.uniform(row_.start, num_accepted - 1, NEXT);
        return keep(num_accepted, outrider_pick(r_.team, weights, uniform, r_.vocab_size));
    }

    bool keep(int num_accepted, int64_t next) const {
        row_.num_accepted = num_accepted;
        row_.next = static_cast<int32_t>(next);
        return next >= 0;
    }

    bool token() const {
        for (int node = 0; node < row_.depth; ++node) {
            if (row_.coin(ratio(node), node)) continue;
            const double total = left(node, 1.0);
            if (!(total > 0)) return end(node, p(node));
            const auto divisor = static_cast<float>(total);
            for (int64_t v = 0; v < r_.vocab_size; ++v) r_.leftover[v] /= divisor;
            return end(node, r_.leftover);
        }
        return end(row_.depth, p(row_.depth));
    }

    bool block() const {
        double shares[MAX_DEPTH + 1] = {1.0};
        for (int node = 0; node < row_.depth; ++node)
            shares[node + 1] = std::min(1.0, shares[node] * ratio(node));
        const float* distribution = p(row_.depth);
        double chance = shares[row_.depth];
        for (int length = row_.depth; length > 0; --length) {
            if (row_.coin(chance, length - 1)) return end(length, distribution);
            const double share = shares[length - 1], rest = left(length - 1, share);
            distribution = rest == 0 ? p(length - 1) : r_.leftover;
            chance = rest == 0 ? share == 1 : rest / (rest + 1 - share);
        }
        return end(0, distribution);
    }

    bool match() const {
        for (int node = 0;; ++node) {
            const double uniform = row_.uniform(row_.start + node, ROOT, POSITION);
            const int64_t own = outrider_pick(r_.team, p(node), uniform, r_.vocab_size);
            if (own < 0 || node == row_.depth || own != tokens_[node]) return keep(node, own);
        }
    }

    const Round& r_;
    Row& row_;
    const int32_t* tokens_;
    int index_;
    float* p_;
};

bool follow(Row& row, const int32_t* tokens, const int64_t* best) {
    int kept = 0;
    while (kept < row.depth && best[kept] == tokens[kept]) ++kept;
    row.num_accepted = kept;
    row.next = static_cast<int32_t>(best[kept]);
    return std::find(best, best + row.depth + 1, -1) == best + row.depth + 1;
}

bool accept(const Round& r) {
    const Memory& memory = *r.target;
    if (std::any_of(r.rows, r.rows + r.num_rows, [](const Row& row) { return row.greedy(); }))
        outrider_argmax(r.team, memory.logits, r.best, memory.num_wanted, r.vocab_size);
    for (int64_t b = 0, m = 0; b < r.num_rows; m += r.rows[b++].depth + 1) {
        const int index = static_cast<int>(b);
        Row& row = r.rows[b];
        float* logits = memory.logits + m * r.vocab_size;
        const bool decided = row.greedy() ? follow(row, r.drafted(index), r.best + m)
                                          : Judge(r, index, logits)();
        if (!decided) return false;
    }
    return true;
}

}  // namespace

}  // namespace outrider

// Whether every row was decided. If not, some number was none (or a token not in the vocabulary),
// nothing counts, and the stages in Python find out what and say so.
extern "C" int outrider_round(Round* round) {
    const double started = now();
    if (round->draft != nullptr && !draft(*round)) return 0;
    const double drafted = now();
    if (!verify(*round)) return 0;
    const double verified = now();
    round->draft_seconds = drafted - started;
    round->verify_seconds = verified - drafted;
    return accept(*round);
}

// Only the drafts of a round, and the distributions that those at a temperature were drawn from. Whether all
// numbers were some.
extern "C" int outrider_drafts(Round* round) { return draft(*round); }

extern "C" double outrider_uniform(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2,
                                   uint32_t c3) {
    return philox_uniform(seed, c0, c1, c2, c3);
}
