// Chains and trees from the logits of blocks, of the likeliest or of drawn tokens, on each of which the
// logits after it may depend.
//
// Operators and their order are those of plugins/heads/block_heads.py; tokens are chosen as in round.cpp
// and tree_drafts.cpp.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "block_pass.h"
#include "drawn_trees.h"

extern "C" {

void outrider_sigmoid_mul(outrider::Team*, const float* gate, float* x, int num_rows, int size);
void outrider_silu_mul(outrider::Team*, const float* gate_up, float* out, int num_rows, int size);
void outrider_soft_cap(outrider::Team*, float* x, float cap, int num_rows, int size);
}

namespace outrider {

namespace {

// The logit of tokens that are not drafted, as in drafters/common/growth.py.
constexpr float NOT_DRAFTED = -1e10f;

void read_row(const void* table, int dtype, int64_t index, int size, float* to) {
    const int64_t at = index * size;
    switch (dtype) {
        case FLOAT32: return copy_row(static_cast<const float*>(table) + at, to, size);
        case BFLOAT16: return copy_row(static_cast<const BFloat16*>(table) + at, to, size);
        default: return copy_row(static_cast<const Float16*>(table) + at, to, size);
    }
}

float dot(const float* x, const float* y, int size) {
    Vec sum = {};
    for (int i = 0; i < size; i += LANES)
        sum = fused(load_some(x + i, size - i), load_some(y + i, size - i), sum);
    return sum_of_lanes(sum);
}

// The logits of a place after the tokens before it, along paths: of each text one, until others are
// followed.
class TokensBefore {
  public:
    explicit TokensBefore(const Block& block)
        : block_(block), num_(block.num_texts), rank_(block.rank), texts_(num_),
          tokens_(num_), state_(static_cast<size_t>(num_) * rank_) {
        for (int i = 0; i < num_; ++i) texts_[i] = i, tokens_[i] = block.texts[i].pending;
        // A state begins with the pending token's own row, also where that drafts nothing.
        for (int place = 0; block.joint.call != nullptr && place < block.first; ++place)
            read(place, nullptr);
    }

    int num() const { return num_; }
    int text(int i) const { return texts_[i]; }
    void put(int i, int64_t token) { tokens_[i] = token; }

    // Goes on along other paths: of `above[i]` one with the token `tokens[i]`, for each i.
    void follow(const std::vector<int>& above, const std::vector<int64_t>& tokens) {
        std::vector<int> texts(above.size());
        std::vector<float> state(above.size() * rank_);
        for (size_t i = 0; i < above.size(); ++i) {
            texts[i] = texts_[above[i]];
            std::copy_n(row(state_, above[i]), rank_, state.data() + i * rank_);
        }
        num_ = static_cast<int>(above.size());
        texts_ = std::move(texts), state_ = std::move(state), tokens_ = tokens;
    }

    // Changes `logits` of row `place` of each path's block by the token before; without any, only the
    // state goes on.
    void read(int place, float* logits) {
        if (block_.table == nullptr) return;
        for (auto* rows : {&rows_, &gate_, &value_}) rows->resize(static_cast<size_t>(num_) * rank_);
        for (int i = 0; i < num_; ++i)
            read_row(block_.table, block_.dtype, tokens_[i], rank_, row(rows_, i));
        if (block_.gate.call != nullptr) scale(place);
        if (block_.joint.call != nullptr) advance(place);
        if (logits == nullptr) return;
        if (block_.successors != nullptr) select(place, logits);
        else block_.out(rows_.data(), logits, num_, block_.num_logits, true);
    }

  private:
    float* row(std::vector<float>& rows, int i) const { return rows.data() + int64_t{i} * rank_; }

    const float* hidden(int i, int place) const {
        return block_.hidden
             + (int64_t{texts_[i]} * block_.block_size + place) * block_.hidden_size;
    }

    static float* put(const float* from, int size, float* to) {
        std::memcpy(to, from, sizeof(float) * size);
        return to + size;
    }

    // Rows times sigmoid(gate [hidden, row]).
    void scale(int place) {
        joined_.resize(static_cast<size_t>(num_) * (block_.hidden_size + rank_));
        float* to = joined_.data();
        for (int i = 0; i < num_; ++i)
            to = put(row(rows_, i), rank_, put(hidden(i, place), block_.hidden_size, to));
        block_.gate(joined_.data(), gate_.data(), num_, rank_, false);
        outrider_sigmoid_mul(team(), gate_.data(), rows_.data(), num_, rank_);
    }

