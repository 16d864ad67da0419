// An item of attention: a few neighbouring tokens, one key/value head, and spans of their keys.
//
// Of a span, for one query head: a dot product per key, its lanes summed by one tree; the exact
// maximum; exponentials, summed per lane of logical position; values weighted and added one key
// after the other. Spans are then merged in order. Nothing of it depends on where keys lie or on
// other tokens, and only named slots are read.
//
// The queries share the keys at the positions that all tokens see: each block of keys is read once
// and serves every query from the first-level cache. The keys past those belong to one token each.
#pragma once

#include <algorithm>
#include <limits>

#include "blocks.h"
#include "pass.h"
#include "team.h"
#include "vectors.h"

namespace outrider {

// Keys of a span: their scores for all queries of an item stay in the second-level cache.
constexpr int SPAN = 1024;
// Whether widening a block once pays. With vectors of 512 bits it does not: a row of 16 bits takes
// half the loads, and one instruction more.
inline bool widens_once(int num_queries) {
    return LANES < 16 && num_queries > 2 * TILE_QUERIES;
}

// The first keys and values of a token and a key/value head, whose item comes next: memory is asked for
// them in parts while another item is computed, since it takes no more than a few lines at a time.
template <class T>
class FirstKeys {
  public:
    FirstKeys(const Pass& pass, const Look& look, const Arena<T>& arena, int n, int head)
        : pass_(pass), arena_(arena), head_(head),
          pages_(pass.pages + static_cast<int64_t>(pass.seq[n]) * pass.num_page_columns),
          at_(look.first_key(pass.num_keys(n))) {
        constexpr int64_t BYTES = 1 << 15;
        const int64_t rows = BYTES / (static_cast<int64_t>(sizeof(T)) * pass.slot_stride);
        const auto most = std::clamp<int64_t>(rows, 2 * AHEAD_ROWS, 4 * AHEAD_ROWS);
        last_ = static_cast<int>(std::min<int64_t>(at_ + most, pass.visible[n]));
        part_ = (last_ - at_ + PARTS - 1) / PARTS;
    }

    void end() { last_ = at_; }
    void ask_part() { ask(std::min(at_ + part_, last_)); }
    void ask_rest() { ask(last_); }

  private:
    static constexpr int PARTS = 4;

    void ask(int end) {
        const int size = pass_.page_size;
        for (int count; at_ < end; at_ += count) {
            count = std::min(size - at_ % size, end - at_);
            const int64_t slot = static_cast<int64_t>(pages_[at_ / size]) * size + at_ % size;
            const int64_t bytes = sizeof(T) * count * pass_.slot_stride;
            const auto* keys = reinterpret_cast<const char*>(arena_.key(head_, slot));
            const auto* values = reinterpret_cast<const char*>(arena_.value(head_, slot));
            for (int64_t line = 0; line < bytes; line += CACHE_LINE)
                ask_later(keys + line), ask_later(values + line);
        }
    }

