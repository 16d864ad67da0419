// A whole speculative round of a batch in one call: draft, verify, accept.
//
// Nothing new is computed here. Passes, softmax, draws and leftovers are the operators that the
// stages in Python call one by one, in the same order, and the rules are those of verify/exact.py;
// so the tokens are the same. What is saved is the way through Python between them: a plan, a distribution and a random number for every drafted token.
//
// Memory is not committed here: the text may end before the round does, and only Python knows.
#include <algorithm>
#include <chrono>
#include <iterator>
#include <vector>

#include "sights.h"

using namespace outrider;

namespace outrider {

namespace {

double now() {
    using std::chrono::steady_clock;
    return std::chrono::duration<double>(steady_clock::now().time_since_epoch()).count();
}

// One token of every row that drafts to this depth, from the logits in their order, from row `first` on.
// How many; 0 if some numbers are none.
int choose(const Round& r, int depth, int first) {
    const Memory& memory = *r.draft;
    float* const own = memory.logits + int64_t{first} * memory.num_logits;
    // The tokens before later positions are not known where all are drafted at once.
    const bool shapes = depth == 0 || !r.at_once();
    const auto drafts = [&](const Row& row) { return row.num_drafted > depth; };
    const auto is_greedy = [&](const Row& row) { return drafts(row) && row.greedy(); };
    const auto num = static_cast<int>(std::count_if(r.rows, r.rows + r.num_rows, drafts));
    if (std::any_of(r.rows, r.rows + r.num_rows, is_greedy))
        outrider_argmax(r.team, own, r.best, num, memory.num_logits);
    int count = 0;
    for (int b = 0; b < r.num_rows; ++b) {
        if (!drafts(r.rows[b])) continue;
        float* logits = own + int64_t{count} * memory.num_logits;
        const int64_t token = next_token(r.team, memory, r.rows[b], logits, r.best[count++],
                                         r.drafted(b), depth, shapes, r.vocab_size);
        if (token < 0) return 0;
        r.drafted(b)[depth] = static_cast<int32_t>(token);
    }
    return count;
}

// Every row's chain, of which some may branch off one that is staged. The last token of one is not
// read, since nothing follows it. With a mask one pass drafts whole chains.
bool draft(const Round& r) {
    Memory& memory = *r.draft;
    SightedPass pass(memory);
    std::vector<Sight> sights(r.num_rows);
    const int32_t* unread = r.unread_draft;
    const auto pack = [&](int b, int32_t token, int i, bool wants) {
        const Row& row = r.rows[b];
        const int first = row.branch_place > 0 ? row.branch_place : row.draft_length;
        sights[b] = pass.pack(b, token, first + i, sights[b], wants);
    };
    int deepest = 0;
    std::vector<int32_t> pending(r.num_rows);
    for (int b = 0; b < r.num_rows; ++b) {
        const Row& row = r.rows[b];
        if (row.num_drafted == 0) continue;
        sights[b].visible = row.draft_length;
        for (int i = 0; i < row.draft_unread; ++i)
            pack(b, *unread++, i, !r.at_once() && i == row.draft_unread - 1);
        pending[b] = memory.pass.num_tokens - 1;
        for (int i = 1; r.at_once() && i < row.num_drafted; ++i)
            pack(b, r.mask_token, row.draft_unread + i - 1, false);
        deepest = std::max(deepest, row.num_drafted);
    }
    if (r.at_once() && deepest > 0) {
        for (int depth = 0; depth < deepest; ++depth)
            for (int b = 0; b < r.num_rows; ++b)
                if (r.rows[b].num_drafted > depth)
                    memory.wanted[memory.num_wanted++] = pending[b] + depth;
        if (!pass.run()) return false;
        for (int depth = 0, first = 0, count = 0; depth < deepest; ++depth, first += count)
            if ((count = choose(r, depth, first)) == 0) return false;
        return true;
    }
    for (int depth = 0; depth < deepest; ++depth) {
        if (!pass.run() || choose(r, depth, 0) == 0) return false;
        pass.clear();
        for (int b = 0, m = -1; b < r.num_rows; ++b) {
            const Row& row = r.rows[b];
            m += row.num_drafted > depth;
            if (row.num_drafted <= depth + 1) continue;
            memory.carry(m);
            pack(b, r.drafted(b)[depth], row.draft_unread + depth, true);
        }
    }
    return true;
}

bool verify(const Round& r) {
    SightedPass pass(*r.target);
    const int32_t* unread = r.unread_target;
    std::vector<Sight> sights(r.most_drafted);
    for (int b = 0; b < r.num_rows; ++b) {
        const Row& row = r.rows[b];
        const int first = row.target_length + row.target_unread;
        Sight root = {row.target_length, {}};
        for (int place = row.target_length; place < first; ++place)
            root = pass.pack(b, *unread++, place, root, place == first - 1);
        for (int i = 0; i < row.num_drafted; ++i) {
            const int parent = row.parent(i);
            const Sight& above = parent == ROOT ? root : sights[parent];
            sights[i] = pass.pack(b, r.drafted(b)[i], first + i, above, true);
        }
    }
    return pass.run();
}

// Before anything changes the logits. False if some numbers are none.
bool find_likely(const Round& r) {
    const Memory& memory = *r.target;
    for (int row = 0; r.num_likely > 0 && row < memory.num_wanted; row += MOST_WIDTH) {
        const float* logits = memory.logits + int64_t{row} * r.vocab_size;
        const int64_t at = int64_t{row} * r.num_likely;
        if (!outrider_rank(r.team, logits, std::min(memory.num_wanted - row, MOST_WIDTH),
                           r.vocab_size, r.num_likely, 1.0f, r.likely + at, r.shares + at))
            return false;
    }
    return true;
}

// Changes the logits after the pending token and each node of a draft.
void shape(const Row& row, const int32_t* tokens, float* logits, int64_t vocab_size) {
    if (row.shaping == nullptr) return;
    int32_t path[MOST_NODES];
    for (int node = ROOT; node < row.num_drafted; ++node) {
        int32_t* first = std::end(path);
        for (int above = node; above != ROOT; above = row.parent(above)) *--first = tokens[above];
        const auto count = static_cast<int>(std::end(path) - first);
        float* own = logits + (node + 1) * vocab_size;
        (*row.shaping)(own, vocab_size, first, count);
        row.shaping->limit(own, vocab_size, node + 1);
    }
}

// Goes down along the target's own tokens.
bool follow(Row& row, const int32_t* tokens, const int64_t* best, int32_t* path) {
    int node = ROOT;
    row.num_accepted = 0;
    for (int child = row.child(ROOT, 0); child < row.num_drafted;
         child = row.child(node, child + 1))
        if (tokens[child] == best[node + 1]) path[row.num_accepted++] = node = child;
    row.next = static_cast<int32_t>(best[node + 1]);
    const int64_t* end = best + row.num_drafted + 1;
    return std::find(best, end, -1) == end;
}

bool accept(const Round& r) {
    const Memory& memory = *r.target;
    for (int64_t b = 0, m = 0; b < r.num_rows; m += r.rows[b++].num_drafted + 1)
        shape(r.rows[b], r.drafted(b), memory.logits + m * r.vocab_size, r.vocab_size);
    if (std::any_of(r.rows, r.rows + r.num_rows, [](const Row& row) { return row.greedy(); }))
        outrider_argmax(r.team, memory.logits, r.best, memory.num_wanted, r.vocab_size);
    for (int64_t b = 0, m = 0; b < r.num_rows; m += r.rows[b++].num_drafted + 1) {
        const int index = static_cast<int>(b);
        Row& row = r.rows[b];
        float* logits = memory.logits + m * r.vocab_size;
        const bool decided = row.greedy() ? follow(row, r.drafted(index), r.best + m, r.path(index))
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
    if (round->draft != nullptr && !draft(*round)) return 0;
    const double drafted = now();
    if (!verify(*round) || !find_likely(*round)) return 0;
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

// Only the verdicts of a round, on logits that lie where the target's pass leaves them.
extern "C" int outrider_judge(Round* round) { return accept(*round); }
