// An item of attention on tiles, over keys and values of bfloat16.
//
// Spans and blocks of keys lie at absolute positions: block b has the positions from 32 b. Queries and
// weights are rounded to bfloat16; what a token does not see has the weight zero, which adds nothing to
// a sum, so a block serves all queries of an item. Its keys and values are packed for tiles once.
//
// From the block on in which a draft's own slots begin, blocks belong to one token: its rows alone
// have weights there.
#pragma once

#include "attention.h"
#include "attention_few.h"
#include "attention_softmax.h"

#if defined(OUTRIDER_HAS_TILES)

namespace outrider {

// How many rows of queries ahead of use memory is asked for them.
constexpr int ROWS_AHEAD = 8;

class TileItem {
  public:
    using Keys = Arena<BFloat16>;
    static constexpr int MAX_QUERIES = 256, TALL_QUERIES = 1024, FEW_QUERIES = TILE_ROWS;

    static bool takes(const Pass& pass) {
        return pass.head_dim % TILE_BLOCK == 0 && pass.head_dim <= MAX_TILE_DIM;
    }
    static int padded(int dim) { return dim; }
    // Sums times `scale`, of which pack_values changed the order.
    static void put(const float* sums, float scale, int dim, float* to) {
        for (int d = 0; d < dim; d += TILE_BLOCK)
            for (int at = 0; at < TILE_COLUMNS; at += 4)
                for (int i = 0; i < 4; ++i) {
                    to[d + 2 * at + i] = sums[d + at + i] * scale;
                    to[d + 2 * at + 4 + i] = sums[d + TILE_COLUMNS + at + i] * scale;
                }
    }
    static Spans spans(const Pass& pass, const Look& look, int n) {
        const int num_keys = pass.num_keys(n);
        return {look.first_key(num_keys) / SPAN, num_spans(num_keys)};
    }

    TileItem(const Pass& pass, const Call& call, const Arena<BFloat16>& arena, Tokens tokens,
             int head, Scratch& scratch)
        : pass_(pass), call_(call), tokens_(tokens), head_(head), dim_(pass.head_dim),
          steps_(dim_ / TILE_BLOCK), group_(pass.num_heads / pass.num_kv_heads),
          rows_((tokens.last - tokens.first) * group_), are_few_(rows_ <= FEW_QUERIES),
          num_tiles_(RowTiles(rows_).count),
          height_(are_few_ ? TILE_ROWS : RowTiles(rows_).height),
          result_stride_(sizeof(float) * dim_ + CACHE_LINE),
          blocks_({arena.key(head, 0), pass.slot_stride, dim_, dim_},
                  {arena.value(head, 0), pass.slot_stride, dim_, dim_}),
          few_(blocks_) {
        divide(scratch);
        read_queries();
    }

    void attend(int first_span, int end_span, FirstKeys<BFloat16>& next) {
        next_ = &next;
        attend(first_span, end_span);
        next.ask_rest();
    }

    void attend(int first_span, int end_span) {
        const Tiles in_use({height_, TILE_BYTES});
        for (int q = 0; q < rows_; ++q) {
            attended_[q] = {mixed_ + q * dim_, -std::numeric_limits<float>::infinity(), 0.0f};
            std::fill_n(attended_[q].mixed, dim_, 0.0f);
        }
        first_span_ = first_span;
        for (int span = first_span; span < end_span; ++span) {
            begin(span);
            for (int first = 0; first < rows_; first += 2 * height_) attend_rows(first);
        }
    }

    // Calls use(token, head, attended) for each query.
    template <class Use>
    void each_query(const Use& use) const {
        for (int q = 0; q < rows_; ++q)
            use(tokens_.first + q / group_, head_ * group_ + q % group_, attended_[q]);
    }

  private:
    // What a token sees of the span, and the block from which all are its own.
    struct Seen : Range {
        int own;

        int end_shared() const { return std::min(own, end_block()); }
        bool has(int block) const { return first_block() <= block && block < end_block(); }
    };

    // Two tiles of rows, or one, and the blocks that they see.
    struct Pair {
        int first, count;
        bool both;
        Tokens tokens;
        int first_block, end_block, end_shared, first_own;
        bool goes_on;