    const Pass& pass_;
    const Arena<T>& arena_;
    const int head_;
    const int32_t* pages_;
    int at_, last_, part_;
};

// What a query has attended to: values under weights e^(score - max), and the weights' sum.
struct Attended {
    float* mixed;
    float max, sum;
};

// Turns scores into weights, zero past the last key. A sink counts as a key without a value. One
// copy of it serves all items: a compiler may fuse sums in one and not in another.
__attribute__((noinline)) inline void soften(float* scores, int num_keys, float cap,
                                             const float* sink, Attended* to) {
    const int padded = (num_keys + LANES - 1) / LANES * LANES;
    if (cap > 0.0f)
        for (int t = 0; t < num_keys; t += LANES)
            store_some(scores + t, capped(load_some(scores + t, num_keys - t), cap), num_keys - t);
    for (int t = num_keys; t < padded; ++t) scores[t] = -std::numeric_limits<float>::infinity();
    Vec most = load(scores);
    for (int t = LANES; t < padded; t += LANES) most = larger(load(scores + t), most);
    float max = largest_lane(most);
    if (sink != nullptr) max = *sink > max ? *sink : max;
    Vec sum = {};
    for (int t = 0; t < padded; t += LANES) {
        const Vec weight = exp(load(scores + t) - max);
        store(scores + t, weight);
        sum += weight;
    }
    const float total = sum_of_lanes(sum);
    to->max = max;
    to->sum = sink == nullptr ? total : total + exp(splat(*sink - max))[0];
}

// Adds the next span to those before it (Milakov and Gimelshein, arXiv:1805.02867).
__attribute__((noinline)) inline void merge(Attended* all, const Attended& span, int padded_dim) {
    const float max = all->max > span.max ? all->max : span.max;
    const float kept = exp(splat(all->max - max))[0], added = exp(splat(span.max - max))[0];
    all->max = max;
    all->sum = fused(splat(span.sum), splat(added), splat(all->sum * kept))[0];
    for (int d = 0; d < padded_dim; d += LANES)
        store(all->mixed + d,
              fused(load(span.mixed + d), splat(added), load(all->mixed + d) * kept));
}

struct Call {
    const float* qkv;
    float* out;
    const Look& look;
};

// Tokens [first, last) of one sequence.
struct Tokens {
    int first, last;
};

// Of a token's keys, or of all tokens'.
struct Spans {
    int first, end;

    int count() const { return end - first; }
    Spans with(Spans other) const {
        return {std::min(first, other.first), std::max(end, other.end)};
    }
};

inline int num_seen(const Pass& pass, const Look& look, int n) {
    return pass.num_keys(n) - look.first_key(pass.num_keys(n));
}

inline int num_spans(int64_t num_keys) { return static_cast<int>((num_keys + SPAN - 1) / SPAN); }

template <class T>
class Item {
  public:
    using Keys = Arena<T>;
    // Enough sharing, few enough to stay in the caches.
    static constexpr int MAX_QUERIES = 64, TALL_QUERIES = MAX_QUERIES, FEW_QUERIES = 0;

    static int padded(int dim) {
        return (dim + Layout<T>::STEP - 1) / Layout<T>::STEP * Layout<T>::STEP;
    }
    static void put(const float* sums, float scale, int dim, float* to) {
        for (int d = 0; d < dim; ++d) to[d] = sums[Layout<T>::place(d)] * scale;
    }
    static Spans spans(const Pass& pass, const Look& look, int n) {
        return {0, num_spans(num_seen(pass, look, n))};
    }

    Item(const Pass& pass, const Call& call, const Arena<T>& arena, Tokens tokens, int head,
         Scratch& scratch)
        : pass_(pass), call_(call), tokens_(tokens), head_(head), dim_(pass.head_dim),
          padded_dim_(padded(dim_)), group_(pass.num_heads / pass.num_kv_heads),
          block_rows_(std::clamp(BLOCK_FLOATS / padded_dim_ / LANES * LANES, LANES, BLOCK_ROWS)),
          keys_{arena.key(head, 0), pass.slot_stride, dim_, padded_dim_},
          values_{arena.value(head, 0), pass.slot_stride, dim_, padded_dim_} {
        divide(scratch);
        read_queries();
    }

    void attend(int first_span, int end_span, FirstKeys<T>& next) {
        next.ask_rest();
        attend(first_span, end_span);
    }

    void attend(int first_span, int end_span) {
        for (int span = first_span; span < end_span; ++span) {
            begin(span, span == first_span);
            attend_span();
            if (span == first_span) continue;
            for (int q = 0; q < num_queries(); ++q)
                if (num_keys(q) > 0)
                    merge(&attended_[q], {queries_[q].mixed, spans_[q].max, spans_[q].sum},
                          padded_dim_);
        }
    }

    // Calls use(token, head, attended) for each query.
    template <class Use>
    void each_query(const Use& use) const {
        for (int q = 0; q < num_queries(); ++q)
            use(tokens_.first + q / group_, head_ * group_ + q % group_, attended_[q]);
    }

