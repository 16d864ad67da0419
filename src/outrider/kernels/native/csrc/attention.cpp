// Softmax attention of packed tokens over paged keys; a token's arithmetic is its own.
//
// For one query head: a dot product per key, its lanes summed by one tree; the exact maximum;
// exponentials, summed per lane of logical position; values weighted and added one key after the
// other. Nothing of it depends on where keys lie or on other tokens, and only named slots are read.
//
// A work item is a few neighbouring tokens of one sequence and one key/value head. Their queries
// share the keys at the positions that all of them see: each block of keys is read once and serves
// every query from the first-level cache, so a verify pass streams the memory of a long text about
// as often as a single token does. The keys past those belong to one token each.
#include <algorithm>
#include <limits>

#include "blocks.h"
#include "pass.h"
#include "team.h"
#include "vectors.h"

namespace outrider {

namespace {

// Queries of an item, and scores it may keep: enough sharing, few enough to stay in the caches.
constexpr int MAX_QUERIES = 64;
constexpr int64_t MAX_SCORES = 1 << 19;
// From here on, widening a block once pays.
constexpr int MIN_WIDEN_QUERIES = 2 * TILE_QUERIES + 1;
// Of a thread.
constexpr int FEW_ITEMS = 4;
// Multiply-adds below which a second thread costs more than it saves.
constexpr int64_t MIN_SPLIT_WORK = 1 << 17;

// Turns scores into weights e^(score - max), zero past the last key; returns 1 / their sum, to which
// a sink adds. One copy of it serves all items: a compiler may fuse sums in one and not in another.
__attribute__((noinline)) float soften(float* scores, int num_keys, float cap, const float* sink) {
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
    return 1.0f / (sink == nullptr ? total : total + exp(splat(*sink - max))[0]);
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

template <class T>
class Item {
  public:
    Item(const Pass& pass, const Call& call, const Arena<T>& arena, Tokens tokens, int head,
         Scratch& scratch)
        : pass_(pass), call_(call), tokens_(tokens), head_(head), dim_(pass.head_dim),
          padded_dim_((dim_ + Layout<T>::STEP - 1) / Layout<T>::STEP * Layout<T>::STEP),
          group_(pass.num_heads / pass.num_kv_heads),
          block_rows_(std::clamp(BLOCK_FLOATS / padded_dim_ / LANES * LANES, LANES, BLOCK_ROWS)),
          keys_{arena.key(head, 0), pass.slot_stride, dim_, padded_dim_},
          values_{arena.value(head, 0), pass.slot_stride, dim_, padded_dim_},
          first_shared_(0), end_shared_(pass.visible[tokens.first]) {
        int max_keys = 0;
        for (int n = tokens.first; n < tokens.last; ++n) {
            first_shared_ = std::max(first_shared_, first_key(n));
            end_shared_ = std::min(end_shared_, pass.visible[n]);
            max_keys = std::max(max_keys, pass.num_keys(n) - first_key(n));
        }
        // Where no key is seen by all, each token has all of its keys to itself.
        if (first_shared_ >= end_shared_) first_shared_ = end_shared_ = 0;
        divide(scratch, max_keys);
    }

    void attend() {
        read_queries();
        const bool whole = dim_ == padded_dim_;
        const bool once = !std::is_same_v<T, float> && num_queries() >= MIN_WIDEN_QUERIES;
        if constexpr (!std::is_same_v<T, Int8>) {
            if (whole && !once) {
                attend_with<T>([](auto& stored, const Slots& slots, Block<T>* block) {
                    point_at(stored, slots, block);
                });
                return write_out();
            }
        }
        attend_with<float>([this](auto& stored, const Slots& slots, Block<float>* block) {
            widen(stored, slots, space_, block);
        });
        write_out();
    }

  private:
    int num_queries() const { return (tokens_.last - tokens_.first) * group_; }
    int first_key(int n) const { return call_.look.first_key(pass_.num_keys(n)); }

    void divide(Scratch& scratch, int max_keys) {
        // A vector of scores may start anywhere and is stored whole.
        const size_t num_scores = (max_keys + 2 * LANES - 1) / LANES * LANES;
        const size_t per_query = 2 * padded_dim_ + num_scores, num = num_queries();
        const size_t num_floats = BLOCK_ROWS * padded_dim_ + num_scores + num * per_query;
        space_ = static_cast<float*>(
            scratch.take(sizeof(float) * num_floats + sizeof(Query) * num));
        float* slots = space_ + BLOCK_ROWS * padded_dim_;
        float* next = slots + num_scores;
        slots_ = reinterpret_cast<int32_t*>(slots);
        queries_ = reinterpret_cast<Query*>(next + num * per_query);
        for (size_t q = 0; q < num; ++q, next += per_query)
            queries_[q] = {next, next + padded_dim_, next + 2 * padded_dim_, 0.0f,
                           first_key(tokens_.first + static_cast<int>(q) / group_)};
    }

    template <class R, class Read>
    void attend_with(const Read& read) {
        Block<R> block;
        each_block([&](Tokens tokens, const Slots& slots, int t) {
            read(keys_, slots, &block);
            score(first_query(tokens), queries(tokens), t, block, padded_dim_, call_.look.scale);
        });
        const float* sinks = call_.look.sinks;
        for (int q = 0; q < num_queries(); ++q)
            queries_[q].scale =
                soften(queries_[q].scores,
                       pass_.num_keys(tokens_.first + q / group_) - queries_[q].first,
                       call_.look.cap,
                       sinks == nullptr ? nullptr : sinks + head_ * group_ + q % group_);
        each_block([&](Tokens tokens, const Slots& slots, int t) {
            read(values_, slots, &block);
            mix(first_query(tokens), queries(tokens), t, block, padded_dim_);
        });
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
            const int first = std::max(end_shared_, first_key(n)), visible = pass_.visible[n];
            list_paged(n, first, visible);
            // A window may begin among the keys that are listed.
            const int skipped = std::max(0, first - visible);
            const int num_listed = pass_.num_extra(n) - skipped;
            if (num_listed > 0)
                std::copy_n(pass_.extra_slots + pass_.extra_offsets[n] + skipped, num_listed,
                            slots_ + std::max(0, visible - first));
            blocks({n, n + 1}, first, pass_.num_keys(n), use);
        }
    }

    template <class Use>
    void blocks(Tokens tokens, int first, int last, const Use& use) {
        for (int t = first, count; t < last; t += count) {
            count = std::min(block_rows_, last - t);
            use(tokens, {slots_ + t - first, count, std::min(block_rows_, last - t - count)}, t);
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
            std::fill_n(queries_[q].vector, 2 * padded_dim_, 0.0f);  // and `mixed` behind it
            for (int d = 0; d < dim_; ++d) queries_[q].vector[Layout<T>::place(d)] = from[d];
        }
    }

    void write_out() {
        for (int q = 0; q < num_queries(); ++q) {
            const int64_t n = tokens_.first + q / group_, h = head_ * group_ + q % group_;
            float* to = call_.out + (n * pass_.num_heads + h) * dim_;
            const Query& query = queries_[q];
            for (int d = 0; d < dim_; ++d) to[d] = query.mixed[Layout<T>::place(d)] * query.scale;
        }
    }

    const Pass& pass_;
    const Call& call_;
    const Tokens tokens_;
    const int head_, dim_, padded_dim_, group_, block_rows_;
    const Stored<T> keys_, values_;
    int first_shared_, end_shared_;
    float* space_;
    int32_t* slots_;
    Query* queries_;
};

// Neighbours of one sequence in groups of nearly equal height.
int group_tokens(const Pass& pass, int most, Tokens* groups) {
    int num_groups = 0;
    for (int first = 0, last; first < pass.num_tokens; first = last) {
        for (last = first; last < pass.num_tokens && pass.seq[last] == pass.seq[first];) ++last;
        const int num = last - first, parts = (num + most - 1) / most;
        for (int part = 0; part < parts; ++part)
            groups[num_groups++] = {first + num * part / parts, first + num * (part + 1) / parts};
    }
    return num_groups;
}

template <class T>
void attention(const Pass& pass, const Call& call, const Arena<T>& arena) {
    Team& team = pass.team->here();
    std::lock_guard<std::mutex> lock(team.entry());
    int64_t num_keys = 0, max_keys = 1;
    for (int n = 0; n < pass.num_tokens; ++n) {
        const int seen = pass.num_keys(n) - call.look.first_key(pass.num_keys(n));
        num_keys += seen;
        max_keys = std::max<int64_t>(max_keys, seen);
    }
    const bool split = 2 * num_keys * pass.num_heads * pass.head_dim >= MIN_SPLIT_WORK;
    const int num_threads = split ? team.num_threads() : 1;
    const int group = pass.num_heads / pass.num_kv_heads;
    const int64_t fitting = std::min<int64_t>(MAX_QUERIES, MAX_SCORES / max_keys) / group;
    const int64_t fair = (pass.num_tokens * pass.num_kv_heads + num_threads - 1) / num_threads;
    int most = static_cast<int>(std::max<int64_t>(1, std::min(fitting, fair)));
    auto* groups = static_cast<Tokens*>(team.shared().take(sizeof(Tokens) * pass.num_tokens));
    int items = group_tokens(pass, most, groups) * pass.num_kv_heads;
    // A few items that threads cannot share evenly are halved.
    for (; most > 1 && items % num_threads != 0 && items < FEW_ITEMS * num_threads;
         items = group_tokens(pass, most, groups) * pass.num_kv_heads)
        most = (most + 1) / 2;
    team.run(items, split ? 1 : items, [&](int first, int last, int thread) {
        for (int i = first; i < last; ++i) {
            const Tokens tokens = groups[i / pass.num_kv_heads];
            Item<T>(pass, call, arena, tokens, i % pass.num_kv_heads, team.own(thread)).attend();
        }
    });
}

}  // namespace

}  // namespace outrider

using namespace outrider;

extern "C" {

void outrider_attention_float32(const Pass* pass, const float* qkv, float* keys, float* values,
                                const Look* look, float* out) {
    attention<float>(*pass, {qkv, out, *look}, {*pass, keys, values});
}

void outrider_attention_bfloat16(const Pass* pass, const float* qkv, BFloat16* keys,
                                 BFloat16* values, const Look* look, float* out) {
    attention<BFloat16>(*pass, {qkv, out, *look}, {*pass, keys, values});
}

void outrider_attention_float16(const Pass* pass, const float* qkv, Float16* keys, Float16* values,
                                const Look* look, float* out) {
    attention<Float16>(*pass, {qkv, out, *look}, {*pass, keys, values});
}

void outrider_attention_int8(const Pass* pass, const float* qkv, Int8* keys, Int8* values,
                             const Look* look, float* out) {
    attention<Int8>(*pass, {qkv, out, *look}, {*pass, keys, values});
}
}