    // From [state, row, hidden] the gate and the next value of the state, and what `out` reads.
    void advance(int place) {
        joined_.resize(static_cast<size_t>(num_) * (block_.hidden_size + 2 * rank_));
        parts_.resize(3 * rows_.size());
        float* to = joined_.data();
        for (int i = 0; i < num_; ++i) {
            to = put(row(rows_, i), rank_, put(row(state_, i), rank_, to));
            to = put(hidden(i, place), block_.hidden_size, to);
        }
        block_.joint(joined_.data(), parts_.data(), num_, 3 * rank_, false);
        for (int i = 0; i < num_; ++i) {
            const float* from = parts_.data() + int64_t{3} * i * rank_;
            put(from, rank_, row(gate_, i));
            put(from + rank_, rank_, row(value_, i));
            put(from + 2 * rank_, rank_, row(rows_, i));
        }
        outrider_soft_cap(team(), value_.data(), 1.0f, num_, rank_);
        outrider_soft_cap(team(), rows_.data(), 1.0f, num_, rank_);
        add_scaled(value_, -1.0f, state_);
        outrider_sigmoid_mul(team(), gate_.data(), state_.data(), num_, rank_);
        add_scaled(value_, 1.0f, state_);
    }

    static void add_scaled(const std::vector<float>& from, float sign, std::vector<float>& to) {
        const int size = static_cast<int>(to.size());
        for (int i = 0; i < size; i += LANES) {
            const Vec part = load_some(from.data() + i, size - i) * sign;
            store_some(to.data() + i, load_some(to.data() + i, size - i) + part, size - i);
        }
    }

    // Leaves the likeliest ids alone, each with the score that its successor's row adds.
    void select(int place, float* logits) {
        joined_.clear();
        for (int i = 0; i < num_; ++i)
            joined_.insert(joined_.end(), hidden(i, place), hidden(i, place) + block_.hidden_size);
        block_.out(joined_.data(), value_.data(), num_, rank_, false);
        std::vector<float> after(rank_);
        for (int i = 0; i < num_; ++i) {
            float *own = logits + int64_t{i} * block_.num_logits, *before = row(rows_, i);
            for (int r = 0; r < rank_; ++r) before[r] *= row(value_, i)[r];
            if (!find_candidates(own)) continue;
            std::fill_n(own, block_.num_logits, NOT_DRAFTED);
            for (const auto& [logit, id] : candidates_) {
                read_row(block_.successors, block_.dtype, block_.token(id), rank_, after.data());
                own[id] = logit + dot(before, after.data(), rank_);
            }
        }
    }

    // Keeps the likeliest ids of a row, the first of equals; false if a logit is no number.
    bool find_candidates(const float* logits) {
        const auto is_better = [](const Candidate& a, const Candidate& b) {
            return a.first > b.first || (a.first == b.first && a.second < b.second);
        };
        const size_t most = std::min(block_.num_candidates, block_.num_logits);
        candidates_.clear();
        for (int id = 0; id < block_.num_logits; ++id) {
            if (std::isnan(logits[id])) return false;
            const Candidate one{logits[id], id};
            if (candidates_.size() == most) {
                if (!is_better(one, candidates_.front())) continue;
                std::pop_heap(candidates_.begin(), candidates_.end(), is_better);
                candidates_.pop_back();
            }
            candidates_.push_back(one);
            std::push_heap(candidates_.begin(), candidates_.end(), is_better);
        }
        return true;
    }

    Team* team() const { return block_.blank.team; }

    using Candidate = std::pair<float, int>;
    const Block& block_;
    int num_;
    const int rank_;
    std::vector<int> texts_;
    std::vector<int64_t> tokens_;
    std::vector<float> state_, rows_, gate_, value_, joined_, parts_;
    std::vector<Candidate> candidates_;
};

// Rounds of a net over the rows of all blocks, on its own choice of the round before.
class Refinement {
  public:
    explicit Refinement(const Block& block)
        : b_(block), net_(*block.refiner), rank_(net_.rank), num_(block.num_rows()),
          states_(static_cast<size_t>(num_) * 2 * rank_), x_(numbers()), mixed_(numbers()),
          base_(block.logits, block.logits + num_logits() * block.num_logits) {
        find_states();
    }