  private:
    int num_queries() const { return (tokens_.last - tokens_.first) * group_; }
    int first_key(int n) const {
        return call_.look.first_key(pass_.num_keys(n)) + span_ * SPAN;
    }
    int end_key(int n) const { return std::min(pass_.num_keys(n), first_key(n) + SPAN); }
    int num_keys(int q) const {
        const int n = tokens_.first + q / group_;
        return end_key(n) - first_key(n);
    }

    void divide(Scratch& scratch) {
        // A vector of scores may start anywhere and is stored whole.
        constexpr size_t NUM_SCORES = SPAN + LANES;
        const size_t per_query = 3 * padded_dim_ + NUM_SCORES, num = num_queries();
        const size_t num_floats = BLOCK_ROWS * padded_dim_ + NUM_SCORES + num * per_query;
        const size_t room = (sizeof(Query) + 2 * sizeof(Attended)) * num;
        space_ = static_cast<float*>(scratch.take(sizeof(float) * num_floats + room));
        float* slots = space_ + BLOCK_ROWS * padded_dim_;
        float* next = slots + NUM_SCORES;
        slots_ = reinterpret_cast<int32_t*>(slots);
        queries_ = reinterpret_cast<Query*>(next + num * per_query);
        attended_ = reinterpret_cast<Attended*>(queries_ + num);
        spans_ = attended_ + num;
        for (size_t q = 0; q < num; ++q, next += per_query) {
            queries_[q] = {next, nullptr, next + 3 * padded_dim_, 0};
            attended_[q].mixed = next + padded_dim_;
            spans_[q].mixed = next + 2 * padded_dim_;
        }
    }

    // Where some token has no key in the span, or no key is seen by all, none is shared.
    void begin(int span, bool is_first) {
        span_ = span;
        first_shared_ = 0, end_shared_ = std::numeric_limits<int>::max();
        bool all = true;
        for (int n = tokens_.first; n < tokens_.last; ++n) {
            all &= first_key(n) < end_key(n);
            first_shared_ = std::max(first_shared_, first_key(n));
            end_shared_ = std::min({end_shared_, pass_.visible[n], end_key(n)});
        }
        if (!all || first_shared_ >= end_shared_) first_shared_ = end_shared_ = 0;
        for (int q = 0; q < num_queries(); ++q) {
            queries_[q].first = first_key(tokens_.first + q / group_);
            queries_[q].mixed = is_first ? attended_[q].mixed : spans_[q].mixed;
            std::fill_n(queries_[q].mixed, padded_dim_, 0.0f);
        }
        softened_ = is_first ? attended_ : spans_;
    }

    void attend_span() {
        const bool whole = dim_ == padded_dim_;
        const bool once = !std::is_same_v<T, float> && widens_once(num_queries());
        if constexpr (!std::is_same_v<T, Int8>) {
            if (whole && !once)
                return attend_with<T>([](auto& stored, const Slots& slots, Block<T>* block) {
                    point_at(stored, slots, block);
                });
        }
        attend_with<float>([this](auto& stored, const Slots& slots, Block<float>* block) {
            widen(stored, slots, space_, block);
        });
    }

    template <class R, class Read>
    void attend_with(const Read& read) {
        Block<R> block;
        each_block([&](Tokens tokens, const Slots& slots, int t) {
            read(keys_, slots, &block);
            score(first_query(tokens), queries(tokens), t, block, padded_dim_, call_.look.scale,
                  [&](int first, int count) { ask(keys_, slots, tokens, first, count); });
        });
        const float* sinks = span_ == 0 ? call_.look.sinks : nullptr;
        for (int q = 0; q < num_queries(); ++q)
            if (num_keys(q) > 0)
                soften(queries_[q].scores, num_keys(q), call_.look.cap,
                       sinks == nullptr ? nullptr : sinks + head_ * group_ + q % group_,
                       &softened_[q]);
        each_block([&](Tokens tokens, const Slots& slots, int t) {
            read(values_, slots, &block);
            mix(first_query(tokens), queries(tokens), t, block, padded_dim_,
                [&](int first, int count) { ask(values_, slots, tokens, first, count); });
        });
    }

