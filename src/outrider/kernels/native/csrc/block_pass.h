// A pass of a block drafter as pointers: what is read, what a block's rows see, and what follows the layers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "choice.h"
#include "linears.h"
#include "pass.h"
#include "vectors.h"

namespace outrider {

// What a row of a block sees in a layer. Mirrored by `_Sight` in plugins/heads/native_blocks.py, and defined by `Sight` of
// plugins/heads/blocks.py: a window of 0 is none.
struct BlockSight {
    int32_t window, causal, from_block;

    bool operator==(const BlockSight& other) const {
        return window == other.window && causal == other.causal && from_block == other.from_block;
    }

    // The first position that the row at `position` of a block from `start` to `stop` sees.
    int begin(int position, int start) const {
        if (window == 0) return 0;
        return std::max((from_block ? start : position + 1) - window, 0);
    }
    // The one after the last.
    int end(int position, int stop) const {
        const int last = causal ? position + 1 : stop;
        return window == 0 || from_block ? last : std::min(last, position + window);
    }
};

// Mirrored by `_Text` in plugins/heads/native_blocks.py. `previous` is the token before the pending one, which
// stands for it in a text of one token.
struct BlockText {
    int32_t length, num_new, pending, previous;
};

// A net that refines a block's logits in rounds, `Refiner` of plugins/heads/block_heads.py. Mirrored by
// `_Refiner` in plugins/heads/native_blocks.py.
struct BlockRefiner {
    const void* table;
    Linear own, mean, join, gate, up, down, out;
    const float* mix;  // [rank][rows of a block][rows that they read]
    int32_t dtype, rank, inner, num_rounds;
};

// A convolution over the rows of a block before and after a part of a layer, defined by `BlockConv` of
// plugins/heads/blocks.py. Mirrored by `_Conv` in plugins/heads/native_blocks.py. Without a `base` there is none.
struct BlockConv {
    Linear kernels;
    const float* base;  // [2][taps][hidden size]
    int32_t taps, num_groups;

    int64_t row_size() const { return int64_t{2} * taps * num_groups; }

    // Replaces rows by those after the convolution of `side`, given the weights that `kernels` makes of
    // rows. A sum rounds each product by itself, as the definition does.
    void run(float* rows, const float* weights, int side, int num, int block_size, int size) const {
        const int width = size / num_groups;
        const float* own = base + int64_t{side} * taps * size;
        // Tokens read earlier ones, so the last one is replaced first.
        for (int n = num - 1; n >= 0; --n) {
            const int reach = std::min(taps, n % block_size + 1);
            const float* factors = weights + n * row_size() + side * taps * num_groups;
            float* row = rows + int64_t{n} * size;
            for (int group = 0; group < num_groups; ++group)
                for (int i = group * width; i < (group + 1) * width; i += LANES) {
                    const int count = (group + 1) * width - i;
                    Vec sum = {};
                    for (int tap = 0; tap < reach; ++tap) {
                        const Vec moved = load_some(row - int64_t{tap} * size + i, count);
                        const float factor = factors[tap * num_groups + group];
                        sum += apart(moved * (load_some(own + int64_t{tap} * size + i, count) + factor));
                    }
                    store_some(row + i, sum, count);
                }
        }
    }
};

// Mirrored by `_Block` in plugins/heads/native_blocks.py: texts whose new context is read and for each of which a block is
// written: its pending token, then masks.
struct Block : Choice {
    const void* decoder;
    Pass blank;  // without rows
    Linear join;
    const float* context_norm;
    const BlockSight* sights;  // of each layer
    const BlockConv* convs;    // two of each layer, of attention and of the FFN
    const BlockText* texts;
    const float* states;            // of the new context, as `join` reads them
    float *reads, *hidden;  // what layers read; blocks after the last norm
    // Where logits depend on the token before, `TokenBefore` of that file; tables have its `dtype`. Null
    // for others.
    const void *table, *successors;
    Linear out, gate, joint;
    const BlockRefiner* refiner;
    int32_t block_size, mask_token, first, hidden_size;
    int32_t dtype, rank, num_candidates, unused_count;

    int num_rows() const { return num_texts * block_size; }
};

// Chooses the drafts of blocks, if there are to be any, from their logits (block_drafts.cpp). False if
// some numbers are none.
bool choose_drafts(const Block& block);

// The rows of a block pass: those of blocks come first, then new context.
struct BlockPassRows {
    explicit BlockPassRows(const Block& b) : block(b) {
        for (int i = 0; i < b.num_texts; ++i) {
            const int start = b.texts[i].length + b.texts[i].num_new;
            for (int row = 0; row < b.block_size; ++row) {
                tokens.push_back(row == 0 ? b.texts[i].pending : b.mask_token);
                put(i, start + row);
            }
        }
        for (int row = b.first; row < b.first + b.depth; ++row)
            for (int i = 0; i < b.num_texts; ++i) wanted.push_back(i * b.block_size + row);
        for (int i = 0; i < b.num_texts; ++i)
            for (int row = 0; row < b.texts[i].num_new; ++row) put(i, b.texts[i].length + row);
        visible.assign(positions.size(), 0);
    }

    int slot(int text, int position) const {
        const int size = block.blank.page_size;
        const int32_t* pages =
            block.blank.pages + static_cast<int64_t>(text) * block.blank.num_page_columns;
        return pages[position / size] * size + position % size;
    }

    void put(int text, int position) {
        positions.push_back(position);
        slots.push_back(slot(text, position));
        seq.push_back(text);
    }

    Pass pass(int num_tokens) const {
        Pass found = block.blank;
        found.num_tokens = num_tokens;
        found.positions = positions.data();
        found.slots = slots.data();
        found.seq = seq.data();
        found.visible = visible.data();
        found.extra_offsets = found.extra_slots = nullptr;
        return found;
    }

    // The pass of the blocks under a sight, until the next one is asked for. A row that does not see
    // the beginning of its text lists the slots of what it sees.
    Pass seen(const BlockSight& sight) {
        const int num = block.num_rows(), size = block.block_size;
        offsets.assign(1, 0);
        extra.clear();
        for (int n = 0; n < num; ++n) {
            const BlockText& text = block.texts[n / size];
            const int start = text.length + text.num_new;
            const int begin = sight.begin(positions[n], start);
            const int end = sight.end(positions[n], start + size);
            visible[n] = begin > 0 ? 0 : end;
            for (int at = begin; begin > 0 && at < end; ++at) extra.push_back(slot(seq[n], at));
            offsets.push_back(static_cast<int32_t>(extra.size()));
        }
        Pass found = pass(num);
        if (!extra.empty()) {
            found.extra_offsets = offsets.data();
            found.extra_slots = extra.data();
        }
        return found;
    }

    const Block& block;
    std::vector<int32_t> tokens, positions, slots, seq, visible, wanted, offsets, extra;
};

}  // namespace outrider