    void operator()() {
        std::vector<int64_t> best(num_logits());
        for (int round = 0; round < net_.num_rounds; ++round) {
            outrider_argmax(team(), b_.logits, best.data(), static_cast<int>(best.size()),
                            b_.num_logits);
            join(best);
            mix();
            feed();
            std::copy(base_.begin(), base_.end(), b_.logits);
            // As logits lie, position by position.
            float* to = mixed_.data();
            for (int depth = 0; depth < b_.depth; ++depth)
                for (int text = 0; text < b_.num_texts; ++text, to += rank_)
                    std::copy_n(row(x_, text, b_.first + depth), rank_, to);
            net_.out(mixed_.data(), b_.logits, static_cast<int>(best.size()), b_.num_logits, true);
        }
    }

  private:
    size_t numbers() const { return static_cast<size_t>(num_) * rank_; }
    size_t num_logits() const { return static_cast<size_t>(b_.num_texts) * b_.depth; }
    Team* team() const { return b_.blank.team; }
    float* row(std::vector<float>& rows, int text, int place) const {
        return rows.data() + (int64_t{text} * b_.block_size + place) * rank_;
    }

    // Of each row its own state and the mean one of its block.
    void find_states() {
        const int size = b_.hidden_size;
        std::vector<float> means(static_cast<size_t>(b_.num_texts) * size), mean(means.size());
        for (int n = 0; n < num_; ++n) {
            float* to = means.data() + int64_t{n / b_.block_size} * size;
            for (int i = 0; i < size; ++i) to[i] += b_.hidden[int64_t{n} * size + i];
        }
        for (float& sum : means) sum /= static_cast<float>(b_.block_size);
        net_.mean(means.data(), mean.data(), b_.num_texts, rank_, false);
        net_.own(b_.hidden, x_.data(), num_, rank_, false);
        for (int n = 0; n < num_; ++n) {
            float* to = states_.data() + int64_t{2} * n * rank_;
            std::copy_n(x_.data() + int64_t{n} * rank_, rank_, to);
            std::copy_n(mean.data() + int64_t{n / b_.block_size} * rank_, rank_, to + rank_);
        }
    }

    // The token before row `place` of a text, where its drafts are `best`.
    int64_t before(const std::vector<int64_t>& best, int text, int place) const {
        const int drafted = place - b_.first - 1;
        if (drafted >= 0)
            return b_.token(std::max<int64_t>(best[int64_t{drafted} * b_.num_texts + text], 0));
        return place == b_.first ? b_.texts[text].pending : b_.texts[text].previous;
    }

    void join(const std::vector<int64_t>& best) {
        read_.resize(3 * numbers());
        float* to = read_.data();
        for (int n = 0; n < num_; ++n) {
            to = std::copy_n(states_.data() + int64_t{2} * n * rank_, 2 * rank_, to);
            const int64_t token = before(best, n / b_.block_size, n % b_.block_size);
            read_row(net_.table, net_.dtype, token, rank_, to);
            to += rank_;
        }
        net_.join(read_.data(), x_.data(), num_, rank_, false);
    }

    // Adds to each row what it reads of those of its block up to itself.
    void mix() {
        const int size = b_.block_size;
        for (int text = 0; text < b_.num_texts; ++text)
            for (int k = 0; k < size; ++k)
                for (int r = 0; r < rank_; ++r) {
                    const float* weights = net_.mix + (int64_t{r} * size + k) * size;
                    float sum = 0.0f;
                    for (int j = 0; j <= k; ++j) sum += weights[j] * row(x_, text, j)[r];
                    row(mixed_, text, k)[r] = sum;
                }
        for (size_t i = 0; i < x_.size(); ++i) x_[i] += mixed_[i];
    }

    void feed() {
        const int inner = net_.inner;
        std::vector<float> gate(static_cast<size_t>(num_) * inner), up(gate.size());
        net_.gate(x_.data(), gate.data(), num_, inner, false);
        net_.up(x_.data(), up.data(), num_, inner, false);
        std::vector<float> both(2 * gate.size());
        for (int n = 0; n < num_; ++n) {
            float* to = both.data() + int64_t{2} * n * inner;
            std::copy_n(up.data() + int64_t{n} * inner, inner,
                        std::copy_n(gate.data() + int64_t{n} * inner, inner, to));
        }
        outrider_silu_mul(team(), both.data(), gate.data(), num_, inner);
        net_.down(gate.data(), x_.data(), num_, rank_, true);
    }

