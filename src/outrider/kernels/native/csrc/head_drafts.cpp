// Drafts of heads that read one state of each text and, of some kinds, the tokens of the path: Medusa,
// Hydra, MLP speculators. Operators and their order are those of plugins/heads/medusa.py and paths.py.
#include <cmath>

#include "choices.h"
#include "linears.h"

extern "C" {

void outrider_rms_norm(outrider::Team*, const float* x, const float* weight, float eps, float* out,
                       int num_rows, int size);
void outrider_sigmoid_mul(outrider::Team*, const float* gate, float* x, int num_rows, int size);
}

namespace outrider {

// x becomes `across` x, or x itself, plus silu of `linear` x. Mirrored by `_Step` in
// plugins/heads/native_heads.py.
struct HeadStep {
    Linear linear, across;
};

// Mirrored by `_Head` of that file. `inner`, if there is one, makes the next state of the last one and of
// the token's row of `table`.
struct Head {
    const HeadStep* steps;
    Linear inner, last;
    const void* table;
    const float *norm, *shift;
    int32_t num_steps, unused;
};

// Mirrored by `_Drafts` of that file: a head for each position. Heads that are grounded read the
// `embeddings` of the path behind the state.
struct HeadDrafts : Choice {
    const Head* heads;
    const float* states;  // [texts][size]
    const int64_t* pending;
    const void* embeddings;
    float keep, share, eps;  // of `inner`
    int32_t dtype, size, inner_size;
};

namespace {

class HeadPaths : public Paths {
  public:
    explicit HeadPaths(const HeadDrafts& drafts)
        : Paths(drafts.num_texts, drafts.size), d_(drafts) {
        std::copy_n(d_.pending, num_, tokens_.begin());
        std::copy_n(d_.states, state_.size(), state_.begin());
        if (d_.at_once) read_all();
    }

    float* logits(int depth) {
        if (d_.at_once) return d_.logits_of(0, depth);
        const Head& head = d_.heads[depth];
        if (d_.embeddings != nullptr) join();
        if (head.inner.call != nullptr) mix(head);
        x_ = state_;
        step(head);
        head.last(x_.data(), d_.logits, num_, d_.num_logits, false);
        return d_.logits;
    }

  private:
    // The logits of all heads: one product for those that share a matrix, which it reads once.
    void read_all() {
        std::vector<float> all;
        for (int depth = 0; depth < d_.depth; ++depth) {
            x_ = state_;
            step(d_.heads[depth]);
            all.insert(all.end(), x_.begin(), x_.end());
        }
        for (int depth = 0, end = 0; depth < d_.depth; depth = end) {
            const Linear& last = d_.heads[depth].last;
            while (end < d_.depth && d_.heads[end].last.weights == last.weights) ++end;
            last(all.data() + int64_t{depth} * num_ * d_.size, d_.logits_of(0, depth),
                 (end - depth) * num_, d_.num_logits, false);
        }
    }

    // Puts the embedding of each path's newest token behind its state.
    void join() {
        const int wide = width_ + d_.size;
        std::vector<float> joined(static_cast<size_t>(num_) * wide);
        for (int i = 0; i < num_; ++i) {
            float* to = joined.data() + int64_t{i} * wide;
            std::copy_n(state_.data() + int64_t{i} * width_, width_, to);
            read_row(d_.embeddings, d_.dtype, tokens_[i], d_.size, to + width_);
        }
        state_ = std::move(joined), width_ = wide;
    }

    // gelu(norm(keep * inner(state) + share * row) + shift)
    void mix(const Head& head) {
        const int size = d_.inner_size;
        std::vector<float> next(static_cast<size_t>(num_) * size), row(size);
        head.inner(state_.data(), next.data(), num_, size, false);
        for (int i = 0; i < num_; ++i) {
            float* own = next.data() + int64_t{i} * size;
            read_row(head.table, d_.dtype, tokens_[i], size, row.data());
            for (int at = 0; at < size; at += LANES) {
                const int count = size - at;
                const Vec kept = apart(load_some(own + at, count) * d_.keep);
                store_some(own + at, kept + apart(load_some(row.data() + at, count) * d_.share),
                           count);
            }
        }
        state_.resize(next.size()), width_ = size;
        outrider_rms_norm(d_.team, next.data(), head.norm, d_.eps, state_.data(), num_, size);
        for (int i = 0; i < num_; ++i)
            for (int at = 0; at < size; ++at) {
                float& number = state_[int64_t{i} * size + at];
                const float x = number + head.shift[at];
                number = x * 0.5f * (1.0f + std::erf(x * 0.70710678f));
            }
    }

    void step(const Head& head) {
        const int size = d_.size;
        std::vector<float> gate, across;
        for (const HeadStep* one = head.steps; one < head.steps + head.num_steps; ++one) {
            added_.resize(static_cast<size_t>(num_) * size);
            one->linear(x_.data(), added_.data(), num_, size, false);
            gate = added_;
            outrider_sigmoid_mul(d_.team, gate.data(), added_.data(), num_, size);
            if (one->across.call != nullptr) {
                across.resize(added_.size());
                one->across(x_.data(), across.data(), num_, size, false);
                x_.swap(across);
            }
            for (size_t i = 0; i < added_.size(); ++i) x_[i] += added_[i];
        }
    }

    const HeadDrafts& d_;
    std::vector<float> x_, added_;
};

// Logits of one text's positions, which are there already.
struct Positions {
    const Choice& choice;

    float* logits(int depth) const { return choice.logits_of(0, depth); }
    void put(int, int64_t) const {}
};

}  // namespace

}  // namespace outrider

// Whether all logits, of positions that are drafted at once, were numbers.
extern "C" int outrider_choose(const outrider::Choice* choice) {
    outrider::Positions path{*choice};
    return choice->wide != nullptr ? outrider::shape_trees(*choice)
                                   : outrider::choose_chains(*choice, path);
}

// 0, before anything is computed, for a pending token that is not in the vocabulary; -1 if some logits are
// no numbers.
extern "C" int outrider_head_drafts(const outrider::HeadDrafts* drafts) {
    for (int i = 0; i < drafts->num_texts; ++i)
        if (drafts->pending[i] < 0 || drafts->pending[i] >= drafts->vocab_size) return 0;
    outrider::HeadPaths paths(*drafts);
    return outrider::choose(*drafts, paths) ? 1 : -1;
}
