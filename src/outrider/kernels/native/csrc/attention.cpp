// Softmax attention of packed tokens over paged keys; attention.h has the arithmetic of one token.
//
// A work item is a few neighbouring tokens of one sequence and one key/value head, so a verify pass
// streams the memory of a long text about as often as a single token does. Where there are too few
// items for the threads, each span of their keys is an item of its own.
#include "attention.h"
#include "attention_tiles.h"

namespace outrider {

namespace {

// Of a thread.
constexpr int FEW_ITEMS = 4;
// Multiply-adds below which a second thread costs more than it saves.
constexpr int64_t MIN_SPLIT_WORK = 1 << 17;
// Of what spans leave behind before it is merged.
constexpr int64_t MAX_PARTIAL_FLOATS = 1 << 20;

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

// The parts of a prompt's pass behind a long text: tall items, which prepare the keys of that text few
// times, and as many for each thread. 0 where items would see very different numbers of keys.
template <class Item>
int tall_parts(const Pass& pass, int64_t num_keys, int num_threads) {
    const int64_t num = pass.num_tokens, queries = num * (pass.num_heads / pass.num_kv_heads);
    const bool is_one_text = pass.seq[0] == pass.seq[num - 1];
    if (Item::TALL_QUERIES == Item::MAX_QUERIES || queries <= Item::MAX_QUERIES || !is_one_text
        || num_keys < 4 * num * num)
        return 0;
    int parts = static_cast<int>((queries + Item::TALL_QUERIES - 1) / Item::TALL_QUERIES);
    while (parts * pass.num_kv_heads % num_threads != 0) ++parts;
    return parts;
}

// True if two items without packed keys, of up to FEW_QUERIES each, take less time than one that packs
// them: of a draft's rows behind a text that is not short.
template <class Item>
bool halves_pay(const Pass& pass, int64_t num_keys) {
    constexpr int MIN_KEYS = 256;
    const int group = pass.num_heads / pass.num_kv_heads, most = Item::FEW_QUERIES / group;
    return pass.num_tokens > most && pass.num_tokens <= 2 * most
        && pass.seq[0] == pass.seq[pass.num_tokens - 1]
        && num_keys >= int64_t{MIN_KEYS} * pass.num_tokens;
}

// Of tokens, each with an item for every key/value head.
struct Groups {
    const Tokens* at;
    int num_items;
};

// Of rows of results, how many ahead of use memory is asked for them.
constexpr int RESULTS_AHEAD = 4;

template <class Item>
void write_out(const Pass& pass, const Call& call, int n, int h, const Attended& attended) {
    float* to = call.out + (static_cast<int64_t>(n) * pass.num_heads + h) * pass.head_dim;
    const int64_t ahead = int64_t{RESULTS_AHEAD} * pass.num_heads * pass.head_dim;
    if (n + RESULTS_AHEAD < pass.num_tokens)
        for (int d = 0; d < pass.head_dim; d += CACHE_LINE / sizeof(float))
            ask_memory(to + ahead + d);
    Item::put(attended.mixed, 1.0f / attended.sum, pass.head_dim, to);
}

// What spans left behind of every query, to be merged. Place 0 has all spans before, or the
// first; then come up to `at_once` more.
class Partials {
  public:
    Partials(const Pass& pass, int padded_dim, int num_spans)
        : num_heads_(pass.num_heads), padded_dim_(padded_dim),
          span_size_(int64_t{pass.num_tokens} * num_heads_ * (padded_dim + LANES)),
          at_once_(static_cast<int>(
              std::clamp<int64_t>(MAX_PARTIAL_FLOATS / span_size_, 1, num_spans))) {}

    int at_once() const { return at_once_; }
    size_t bytes() const { return sizeof(float) * (at_once_ + 1) * span_size_; }
    void lie_at(void* memory) { memory_ = static_cast<float*>(memory); }

    void keep(int place, int n, int h, const Attended& attended) {
        float* to = row(place, n, h);
        std::copy_n(attended.mixed, padded_dim_, to);
        to[padded_dim_] = attended.max, to[padded_dim_ + 1] = attended.sum;
    }

    Attended at(int place, int n, int h) {
        float* from = row(place, n, h);
        return {from, from[padded_dim_], from[padded_dim_ + 1]};
    }

  private:
    float* row(int place, int n, int h) {
        const int64_t query = static_cast<int64_t>(n) * num_heads_ + h;
        return memory_ + place * span_size_ + query * (padded_dim_ + LANES);
    }