    const Block& b_;
    const BlockRefiner& net_;
    const int rank_, num_;
    std::vector<float> states_, x_, mixed_, base_, read_;
};

// A token of one text, drawn from its logits.
int64_t drawn(const Block& b, const Row& row, const float* logits, int depth) {
    float* distribution = row.drawn_from + static_cast<int64_t>(depth) * b.vocab_size;
    if (b.ids != nullptr) {
        std::fill_n(distribution, b.vocab_size, -std::numeric_limits<float>::infinity());
        for (int w = 0; w < b.num_logits; ++w) distribution[b.ids[w]] = logits[w];
        logits = distribution;
    }
    make_laws(b.blank.team, row, logits, distribution, 1, b.vocab_size);
    return row.draw(b.blank.team, distribution, depth, depth, b.vocab_size);
}

float* logits_of(const Block& b, int text, int depth) {
    return b.logits + (int64_t{depth} * b.num_texts + text) * b.num_logits;
}

bool choose_chains(const Block& b) {
    const int num = b.num_texts;
    int deepest = 0;
    for (int i = 0; i < num; ++i) deepest = std::max(deepest, b.rows[i].num_drafted);
    TokensBefore before(b);
    std::vector<int64_t> best(num);
    for (int depth = 0; depth < deepest; ++depth) {
        before.read(b.first + depth, logits_of(b, 0, depth));
        const auto drafts = [&](int i) { return b.rows[i].num_drafted > depth; };
        for (int i = 0; i < num; ++i)
            if (drafts(i) && b.rows[i].shaping != nullptr)
                (*b.rows[i].shaping)(logits_of(b, i, depth), b.num_logits,
                                     b.drafted + int64_t{i} * b.depth, depth);
        outrider_argmax(b.blank.team, logits_of(b, 0, depth), best.data(), num, b.num_logits);
        for (int i = 0; i < num; ++i) {
            if (!drafts(i)) continue;
            int64_t token = best[i] < 0 ? -1 : b.token(best[i]);
            if (token >= 0 && !b.rows[i].greedy())
                token = drawn(b, b.rows[i], logits_of(b, i, depth), depth);
            if (token < 0) return false;
            b.drafted[int64_t{i} * b.depth + depth] = static_cast<int32_t>(token);
            before.put(i, token);
        }
    }
    return true;
}

bool grow_trees(const Block& b) {
    Memory ids{};
    ids.ids = b.ids;
    ids.num_ids = ids.num_logits = b.num_logits;
    const TreeDrafts drafts{b.blank.team, &ids, b.trees, nullptr, b.num_texts, b.vocab_size};
    TokensBefore before(b);
    std::vector<float> logits;
    for (int depth = 0; before.num() > 0; ++depth) {
        logits.resize(static_cast<size_t>(before.num()) * b.num_logits);
        for (int i = 0; i < before.num(); ++i)
            std::copy_n(logits_of(b, before.text(i), depth), b.num_logits,
                        logits.data() + int64_t{i} * b.num_logits);
        before.read(b.first + depth, logits.data());
        std::vector<int> above;
        std::vector<int64_t> tokens;
        for (int i = 0, count; i < before.num(); i += count) {
            const TreeRow& row = b.trees[before.text(i)];
            const Tree& tree = *row.tree;
            count = tree.num_level;
            if (!grow(drafts, row, logits.data() + int64_t{i} * b.num_logits)) return false;
            for (int n = 0; n < tree.num_level; ++n) {
                above.push_back(i + tree.above[n]);
                tokens.push_back(drafts.token(row, tree.level[n]));
            }
        }
        before.follow(above, tokens);
    }
    drafts.name_tokens();
    return true;
}

}  // namespace

bool choose_drafts(const Block& b) {
    if (b.rows == nullptr && b.trees == nullptr) return true;
    if (b.refiner != nullptr) Refinement{b}();
    return b.trees != nullptr ? grow_trees(b) : choose_chains(b);
}

}  // namespace outrider
