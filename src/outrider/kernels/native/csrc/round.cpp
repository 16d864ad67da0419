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
#include <vector>

#include "round.h"

using namespace outrider;

namespace outrider {

namespace {

double now() {
    using std::chrono::steady_clock;
    return std::chrono::duration<double>(steady_clock::now().time_since_epoch()).count();
}

// One token of every row that drafts to this depth, from the logits in their order.
bool choose(const Round& r, int depth) {
    const Memory& memory = *r.draft;
    for (int64_t b = 0, m = 0; b < r.num_rows; ++b) {
        const Row& row = r.rows[b];
        if (row.depth <= depth) continue;
        if (row.shaping != nullptr)
            (*row.shaping)(memory.logits + m * memory.num_logits, r.drafted(b), depth);
        ++m;
    }
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
            token = row.rule == COUPLED
                ? row.race(r.team, distribution, depth, r.vocab_size)
                : outrider_pick(r.team, distribution, row.uniform(row.start, depth, DRAFT), r.vocab_size);
        }
        if (token < 0) return false;
        r.drafted(b)[depth] = static_cast<int32_t>(token);
    }
    return true;
}

// Passes of the draft model, of which some rows may branch off a chain that is staged.
class Drafting {
  public:
    explicit Drafting(const Round& r)
        : r_(r), memory_(*r.draft), branches_(std::any_of(r.rows, r.rows + r.num_rows, branches)) {}

    // The pass is not to point to vectors that are gone.
    ~Drafting() { memory_.pass.extra_offsets = memory_.pass.extra_slots = nullptr; }

    // Every row's chain; the last token of one is not read, since nothing follows it.
    bool operator()() {
        clear();
        const int32_t* unread = r_.unread_draft;
        int deepest = 0;
        for (int b = 0; b < r_.num_rows; ++b) {
            const Row& row = r_.rows[b];
            if (row.depth == 0) continue;
            for (int i = 0; i < row.draft_unread; ++i)
                pack(b, *unread++, i, i == row.draft_unread - 1);
            deepest = std::max(deepest, row.depth);
        }
        for (int depth = 0; depth < deepest; ++depth) {
            if (!run() || !choose(r_, depth)) return false;
            clear();
            for (int b = 0, m = -1; b < r_.num_rows; ++b) {
                const Row& row = r_.rows[b];
                m += row.depth > depth;
                if (row.depth <= depth + 1) continue;
                memory_.carry(m);
                pack(b, r_.drafted(b)[depth], row.draft_unread + depth, true);
            }
        }
        return true;
    }

  private:
    static bool branches(const Row& row) { return row.branch_place > 0; }

    void clear() {
        memory_.clear();
        offsets_.assign(1, 0);
        extra_.clear();
    }

    bool run() {
        if (branches_) {
            memory_.pass.extra_offsets = offsets_.data();
            memory_.pass.extra_slots = extra_.data();
        }
        return memory_.run();
    }

    // Token `i` behind what row `b` sees already.
    void pack(int b, int token, int i, bool wants) {
        const Row& row = r_.rows[b];
        const int n = memory_.pass.num_tokens;
        memory_.pack(b, token, row.draft_length + i, wants);
        if (!branches_) return;
        if (branches(row)) {
            memory_.visible[n] = row.draft_length;
            for (int own = 0; own <= i; ++own)
                extra_.push_back(memory_.slot(b, row.branch_place + own));
            memory_.slots[n] = extra_.back();
        }
        offsets_.push_back(static_cast<int32_t>(extra_.size()));
    }

    const Round& r_;
    Memory& memory_;
    const bool branches_;
    std::vector<int32_t> offsets_, extra_;
};

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

bool follow(Row& row, const int32_t* tokens, const int64_t* best) {
    int kept = 0;
    while (kept < row.depth && best[kept] == tokens[kept]) ++kept;
    row.num_accepted = kept;
    row.next = static_cast<int32_t>(best[kept]);
    return std::find(best, best + row.depth + 1, -1) == best + row.depth + 1;
}

bool accept(const Round& r) {
    const Memory& memory = *r.target;
    for (int64_t b = 0, m = 0; b < r.num_rows; m += r.rows[b++].depth + 1) {
        const Row& row = r.rows[b];
        for (int node = 0; row.shaping != nullptr && node <= row.depth; ++node)
            (*row.shaping)(memory.logits + (m + node) * r.vocab_size, r.drafted(b), node);
    }
    if (std::any_of(r.rows, r.rows + r.num_rows, [](const Row& row) { return row.greedy(); }))
        outrider_argmax(r.team, memory.logits, r.best, memory.num_wanted, r.vocab_size);
    for (int64_t b = 0, m = 0; b < r.num_rows; m += r.rows[b++].depth + 1) {
        const int index = static_cast<int>(b);
        Row& row = r.rows[b];
        float* logits = memory.logits + m * r.vocab_size;
        const bool decided = row.greedy() ? follow(row, r.drafted(index), r.best + m)
                                          : judge(r, index, logits);
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
    if (round->draft != nullptr && !Drafting(*round)()) return 0;
    const double drafted = now();
    if (!verify(*round)) return 0;
    const double verified = now();
    round->draft_seconds = drafted - started;
    round->verify_seconds = verified - drafted;
    return accept(*round);
}

// Only the drafts of a round, and the distributions that those at a temperature were drawn from. Whether all
// numbers were some.
extern "C" int outrider_drafts(Round* round) { return Drafting(*round)(); }

extern "C" double outrider_uniform(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2,
                                   uint32_t c3) {
    return philox_uniform(seed, c0, c1, c2, c3);
}

// Only the verdicts of a round, on logits that lie where the target's pass leaves them.
extern "C" int outrider_judge(Round* round) { return accept(*round); }