        int num_blocks() const { return end_block - first_block; }
        int first_chunk() const { return first_block / CHUNK_BLOCKS; }
        int end_chunk() const { return (end_block + CHUNK_BLOCKS - 1) / CHUNK_BLOCKS; }
        Pair within(int chunk) const {
            Pair part = *this;
            part.first_block = std::max(first_block, chunk * CHUNK_BLOCKS);
            part.end_block = std::min(end_block, (chunk + 1) * CHUNK_BLOCKS);
            part.end_shared = std::min(end_shared, part.end_block);
            part.goes_on = part.first_block > first_block;
            return part;
        }
    };

    void ask_for_next() {
        if (next_ != nullptr) next_->ask_part();
    }

    const Seen& seen(int n) const { return seen_[n - tokens_.first]; }
    int token(int row) const { return tokens_.first + row / group_; }

    void divide(Scratch& scratch) {
        // A token's own blocks take whole tiles from its first row on.
        all_rows_ = num_tiles_ * height_ + (pass_.extra_offsets == nullptr ? 0 : TILE_ROWS);
        const size_t packed = blocks_.packed_bytes();
        query_stride_ = (steps_ | 1) * TILE_BYTES;
        size_t size = 0;
        const auto place = [&](size_t bytes) {
            const size_t at = size;
            size += (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
            return at;
        };
        const size_t keys = place(packed), values = place(packed);
        const size_t own = place(steps_ * STEP_BYTES);
        const size_t queries = place(all_rows_ * query_stride_);
        const size_t scores = place(2 * TILE_ROWS * SCORE_STRIDE);
        const size_t weights = place(2 * TILE_ROWS * WEIGHT_STRIDE);
        const size_t some = place(2 * TILE_ROWS * TILE_BYTES), sums = place(sizeof(BlockSums));
        const size_t results = place(2 * TILE_ROWS * result_stride_);
        const size_t others = place(are_few_ ? TILE_ROWS * result_stride_ : 0);
        const size_t mixed = place(sizeof(float) * rows_ * dim_);
        const size_t attended = place(sizeof(Attended) * rows_);
        const size_t seen = place(sizeof(Seen) * (tokens_.last - tokens_.first));
        const size_t few = place(are_few_ ? few_.bytes() : 0);
        const size_t slots = place(blocks_.slot_bytes(pass_));
        auto* space = static_cast<uint8_t*>(scratch.take(size));
        blocks_.lie_at(space + keys, space + values, reinterpret_cast<int32_t*>(space + slots));
        own_ = space + own;
        queries_ = space + queries, scores_ = space + scores, weights_ = space + weights;
        some_ = space + some, results_ = space + results, other_results_ = space + others;
        few_.lie_at(space + few);
        sums_ = reinterpret_cast<BlockSums*>(space + sums);
        mixed_ = reinterpret_cast<float*>(space + mixed);
        attended_ = reinterpret_cast<Attended*>(space + attended);
        seen_ = reinterpret_cast<Seen*>(space + seen);
    }

    void read_queries() {
        std::memset(queries_ + rows_ * query_stride_, 0, (all_rows_ - rows_) * query_stride_);
        const int64_t size = group_ * dim_;
        for (int n = tokens_.first, q = 0; n < tokens_.last; ++n) {
            const float* from = call_.qkv + int64_t{n} * pass_.row_size + head_ * size;
            // Rows lie too far apart for the CPU to foresee them.
            if (n + ROWS_AHEAD < tokens_.last)
                for (int64_t d = 0; d < size; d += LANES)
                    ask_memory(from + ROWS_AHEAD * pass_.row_size + d);
            for (int h = 0; h < group_; ++h, ++q)
                for (int d = 0; d < dim_; d += 2 * LANES)
                    store_rounded(reinterpret_cast<BFloat16*>(queries_ + q * query_stride_) + d,
                                  load(from + h * dim_ + d), load(from + h * dim_ + d + LANES));
        }
        if (!are_few_) return;
        const uint8_t* rows[TILE_ROWS];
        for (int q = 0; q < TILE_ROWS; ++q) rows[q] = query(q);
        few_.read_queries(rows);
    }

    void begin(int span) {
        span_ = span, base_ = span * SPAN;
        blocks_.begin();
        for (int n = tokens_.first; n < tokens_.last; ++n) {
            Seen& at = seen_[n - tokens_.first];
            const int num_keys = pass_.num_keys(n);
            at.first = std::clamp(call_.look.first_key(num_keys) - base_, 0, SPAN);
            at.end = std::clamp(num_keys - base_, 0, SPAN);
            if (at.is_empty()) at.first = at.end = 0;
            at.own = pass_.num_extra(n) == 0
                ? SPAN_BLOCKS
                : std::clamp(pass_.visible[n] - base_, 0, SPAN) / BLOCK_KEYS;
            blocks_.add({at.first, std::min(at.end, at.own * BLOCK_KEYS)});
        }
        blocks_.list(pass_, pages(), base_);
    }

    // All tokens are of one sequence.
    const int32_t* pages() const {
        return pass_.pages + static_cast<int64_t>(pass_.seq[tokens_.first]) * pass_.num_page_columns;
    }
    int32_t paged(int position) const {
        const int size = pass_.page_size;
        return pages()[position / size] * size + position % size;
    }

    BlockRows own_rows(const Stored<BFloat16>& stored, int n, int block) const {
        const uint32_t named = seen(n).bits(block);
        BlockRows rows;
        for (int i = 0; i < BLOCK_KEYS; ++i) {
            rows.at[i] = ZEROS;
            if (!(named >> i & 1)) continue;
            const int position = base_ + block * BLOCK_KEYS + i, behind = position - pass_.visible[n];
            rows.at[i] = stored.row(behind < 0
                                        ? paged(position)
                                        : pass_.extra_slots[pass_.extra_offsets[n] + behind]);
        }
        return rows;
    }

    Pair pair_at(int first) const {
        const int count = std::min(2 * height_, rows_ - first);
        Pair to{first, count, count > height_, {token(first), token(first + count - 1) + 1},
                SPAN_BLOCKS, 0, 0, SPAN_BLOCKS, false};
        for (int n = to.tokens.first; n < to.tokens.last; ++n) {
            const Seen& at = seen(n);
            if (at.end == 0) continue;
            to.first_block = std::min(to.first_block, at.first_block());
            to.end_block = std::max(to.end_block, at.end_block());
            to.end_shared = std::max(to.end_shared, at.end_shared());
            if (at.own < at.end_block()) to.first_own = std::min(to.first_own, at.own);
        }
        return to;
    }

    void attend_rows(int first) {
        const Pair pair = pair_at(first);
        if (pair.first_block >= pair.end_block) return;
        const int num_rows = are_few_ ? rows_ : (1 + pair.both) * height_;
        begin_rows(pair, num_rows);
        for (int chunk = pair.first_chunk(); chunk < pair.end_chunk(); ++chunk) {
            const Pair part = pair.within(chunk);
            ask_for_next();
            score_rows(part);
            ask_for_next();
            softmax_.follow(scores_, num_rows, chunk, call_.look);
            if (part.goes_on) scale_results(num_rows);
            for (int row = 0; row < part.count; ++row) soften(part, row, chunk);
            ask_for_next();
            mix_rows(part);
        }
        softmax_.end(num_rows);
        keep(pair);
    }

    void begin_rows(const Pair& pair, int num_rows) {
        for (int row = 0; row < pair.count; ++row) {
            const int n = token(pair.first + row);
            const bool is_first = span_ == spans(pass_, call_.look, n).first;
            const float* sinks = is_first ? call_.look.sinks : nullptr;
            softmax_.begin(row, {seen(n).first, seen(n).end},
                           sinks == nullptr
                               ? nullptr
                               : sinks + head_ * group_ + (pair.first + row) % group_);
        }
        for (int row = pair.count; row < num_rows; ++row) {
            softmax_.begin(row, {0, 0}, nullptr);
            std::memset(weights_ + row * WEIGHT_STRIDE, 0, sizeof(BFloat16) * CHUNK);
        }
    }

    void score_rows(const Pair& part) {
        if (are_few_)
            few_.score({part.first_block, part.end_shared}, rows_, score_at(0, part.first_block));
        else if (part.both) score<true>(part);
        else score<false>(part);
        if (part.first_own == SPAN_BLOCKS) return;
        for (int n = part.tokens.first; n < part.tokens.last; ++n) score_own(part, n);
    }

    void scale_results(int num_rows) {
        for (int row = 0; row < num_rows; ++row) {
            const float factor = softmax_.factor(row);
            if (factor == 1.0f) continue;
            auto* to = reinterpret_cast<float*>(results_ + row * result_stride_);
            for (int d = 0; d < dim_; d += LANES) store(to + d, load(to + d) * factor);
        }
    }

    // Weights of a row, zeros in blocks that other rows alone see.
    void soften(const Pair& part, int row, int chunk) {
        auto* weights = reinterpret_cast<BFloat16*>(weights_ + row * WEIGHT_STRIDE);
        const int first = part.first_block % CHUNK_BLOCKS * BLOCK_KEYS;
        const int end = first + part.num_blocks() * BLOCK_KEYS;
        const auto clear = [&](int from, int to) {
            if (from < to) std::memset(weights + from, 0, sizeof(BFloat16) * (to - from));
        };
        const Range keys = softmax_.in_chunk(row, chunk);
        if (keys.is_empty()) return clear(first, end);
        clear(first, keys.begin()), clear(keys.stop(), end);
        softmax_.soften(scores_, row, chunk, weights);
    }

    void keep(const Pair& pair) {
        for (int row = 0; row < pair.count; ++row) {
            const int n = token(pair.first + row);
            if (seen(n).end == 0) continue;
            const Attended found =
                softmax_.attended(row, reinterpret_cast<float*>(results_ + row * result_stride_));
            Attended& all = attended_[pair.first + row];
            if (span_ != std::max(first_span_, spans(pass_, call_.look, n).first)) {
                merge(&all, found, dim_);
                continue;
            }
            all.max = found.max, all.sum = found.sum;
            // A sum may be -0, which blocks of other tokens turn into 0.
            for (int d = 0; d < dim_; d += LANES)
                store(all.mixed + d, load(found.mixed + d) + Vec{});
        }
    }

    TileInputs queries() const { return {queries_, query_stride_, rows_, steps_}; }
    const uint8_t* query(int row) const { return queries_ + row * query_stride_; }
    uint8_t* score_at(int row, int block) const {
        return scores_ + row * SCORE_STRIDE +
               block % CHUNK_BLOCKS * STEP_STRIDE;
    }
    const uint8_t* weights_at(int row, int block) const {
        return weights_ + row * WEIGHT_STRIDE +
               block % CHUNK_BLOCKS * TILE_BYTES;
    }

    template <bool BOTH>
    void score(const Pair& pair) {
        const uint8_t *rows = query(pair.first), *more = query(pair.first + height_);
        for (int b = pair.first_block; b < pair.end_shared; ++b) {
            multiply<BFloat16Tiles, BOTH>(rows, more, queries(), blocks_.packed_keys(b), false);
            take_sums<BOTH>(score_at(0, b), height_ * SCORE_STRIDE, SCORE_STRIDE);
        }
    }

    void score_own(const Pair& pair, int n) {
        const Seen& at = seen(n);
        const int first = std::max((n - tokens_.first) * group_, pair.first);
        const int end = std::min((n - tokens_.first + 1) * group_, pair.first + pair.count);
        const int begin = std::max({at.own, at.first_block(), pair.first_block});
        for (int b = begin; b < std::min(at.end_block(), pair.end_block); ++b) {
            pack_keys(own_rows(blocks_.keys, n, b), dim_, own_);
            for (int q = first; q < end; q += height_) {
                multiply<BFloat16Tiles, false>(query(q), nullptr, queries(), own_, false);
                sums_->take<false>();
                for (int row = q; row < std::min(q + height_, end); ++row)
                    std::memcpy(score_at(row - pair.first, b), sums_->of[0][row - q], STEP_STRIDE);
            }
        }
    }

    void mix_rows(const Pair& pair) {
        if (are_few_ && pair.first_own == SPAN_BLOCKS && mix_few(pair)) return;
        blocks_.pack_values_of({pair.first_block, pair.end_shared});
        for (int step = 0; step < steps_; ++step) {
            if (pair.both) mix<true>(pair, step);
            else mix<false>(pair, step);
        }
    }

    // False if some sums are not finite: then a weight of zero may have met such a value.
    bool mix_few(const Pair& pair) {
        const Range blocks = {pair.first_block, pair.end_block};
        const uint8_t* from = pair.goes_on ? results_ : nullptr;
        const bool finite = few_.mix(blocks, weights_at(0, pair.first_block), from, other_results_,
                                     result_stride_);
        if (finite) std::swap(results_, other_results_);
        return finite;
    }

    template <bool BOTH>
    void mix(const Pair& pair, int step) {
        const int end_plain = std::min(pair.end_shared, pair.first_own);
        uint8_t* to = results_ + step * STEP_STRIDE;
        const int64_t apart = height_ * result_stride_;
        if (pair.goes_on) restore_sums<BOTH>(to, apart, result_stride_);
        else zero_sums<BOTH>();
        for (int b = pair.first_block, end; b < pair.end_block; b = end) {
            for (end = b; end < end_plain && !blocks_.is_infinite(end);) ++end;
            if (end > b) {
                const uint8_t* rows = weights_at(0, b);
                add_steps<BFloat16Tiles, BOTH>(rows, rows + height_ * WEIGHT_STRIDE,
                                               {rows, WEIGHT_STRIDE, rows_, end - b},
                                               blocks_.packed_values(b, step), false);
            } else {
                mix_apart<BOTH>(pair, b, step);
                end = b + 1;
            }
        }
        take_sums<BOTH>(to, apart, result_stride_);
    }

    // A block of which some token has its own.
    template <bool BOTH>
    void mix_apart(const Pair& pair, int block, int step) {
        const bool is_shared = block < pair.end_shared && !blocks_.is_infinite(block);
        if (is_shared)
            mix_some<BOTH>(pair, block, blocks_.packed_values(block, step),
                           [&](int n) { return block < seen(n).own; });
        for (int n = pair.tokens.first; n < pair.tokens.last; ++n) {
            if (!seen(n).has(block) || (is_shared && block < seen(n).own)) continue;
            const BlockRows rows = own_rows(blocks_.values, n, block);
            const bool finite = pack_values<true>(rows, step * TILE_BLOCK, own_);
            uint8_t *before = sums_->of[0][0], *after = results_ + step * STEP_STRIDE;
            if (!finite) take_sums<BOTH>(before, height_ * STEP_STRIDE, STEP_STRIDE);
            mix_some<BOTH>(pair, block, own_, [n](int other) { return other == n; });
            if (finite) continue;
            // Zeros times such values are no zeros: other rows get back what they had.
            take_sums<BOTH>(after, height_ * result_stride_, result_stride_);
            for (int row = 0; row < pair.count; ++row)
                if (token(pair.first + row) == n)
                    std::memcpy(before + row * STEP_STRIDE, after + row * result_stride_,
                                STEP_STRIDE);
            restore_sums<BOTH>(before, height_ * STEP_STRIDE, STEP_STRIDE);
        }
    }

    template <bool BOTH, class Chosen>
    void mix_some(const Pair& pair, int block, const uint8_t* values, const Chosen& chosen) {
        for (int row = 0; row < (1 + pair.both) * height_; ++row) {
            const uint8_t* from = weights_at(row, block);
            if (row < pair.count && chosen(token(pair.first + row)))
                std::memcpy(some_ + row * TILE_BYTES, from, TILE_BYTES);
            else
                std::memset(some_ + row * TILE_BYTES, 0, TILE_BYTES);
        }
        add_steps<BFloat16Tiles, BOTH>(some_, some_ + height_ * TILE_BYTES,
                                       {some_, TILE_BYTES, rows_, 1}, values, false);
    }

    const Pass& pass_;
    const Call& call_;
    const Tokens tokens_;
    const int head_, dim_, steps_, group_, rows_;
    const bool are_few_;
    const int num_tiles_, height_;
    const int64_t result_stride_;
    SharedBlocks blocks_;
    FewRows few_;
    FirstKeys<BFloat16>* next_ = nullptr;
    int64_t query_stride_ = 0, all_rows_ = 0;
    int first_span_ = 0, span_ = 0, base_ = 0;
    uint8_t *own_, *queries_, *scores_, *weights_, *some_;
    uint8_t *results_, *other_results_;
    Softmax softmax_;
    BlockSums* sums_;
    float* mixed_;
    Attended* attended_;
    Seen* seen_;
};

}  // namespace outrider

#endif
