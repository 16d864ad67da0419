// Chains and trees from the logits of blocks, on each token of which the logits after it may depend.
//
// Operators and their order are those of plugins/heads/block_heads.py.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "block_pass.h"
#include "choices.h"

extern "C" {

void outrider_sigmoid_mul(outrider::Team*, const float* gate, float* x, int num_rows, int size);
void outrider_silu_mul(outrider::Team*, const float* gate_up, float* out, int num_rows, int size);
void outrider_soft_cap(outrider::Team*, float* x, float cap, int num_rows, int size);
}

namespace outrider {

namespace {

float dot(const float* x, const float* y, int size) {
    Vec sum = {};
    for (int i = 0; i < size; i += LANES)
        sum = fused(load_some(x + i, size - i), load_some(y + i, size - i), sum);
    return sum_of_lanes(sum);
}

// The logits of a place after the tokens before it, along paths.
class TokensBefore : public Paths {
  public:
    explicit TokensBefore(const Block& block)
        : Paths(block.num_texts, block.rank), block_(block), rank_(block.rank) {
        for (int i = 0; i < num_; ++i) tokens_[i] = block.texts[i].pending;
        // A state begins with the pending token's own row, also where that drafts nothing.
        for (int place = 0; block.joint.call != nullptr && place < block.first; ++place)
            read(place, nullptr);
    }

    float* logits(int depth) {
        float* own = block_.logits_of(0, depth);
        if (!are_texts_) {
            logits_.resize(static_cast<size_t>(num_) * block_.num_logits);
            for (int i = 0; i < num_; ++i)
                std::copy_n(block_.logits_of(texts_[i], depth), block_.num_logits,
                            logits_.data() + int64_t{i} * block_.num_logits);
            own = logits_.data();
        }
        read(block_.first + depth, own);
        return own;
    }

  private:
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

    static float* append(const float* from, int size, float* to) {
        std::memcpy(to, from, sizeof(float) * size);
        return to + size;
    }

    // Rows times sigmoid(gate [hidden, row]).
    void scale(int place) {
        joined_.resize(static_cast<size_t>(num_) * (block_.hidden_size + rank_));
        float* to = joined_.data();
        for (int i = 0; i < num_; ++i)
            to = append(row(rows_, i), rank_, append(hidden(i, place), block_.hidden_size, to));
        block_.gate(joined_.data(), gate_.data(), num_, rank_, false);
        outrider_sigmoid_mul(team(), gate_.data(), rows_.data(), num_, rank_);
    }

    // From [state, row, hidden] the gate and the next value of the state, and what `out` reads.
    void advance(int place) {
        joined_.resize(static_cast<size_t>(num_) * (block_.hidden_size + 2 * rank_));
        parts_.resize(3 * rows_.size());
        float* to = joined_.data();
        for (int i = 0; i < num_; ++i) {
            to = append(row(rows_, i), rank_, append(row(state_, i), rank_, to));
            to = append(hidden(i, place), block_.hidden_size, to);
        }
        block_.joint(joined_.data(), parts_.data(), num_, 3 * rank_, false);
        for (int i = 0; i < num_; ++i) {
            const float* from = parts_.data() + int64_t{3} * i * rank_;
            append(from, rank_, row(gate_, i));
            append(from + rank_, rank_, row(value_, i));
            append(from + 2 * rank_, rank_, row(rows_, i));
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

    Team* team() const { return block_.team; }

    using Candidate = std::pair<float, int>;
    const Block& block_;
    const int rank_;
    std::vector<float> logits_, rows_, gate_, value_, joined_, parts_;
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
    Team* team() const { return b_.team; }
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

}  // namespace

bool choose_drafts(const Block& b) {
    if (!b.makes()) return true;
    if (b.refiner != nullptr) Refinement{b}();
    TokensBefore before(b);
    return choose(b, before);
}

}  // namespace outrider