    const int num_heads_, padded_dim_;
    const int64_t span_size_;
    const int at_once_;
    float* memory_ = nullptr;
};

// Each span of an item by itself: no longer a text than others keeps a thread busy alone.
template <class Item>
void attend_by_spans(const Pass& pass, const Call& call, const typename Item::Keys& arena,
                     const Groups& groups, Partials& partials, Spans all) {
    Team& team = pass.team->here();
    const int padded_dim = Item::padded(pass.head_dim);
    for (int done = all.first, count; done < all.end; done += count) {
        count = std::min(partials.at_once(), all.end - done);
        // What was merged before lies at place 0.
        const int shift = done == all.first ? done : done - 1;
        team.run(groups.num_items * count, 1, [&](int first, int last, int thread) {
            for (int i = first; i < last; ++i) {
                const int span = done + i % count, item = i / count;
                Item one(pass, call, arena, groups.at[item / pass.num_kv_heads],
                         item % pass.num_kv_heads, team.own(thread));
                one.attend(span, span + 1);
                one.each_query([&](int n, int h, const Attended& attended) {
                    partials.keep(span - shift, n, h, attended);
                });
            }
        });
        const int num_rows = pass.num_tokens * pass.num_heads;
        const int grain = std::max(1, num_rows / team.num_threads());
        team.run(num_rows, grain, [&](int first, int last, int) {
            for (int i = first; i < last; ++i) {
                const int n = i / pass.num_heads, h = i % pass.num_heads;
                const Spans own = Item::spans(pass, call.look, n);
                Attended merged = partials.at(0, n, h);
                for (int span = std::max(done, own.first); span < std::min(done + count, own.end);
                     ++span) {
                    const Attended next = partials.at(span - shift, n, h);
                    if (span == own.first) merged = next;
                    else merge(&merged, next, padded_dim);
                }
                partials.keep(0, n, h, merged);
                if (done + count >= all.end) write_out<Item>(pass, call, n, h, merged);
            }
        });
    }
}

template <class Item>
Spans spans_of(const Pass& pass, const Look& look, Tokens tokens) {
    Spans all = Item::spans(pass, look, tokens.first);
    for (int n = tokens.first + 1; n < tokens.last; ++n)
        all = all.with(Item::spans(pass, look, n));
    return all;
}

template <class Item>
void attention(const Pass& pass, const Call& call, const typename Item::Keys& arena) {
    Team& team = pass.team->here();
    std::lock_guard<std::mutex> lock(team.entry());
    int64_t num_keys = 0;
    for (int n = 0; n < pass.num_tokens; ++n) num_keys += num_seen(pass, call.look, n);
    const Spans spans = spans_of<Item>(pass, call.look, {0, pass.num_tokens});
    const bool split = 2 * num_keys * pass.num_heads * pass.head_dim >= MIN_SPLIT_WORK;
    const int num_threads = split ? team.num_threads() : 1;
    const int group = pass.num_heads / pass.num_kv_heads;
    const int64_t fair = (pass.num_tokens * pass.num_kv_heads + num_threads - 1) / num_threads;
    int most = static_cast<int>(std::clamp<int64_t>(Item::MAX_QUERIES / group, 1, fair));
    const int parts = tall_parts<Item>(pass, num_keys, num_threads);
    if (parts > 0) most = (pass.num_tokens + parts - 1) / parts;
    if (halves_pay<Item>(pass, num_keys)) most = std::min(most, Item::FEW_QUERIES / group);
    Partials partials(pass, Item::padded(pass.head_dim), spans.count());
    const size_t room = sizeof(Tokens) * (pass.num_tokens + pass.num_tokens % 2);
    const bool may_part = num_threads > 1 && spans.count() > 1 && parts == 0;
    void* shared = team.shared().take(room + (may_part ? partials.bytes() : 0));
    auto* groups = static_cast<Tokens*>(shared);
    int items = group_tokens(pass, most, groups) * pass.num_kv_heads;
    if (may_part && items < FEW_ITEMS * num_threads) {
        partials.lie_at(static_cast<char*>(shared) + room);
        return attend_by_spans<Item>(pass, call, arena, {groups, items}, partials, spans);
    }
    // A few items that threads cannot share evenly are halved.
    for (; most > 1 && items % num_threads != 0 && items < FEW_ITEMS * num_threads;
         items = group_tokens(pass, most, groups) * pass.num_kv_heads)
        most = (most + 1) / 2;
    team.run(items, split ? 1 : items, [&](int first, int last, int thread) {
        // The last tokens of a text first: they see most keys, and the threads end together.
        for (int i = items - 1 - first; i > items - 1 - last; --i) {
            const Tokens tokens = groups[i / pass.num_kv_heads];
            const int behind = std::max(i - 1, 0);
            FirstKeys next(pass, call.look, arena, groups[behind / pass.num_kv_heads].first,
                           behind % pass.num_kv_heads);
            if (i == 0) next.end();
            Item item(pass, call, arena, tokens, i % pass.num_kv_heads, team.own(thread));
            const Spans own = spans_of<Item>(pass, call.look, tokens);
            item.attend(own.first, own.end, next);
            item.each_query([&](int n, int h, const Attended& attended) {
                write_out<Item>(pass, call, n, h, attended);
            });
        }
    });
}

}  // namespace

}  // namespace outrider

using namespace outrider;

extern "C" {

void outrider_attention_float32(const Pass* pass, const float* qkv, float* keys, float* values,
                                const Look* look, float* out) {
    attention<Item<float>>(*pass, {qkv, out, *look}, {*pass, keys, values});
}

void outrider_attention_bfloat16(const Pass* pass, const float* qkv, BFloat16* keys,
                                 BFloat16* values, const Look* look, float* out) {
    attention<Item<BFloat16>>(*pass, {qkv, out, *look}, {*pass, keys, values});
}

void outrider_attention_float16(const Pass* pass, const float* qkv, Float16* keys, Float16* values,
                                const Look* look, float* out) {
    attention<Item<Float16>>(*pass, {qkv, out, *look}, {*pass, keys, values});
}

void outrider_attention_int8(const Pass* pass, const float* qkv, Int8* keys, Int8* values,
                             const Look* look, float* out) {
    attention<Item<Int8>>(*pass, {qkv, out, *look}, {*pass, keys, values});
}

#if defined(OUTRIDER_HAS_TILES)
// On vectors for heads of other sizes.
void outrider_attention_bfloat16_tiles(const Pass* pass, const float* qkv, BFloat16* keys,
                                       BFloat16* values, const Look* look, float* out) {
    if (!TileItem::takes(*pass))
        return outrider_attention_bfloat16(pass, qkv, keys, values, look, out);
    attention<TileItem>(*pass, {qkv, out, *look}, {*pass, keys, values});
}
#endif
}