    // Before a tile of `count` queries of `tokens`: its share of the rows that come next, since a core
    // has few misses under way at a time.
    void ask(const Stored<T>& stored, const Slots& slots, Tokens tokens, int first, int count) {
        const int num = queries(tokens), rows = slots.num_next;
        prefetch(stored, slots, rows * first / num, rows * (first + count) / num);
    }

    Query* first_query(Tokens tokens) { return queries_ + (tokens.first - tokens_.first) * group_; }
    int queries(Tokens tokens) const { return (tokens.last - tokens.first) * group_; }

    // Calls use(tokens, slots, t) for blocks of keys at logical positions from t, in order for each
    // token: those before what all tokens share, what they share, each token's own last.
    template <class Use>
    void each_block(const Use& use) {
        for (int n = tokens_.first; n < tokens_.last; ++n) {
            if (first_key(n) >= first_shared_) continue;
            list_paged(n, first_key(n), first_shared_);
            blocks({n, n + 1}, first_key(n), first_shared_, use);
        }
        list_paged(tokens_.first, first_shared_, end_shared_);
        blocks(tokens_, first_shared_, end_shared_, use);
        for (int n = tokens_.first; n < tokens_.last; ++n) {
            const int first = std::max(end_shared_, first_key(n)), last = end_key(n);
            const int first_extra = std::max(first, pass_.visible[n]);
            list_paged(n, first, std::min(last, first_extra));
            if (first_extra < last)
                std::copy(extra(n, first_extra), extra(n, last), slots_ + first_extra - first);
            blocks({n, n + 1}, first, last, use);
        }
    }

    // The slot of a position that is not paged.
    const int32_t* extra(int n, int t) const {
        return pass_.extra_slots + pass_.extra_offsets[n] + t - pass_.visible[n];
    }

    template <class Use>
    void blocks(Tokens tokens, int first, int last, const Use& use) {
        // A tile alone asks for few rows at a time, so its blocks have few.
        const int most = queries(tokens) <= TILE_QUERIES ? LANES : block_rows_;
        for (int t = first, count; t < last; t += count) {
            count = std::min(most, last - t);
            const int32_t* at = slots_ + t - first;
            use(tokens, {at, count, at + AHEAD_ROWS, std::clamp(last - t - AHEAD_ROWS, 0, count)}, t);
        }
    }

    // Lists the slots of positions [first, last) of token n's sequence.
    void list_paged(int n, int first, int last) {
        const int size = pass_.page_size;
        const int32_t* pages =
            pass_.pages + static_cast<int64_t>(pass_.seq[n]) * pass_.num_page_columns;
        int32_t* slots = slots_;
        for (int t = first; t < last;) {
            const int within = t % size, count = std::min(size - within, last - t);
            const int base = pages[t / size] * size + within;
            for (int i = 0; i < count; ++i) slots[i] = base + i;
            slots += count, t += count;
        }
    }

    void read_queries() {
        for (int q = 0; q < num_queries(); ++q) {
            const int64_t n = tokens_.first + q / group_, h = head_ * group_ + q % group_;
            const float* from = call_.qkv + n * pass_.row_size + h * dim_;
            std::fill_n(queries_[q].vector, padded_dim_, 0.0f);
            for (int d = 0; d < dim_; ++d) queries_[q].vector[Layout<T>::place(d)] = from[d];
        }
    }

    const Pass& pass_;
    const Call& call_;
    const Tokens tokens_;
    const int head_, dim_, padded_dim_, group_, block_rows_;
    const Stored<T> keys_, values_;
    int span_ = 0, first_shared_ = 0, end_shared_ = 0;
    float* space_;
    int32_t* slots_;
    Query* queries_;
    Attended *attended_, *spans_, *softened_;
};

}  // namespace outrider
