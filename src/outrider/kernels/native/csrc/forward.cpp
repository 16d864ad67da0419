// A whole pass of a Llama-shaped decoder in one call: embed, all layers, the wanted rows' logits.
//
// Nothing is computed here. The same operators run in the same order on the same buffers as when
// each is called by itself, so the bits are the same; what is saved is the way through Python
// between them, which costs a small model as much as its arithmetic does.
//
// Draft heads are such decoders too. Theirs have an entrance: a token comes with the state of the
// token before it, and what the layers make of both is left for the token after.
//
// Ranks that share a decoder (ranks.h) run its passes together: rank 0 announces a pass, and all sum
// what a layer's two products to the residual give.
#include <algorithm>
#include <cstring>
#include <vector>

#include "block_pass.h"
#include "delta.h"
#include "linears.h"
#include "pass.h"
#include "ranks.h"
#include "vectors.h"

using namespace outrider;

extern "C" {

void outrider_rms_norm(Team*, const float* x, const float* weight, float eps, float* out,
                       int num_rows, int size);
void outrider_layer_norm(Team*, const float* x, const float* weight, const float* bias, float eps,
                         float* out, int num_rows, int size);
void outrider_head_norm(Team*, float* qkv, const float* q_weight, const float* k_weight, float eps,
                        int num_rows, int num_heads, int num_kv_heads, int dim);
void outrider_silu_mul(Team*, const float* gate_up, float* out, int num_rows, int size);
void outrider_gelu_mul(Team*, const float* gate_up, float* out, int num_rows, int size);
void outrider_gelu(Team*, const float* x, float* out, int num_rows, int size);
void outrider_squared_relu(Team*, const float* x, float* out, int num_rows, int size);
void outrider_sigmoid_mul(Team*, const float* gate, float* x, int num_rows, int size);
void outrider_soft_cap(Team*, float* x, float cap, int num_rows, int size);
void outrider_argmax(Team*, const float* logits, int64_t* out, int num_rows, int64_t size);
}

namespace outrider {

void announce(Ranks& ranks, const Pass& pass, const int32_t* tokens, const int32_t* wanted,
              int num_wanted);

namespace {

// An FFN's gate, by its number in forward.py. From PLAIN_GELU on there is one product and no gate.
enum FfnGate { SILU_MUL, GELU_MUL, PLAIN_GELU, SQUARED_RELU };

// What attention reads in the layer of heads.
enum Attends { NORMED, PAIR, RESIDUAL };

// Mirrored by `_Entrance` in forward.py. A norm may be null; without a join, the state itself is
// the residual, after its norm if `keeps_norm`. `attends` is of the first layer, later ones read what
// their norm gives; `own` is left as the final norm gives it if `gives_normed`.
struct Entrance {
    const float *token_norm, *state_norm;
    Linear join;
    const float* states;  // [tokens][hidden_size], given with a pass
    float *pair, *own;    // [tokens][2 hidden_size]; the last residuals, which a pass leaves
    int32_t attends, keeps_norm, gives_normed;
};

// In the order of forward.py.
enum Mechanism { DELTA, MAMBA, CONVOLUTION };

// The recurrence of a hybrid's layer (plugins/hybrids), the `index`-th such layer. Mirrored by `_Rule`
// in forward.py. Buffers have a row for every token: a first product, of `row_size` numbers, what the
// recurrence gives, and that behind its gate. The last product of a delta rule reads value heads of a
// key head together, or `tiled`: the first of each key head, then the second.
struct Rule {
    Linear first, out;
    const DeltaLayer* sizes;
    const float* norm;  // of a value head; of all heads, in groups, for Mamba-2; null for convolutions
    float *rows, *found, *gated;
    int32_t row_size, index, tiled, mechanism;
};

// Mirrored by `_Layer` and `_Decoder` in forward.py. A norm that the family lacks is null: those
// before a product, and those of what it gives. With a mixture there is no dense net. A gate scales
// what heads found, by way of `gated`, which has room for it; few families have one.
struct Layer {
    const float* attention_norm;
    Linear qkv;
    const float *q_norm, *k_norm;
    Linear gate;
    float* gated;
    Linear out;
    const float *attended_norm, *ffn_norm;
    Linear gate_up, down;
    const float *fed_norm, *cos, *sin;
    Look look;
    void *keys, *values;
    const Mixture* mixture;
    const Latent* latent;  // null where heads have keys and values of their own
    const Rule* rule;      // null where the layer attends
};

struct Decoder {
    Team* team;
    void (*rope_append)(const Pass*, float* qkv, const float* cos, const float* sin, void* keys,
                        void* values);
    void (*attention)(const Pass*, const float* qkv, void* keys, void* values, const Look* look,
                      float* out);
    const void* embedding;
    // Reads rows of an embedding that is a packed matrix; null for one that is a table.
    void (*lookup)(const void* embedding, const int32_t* tokens, float* x, int num_tokens);
    const float* final_norm;
    Linear head;
    const Layer* layers;
    float *x, *norm, *qkv, *attended, *up, *activated;
    void* hidden;              // [slots][num_captured][hidden_size], of the embedding's type
    const int32_t* captured;   // after how many layers the residual is kept
    const Entrance* entrance;  // null but for heads
    const float* no_bias;      // zeros where norms are centred, else null
    Ranks* ranks;              // null unless the decoder is a rank's share
    // Where pages lie in the arena of layers with a window (cache/paged_kv.py), whose heads are this far
    // apart; null where all layers have one arena, as they do in ranks.
    const int32_t* frames;
    int64_t local_stride;
    // Ones where embeddings are normed. Tables of no rotation, where norms of queries and keys follow
    // the rotation. What queries are multiplied by at each position. Null for others.
    const float *embedding_norm, *still_cos, *still_sin, *growth;
    // `after_eps` is of norms of what products give. Queries, keys and values are clamped to
    // `qkv_clip`, if it is not 0.
    float eps, after_eps, qkv_clip, embedding_scale, residual_scale, logit_scale, logit_cap;
    int32_t num_layers, hidden_size, ffn_size, vocab_size, dtype, num_captured;
    // Whether attention and FFN read the same norm, and query and key norms take all heads as one;
    // the FFN's gate; and whether the bias of a norm lies behind its weight.
    int32_t parallel, whole_heads, gate, norm_bias;
    int32_t head_size;  // outputs of the head: the vocabulary, or a rank's part of it
    const DeltaPass* runs;  // of a hybrid's pass
};

void norm(const Decoder& d, const float* x, const float* weight, float* out, int num, float eps) {
    if (d.no_bias == nullptr)
        outrider_rms_norm(d.team, x, weight, eps, out, num, d.hidden_size);
    else
        outrider_layer_norm(d.team, x, weight, d.norm_bias ? weight + d.hidden_size : d.no_bias,
                            eps, out, num, d.hidden_size);
}

void norm(const Decoder& d, const float* x, const float* weight, float* out, int num) {
    norm(d, x, weight, out, num, d.eps);
}

void scale_all(float* x, float scale, int64_t size) {
    if (scale == 1.0f) return;
    for (int64_t i = 0; i < size; i += LANES) {
        const int count = static_cast<int>(size - i < LANES ? size - i : LANES);
        store_some(x + i, load_some(x + i, count) * scale, count);
    }
}

void clamp_all(float* x, float most, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) {
        const int count = static_cast<int>(size - i < LANES ? size - i : LANES);
        // What is no number stays none.
        const Vec low = larger(splat(-most), load_some(x + i, count));
        store_some(x + i, smaller(splat(most), low), count);
    }
}

// Adds rows to the residual, normed and scaled first; they are written over.
void add_rows(const Decoder& d, float* rows, const float* weight, int num) {
    const int64_t size = static_cast<int64_t>(num) * d.hidden_size;
    if (weight != nullptr) norm(d, rows, weight, rows, num, d.after_eps);
    scale_all(rows, d.residual_scale, size);
    for (int64_t i = 0; i < size; i += LANES) {
        const int count = static_cast<int>(size - i < LANES ? size - i : LANES);
        store_some(d.x + i, load_some(d.x + i, count) + load_some(rows + i, count), count);
    }
}

// Adds a product to the residual, by way of `norm` where it is normed or scaled first. Of ranks, which
// have no such families, rank 0 adds its summand to the residual and the others give theirs alone.
void add(const Decoder& d, const Linear& linear, const float* from, const float* weight, int num) {
    if (d.ranks != nullptr) {
        linear(from, d.x, num, d.hidden_size, d.ranks->leads());
        return d.ranks->sum(d.x, static_cast<int64_t>(num) * d.hidden_size);
    }
    if (weight == nullptr && d.residual_scale == 1.0f)
        return linear(from, d.x, num, d.hidden_size, true);
    linear(from, d.norm, num, d.hidden_size, false);
    add_rows(d, d.norm, weight, num);
}

template <class T>
void embed(const Decoder& d, const int32_t* tokens, int num_tokens) {
    const int size = d.hidden_size;
    if (d.lookup != nullptr) return d.lookup(d.embedding, tokens, d.x, num_tokens);
    for (int n = 0; n < num_tokens; ++n) {
        const T* row = static_cast<const T*>(d.embedding) + static_cast<int64_t>(tokens[n]) * size;
        copy_row(row, d.x + static_cast<int64_t>(n) * size, size);
    }
}

// Puts rows, normed if there is a norm, into one half of the pair.
void put(const Decoder& d, const float* rows, const float* norm, float* half, int num) {
    const int64_t size = d.hidden_size;
    if (norm != nullptr) {
        outrider_rms_norm(d.team, rows, norm, d.eps, d.norm, num, d.hidden_size);
        rows = d.norm;
    }
    for (int n = 0; n < num; ++n)
        std::memcpy(half + 2 * n * size, rows + n * size, sizeof(float) * size);
}

// From the tokens' embeddings, in `x`, and the states to the first residual.
void enter(const Decoder& d, const Entrance& e, int num) {
    const int64_t size = d.hidden_size;
    put(d, d.x, e.token_norm, e.pair, num);
    put(d, e.states, e.state_norm, e.pair + size, num);
    if (e.join.call != nullptr) {
        e.join(e.pair, d.x, num, d.hidden_size, false);
        return;
    }
    for (int n = 0; n < num; ++n) {
        const float* from = e.keeps_norm ? e.pair + (2 * n + 1) * size : e.states + n * size;
        std::memcpy(d.x + n * size, from, sizeof(float) * size);
    }
}

// Keeps the residual after `depth` layers in the tokens' slots, if anybody reads it.
template <class T>
void capture(const Decoder& d, const Pass& pass, int depth) {
    const int64_t size = d.hidden_size;
    for (int k = 0; k < d.num_captured; ++k) {
        if (d.captured[k] != depth) continue;
        for (int n = 0; n < pass.num_tokens; ++n) {
            const int64_t slot = static_cast<int64_t>(pass.slots[n]) * d.num_captured + k;
            copy_row(d.x + n * size, static_cast<T*>(d.hidden) + slot * size, d.hidden_size);
        }
    }
}

// What queries, keys and values are made of.
const float* attention_input(const Decoder& d, const Layer& layer, int num) {
    const bool enters = d.entrance != nullptr && &layer == d.layers;
    const int attends = enters ? d.entrance->attends : NORMED;
    if (attends == PAIR) return d.entrance->pair;
    if (attends == RESIDUAL) return d.x;
    if (layer.attention_norm == nullptr) return d.x;
    norm(d, d.x, layer.attention_norm, d.norm, num);
    return d.norm;
}

void norm_heads(const Decoder& d, const Layer& layer, const Pass& pass) {
    const int num = pass.num_tokens, dim = pass.head_dim;
    if (!d.whole_heads)
        return outrider_head_norm(d.team, d.qkv, layer.q_norm, layer.k_norm, d.eps, num,
                                  pass.num_heads, pass.num_kv_heads, dim);
    const int attended = pass.num_heads * dim, kv = pass.num_kv_heads * dim;
    for (int n = 0; n < num; ++n) {
        float* row = d.qkv + static_cast<int64_t>(n) * pass.row_size;
        outrider_rms_norm(d.team, row, layer.q_norm, d.eps, row, 1, attended);
        outrider_rms_norm(d.team, row + attended, layer.k_norm, d.eps, row + attended, 1, kv);
    }
}

// Queries, keys and values of a layer as its attention reads them, but for the rotation that the
// tables `cos` and `sin` are left with.
void prepare_heads(const Decoder& d, const Layer& layer, const Pass& pass, const float** cos,
                   const float** sin) {
    const int num = pass.num_tokens, queries = pass.num_heads * pass.head_dim;
    if (d.qkv_clip > 0.0f) clamp_all(d.qkv, d.qkv_clip, static_cast<int64_t>(num) * pass.row_size);
    if (d.still_cos != nullptr) {
        // All heads but values are queries of a pass that stores no keys.
        Pass turned = pass;
        turned.num_heads += pass.num_kv_heads, turned.num_kv_heads = 0;
        d.rope_append(&turned, d.qkv, *cos, *sin, layer.keys, layer.values);
        *cos = d.still_cos, *sin = d.still_sin;
    }
    if (layer.q_norm != nullptr) norm_heads(d, layer, pass);
    for (int n = 0; d.growth != nullptr && n < num; ++n)
        scale_all(d.qkv + static_cast<int64_t>(n) * pass.row_size, d.growth[pass.positions[n]],
                  queries);
}

// A pass as layers with a window see it, where their pages lie in frames. Good until this thread asks
// again, and in memory that it keeps.
Pass in_frames(const Decoder& d, const Pass& pass) {
    static thread_local std::vector<int32_t> numbers;
    const int num = pass.num_tokens, size = pass.page_size;
    int num_rows = 0, num_columns = 0;
    for (int n = 0; n < num; ++n) {
        num_rows = std::max(num_rows, pass.seq[n] + 1);
        num_columns = std::max(num_columns, (pass.visible[n] + size - 1) / size);
    }
    const int num_extra = pass.extra_offsets == nullptr ? 0 : pass.extra_offsets[num];
    numbers.resize(num + num_extra + static_cast<size_t>(num_rows) * num_columns);
    int32_t* next = numbers.data();
    const auto placed = [&](const int32_t* slots, int count) {
        int32_t* first = next;
        for (int i = 0; i < count; ++i)
            *next++ = d.frames[slots[i] / size] * size + slots[i] % size;
        return first;
    };
    Pass local = pass;
    local.head_stride = d.local_stride;
    local.slots = placed(pass.slots, num);
    if (num_extra > 0) local.extra_slots = placed(pass.extra_slots, num_extra);
    local.pages = next;
    local.num_page_columns = num_columns;
    for (int row = 0; row < num_rows; ++row) {
        const int32_t* pages = pass.pages + static_cast<int64_t>(row) * pass.num_page_columns;
        for (int i = 0; i < num_columns; ++i) *next++ = d.frames[pages[i]];
    }
    return local;
}

void attend(const Decoder& d, const Layer& layer, const Pass& pass) {
    const int num = pass.num_tokens;
    const float* reads = attention_input(d, layer, num);
    const float* found = d.attended;
    if (layer.latent != nullptr)
        latent_queries(*layer.latent, layer.qkv, reads, d.qkv, num, pass.row_size);
    else
        layer.qkv(reads, d.qkv, num, pass.row_size, false);
    const int size = pass.num_heads * pass.head_dim;
    if (layer.gate.call != nullptr) layer.gate(reads, layer.gated, num, size, false);
    const float *cos = layer.cos, *sin = layer.sin;
    prepare_heads(d, layer, pass, &cos, &sin);
    d.rope_append(&pass, d.qkv, cos, sin, layer.keys, layer.values);
    d.attention(&pass, d.qkv, layer.keys, layer.values, &layer.look, d.attended);
    if (layer.gate.call != nullptr)
        outrider_sigmoid_mul(d.team, layer.gated, d.attended, num, size);
    if (layer.latent != nullptr) found = latent_values(*layer.latent, d.attended, num);
    add(d, layer.out, found, layer.attended_norm, num);
}

// Each leaves in `found` what the last product reads.
void mix_delta(const Decoder& d, const Rule& rule, int num) {
    const DeltaLayer& sizes = *rule.sizes;
    const int dim = sizes.value_dim, values = sizes.heads * dim;
    const int shared = sizes.heads / sizes.key_heads;
    outrider_delta(d.runs, &sizes, rule.rows, rule.row_size, rule.row_size - 2 * sizes.heads,
                   rule.index, rule.found);
    outrider_rms_norm(d.team, rule.found, rule.norm, d.eps, rule.found, num * sizes.heads, dim);
    for (int n = 0; n < num; ++n) {
        const float* gate = rule.rows + static_cast<int64_t>(n) * rule.row_size + sizes.channels;
        const float* from = rule.found + static_cast<int64_t>(n) * values;
        float* to = rule.gated + static_cast<int64_t>(n) * 2 * values;
        std::copy_n(gate, values, to);
        for (int h = 0; h < sizes.heads; ++h) {
            const int place = rule.tiled ? h % shared * sizes.key_heads + h / shared : h;
            std::copy_n(from + h * dim, dim, to + values + place * dim);
        }
    }
    outrider_silu_mul(d.team, rule.gated, rule.found, num, values);
}

void mix_mamba(const Decoder& d, const Rule& rule, int num) {
    const DeltaLayer& sizes = *rule.sizes;
    const int values = sizes.heads * sizes.value_dim, group = values / sizes.key_heads;
    outrider_delta(d.runs, &sizes, rule.rows + values, rule.row_size,
                   rule.row_size - values - sizes.heads, rule.index, rule.found);
    for (int n = 0; n < num; ++n) {
        float* to = rule.gated + static_cast<int64_t>(n) * 2 * values;
        std::copy_n(rule.rows + static_cast<int64_t>(n) * rule.row_size, values, to);
        std::copy_n(rule.found + static_cast<int64_t>(n) * values, values, to + values);
    }
    outrider_silu_mul(d.team, rule.gated, rule.found, num, values);
    for (int i = 0; rule.norm != nullptr && i < num * sizes.key_heads; ++i) {
        float* heads = rule.found + static_cast<int64_t>(i) * group;
        outrider_rms_norm(d.team, heads, rule.norm + i % sizes.key_heads * group, d.eps, heads, 1,
                          group);
    }
}

void multiply(const float* x, const float* y, float* out, int size) {
    for (int i = 0; i < size; i += LANES)
        store_some(out + i, load_some(x + i, size - i) * load_some(y + i, size - i), size - i);
}

// Parts of a row of the first product: a gate before the convolution, one after it, its input.
void mix_convolution(const Decoder& d, const Rule& rule, int num) {
    const int channels = rule.sizes->channels;
    for (int n = 0; n < num; ++n) {
        const float* row = rule.rows + static_cast<int64_t>(n) * rule.row_size;
        multiply(row, row + 2 * channels, rule.gated + int64_t{n} * channels, channels);
    }
    outrider_delta(d.runs, rule.sizes, rule.gated, channels, channels, rule.index, rule.found);
    for (int n = 0; n < num; ++n) {
        float* found = rule.found + int64_t{n} * channels;
        multiply(found, rule.rows + static_cast<int64_t>(n) * rule.row_size + channels, found,
                 channels);
    }
}

void recur(const Decoder& d, const Layer& layer, int num) {
    constexpr decltype(&mix_delta) MIXES[] = {mix_delta, mix_mamba, mix_convolution};
    const Rule& rule = *layer.rule;
    rule.first(attention_input(d, layer, num), rule.rows, num, rule.row_size, false);
    MIXES[rule.mechanism](d, rule, num);
    add(d, rule.out, rule.found, nullptr, num);
}

void feed(const Decoder& d, const Layer& layer, int num) {
    const float* reads = d.parallel ? d.norm : d.x;
    if (layer.ffn_norm != nullptr) {
        norm(d, d.x, layer.ffn_norm, d.norm, num);
        reads = d.norm;
    }
    if (layer.mixture != nullptr)
        return add_rows(d, mixed(*layer.mixture, reads, num), layer.fed_norm, num);
    layer.gate_up(reads, d.up, num, (d.gate < PLAIN_GELU ? 2 : 1) * d.ffn_size, false);
    constexpr decltype(&outrider_gelu) GATES[] = {outrider_silu_mul, outrider_gelu_mul,
                                                  outrider_gelu, outrider_squared_relu};
    GATES[d.gate](d.team, d.up, d.activated, num, d.ffn_size);
    add(d, layer.down, d.activated, layer.fed_norm, num);
}

// The rows move to the front of `norm`, and their norms, if the head reads those, to that of `x`,
// which is spent by then.
void read_out(const Decoder& d, const int32_t* wanted, int num_wanted, float* logits) {
    const int64_t size = d.hidden_size;
    for (int m = 0; m < num_wanted; ++m)
        std::memcpy(d.norm + m * size, d.x + wanted[m] * size, sizeof(float) * size);
    const float* rows = d.norm;
    if (d.final_norm != nullptr) {
        norm(d, d.norm, d.final_norm, d.x, num_wanted);
        rows = d.x;
    }
    d.head(rows, logits, num_wanted, d.head_size, false);
    scale_all(logits, d.logit_scale, static_cast<int64_t>(num_wanted) * d.head_size);
    if (d.logit_cap > 0.0f)
        outrider_soft_cap(d.team, logits, d.logit_cap, num_wanted, d.head_size);
    if (d.ranks != nullptr) d.ranks->gather(logits, num_wanted, d.head_size, d.vocab_size);
}

// T is the type of the embedding and of kept states.
template <class T>
void run(const Decoder& d, const Pass& pass, const int32_t* tokens) {
    embed<T>(d, tokens, pass.num_tokens);
    scale_all(d.x, d.embedding_scale, static_cast<int64_t>(pass.num_tokens) * d.hidden_size);
    if (d.embedding_norm != nullptr)
        outrider_rms_norm(d.team, d.x, d.embedding_norm, d.eps, d.x, pass.num_tokens,
                          d.hidden_size);
    if (d.entrance != nullptr) enter(d, *d.entrance, pass.num_tokens);
    const Pass local = d.frames == nullptr ? pass : in_frames(d, pass);
    for (int i = 0; i < d.num_layers; ++i) {
        if (d.ranks != nullptr && d.ranks->ended()) return;
        capture<T>(d, pass, i);
        if (d.layers[i].rule != nullptr) recur(d, d.layers[i], pass.num_tokens);
        else attend(d, d.layers[i], d.layers[i].look.window > 0 ? local : pass);
        feed(d, d.layers[i], pass.num_tokens);
    }
    capture<T>(d, pass, d.num_layers);
}

// A part of a layer between the two sides of a convolution, where it has one.
class Convolved {
  public:
    Convolved(const Block& block, const Decoder& decoder, const BlockConv& conv)
        : b_(block), d_(decoder), conv_(conv), num_(block.num_rows()) {}

    // The rows that the part reads; the convolution's weights are made of them.
    void enter(float* rows) {
        if (conv_.base == nullptr) return;
        weights_.resize(num_ * conv_.row_size());
        conv_.kernels(rows, weights_.data(), num_, static_cast<int>(conv_.row_size()), false);
        conv_.run(rows, weights_.data(), 0, num_, b_.block_size, d_.hidden_size);
    }

    // Adds what the part's last product gives to the residual.
    void leave(const Linear& product, const float* from) {
        if (conv_.base == nullptr) return add(d_, product, from, nullptr, num_);
        product(from, d_.norm, num_, d_.hidden_size, false);
        conv_.run(d_.norm, weights_.data(), 1, num_, b_.block_size, d_.hidden_size);
        add_rows(d_, d_.norm, nullptr, num_);
    }

  private:
    const Block& b_;
    const Decoder& d_;
    const BlockConv& conv_;
    const int num_;
    std::vector<float> weights_;
};

// T is the type of the embedding.
template <class T>
bool write_blocks(const Block& b, BlockPassRows& rows) {
    const auto& d = *static_cast<const Decoder*>(b.decoder);
    const int num = b.num_rows(), num_context = static_cast<int>(rows.positions.size()) - num;
    const int64_t size = d.hidden_size;
    const Pass all = rows.pass(num + num_context);
    embed<T>(d, rows.tokens.data(), num);
    scale_all(d.x, d.embedding_scale, num * size);
    if (num_context > 0) {
        float* context = b.reads + num * size;
        b.join(b.states, context, num_context, d.hidden_size, false);
        outrider_rms_norm(d.team, context, b.context_norm, d.eps, context, num_context,
                          d.hidden_size);
    }
    Pass seen = rows.seen(b.sights[0]);
    for (int i = 0; i < d.num_layers; ++i) {
        const Layer& layer = d.layers[i];
        Convolved attention(b, d, b.convs[2 * i]), ffn(b, d, b.convs[2 * i + 1]);
        if (i > 0 && !(b.sights[i] == b.sights[i - 1])) seen = rows.seen(b.sights[i]);
        norm(d, d.x, layer.attention_norm, b.reads, num);
        attention.enter(b.reads);
        layer.qkv(b.reads, d.qkv, all.num_tokens, all.row_size, false);
        if (layer.q_norm != nullptr) norm_heads(d, layer, all);
        d.rope_append(&all, d.qkv, layer.cos, layer.sin, layer.keys, layer.values);
        d.attention(&seen, d.qkv, layer.keys, layer.values, &layer.look, d.attended);
        attention.leave(layer.out, d.attended);
        norm(d, d.x, layer.ffn_norm, d.norm, num);
        ffn.enter(d.norm);
        layer.gate_up(d.norm, d.up, num, 2 * d.ffn_size, false);
        outrider_silu_mul(d.team, d.up, d.activated, num, d.ffn_size);
        ffn.leave(layer.down, d.activated);
    }
    norm(d, d.x, d.final_norm, b.hidden, num);
    read_out(d, rows.wanted.data(), static_cast<int>(rows.wanted.size()), b.logits);
    return choose_drafts(b);
}

}  // namespace

}  // namespace outrider

// A pass of a block drafter. 0, before anything is computed, for a token that is not in the vocabulary;
// -1 if drafts are to be chosen and some logits are no numbers.
extern "C" int outrider_write_blocks(const Block* block) {
    BlockPassRows rows(*block);
    const auto& d = *static_cast<const Decoder*>(block->decoder);
    for (const int32_t token : rows.tokens)
        if (token < 0 || token >= d.vocab_size) return 0;
    switch (d.dtype) {
        case FLOAT32: return write_blocks<float>(*block, rows) ? 1 : -1;
        case BFLOAT16: return write_blocks<BFloat16>(*block, rows) ? 1 : -1;
        default: return write_blocks<Float16>(*block, rows) ? 1 : -1;
    }
}

// The first packed token that is not in the vocabulary, before anything is computed; else -1, or -2
// where a rank is gone.
extern "C" int outrider_forward(const Decoder* decoder, const Pass* pass, const int32_t* tokens,
                                const int32_t* wanted, int num_wanted, float* logits) {
    const Decoder& d = *decoder;
    for (int n = 0; n < pass->num_tokens; ++n)
        if (tokens[n] < 0 || tokens[n] >= d.vocab_size) return n;
    std::unique_lock<std::recursive_mutex> turn;
    if (d.ranks != nullptr && d.ranks->leads()) {
        turn = std::unique_lock<std::recursive_mutex>(d.ranks->turn());
        announce(*d.ranks, *pass, tokens, wanted, num_wanted);
    }
    switch (d.dtype) {
        case FLOAT32: run<float>(d, *pass, tokens); break;
        case BFLOAT16: run<BFloat16>(d, *pass, tokens); break;
        case FLOAT16: run<Float16>(d, *pass, tokens); break;
    }
    if (d.entrance != nullptr) {
        const Entrance& e = *d.entrance;
        if (e.gives_normed)
            outrider_rms_norm(d.team, d.x, d.final_norm, d.eps, e.own, pass->num_tokens,
                              d.hidden_size);
        else
            std::memcpy(e.own, d.x,
                        sizeof(float) * pass->num_tokens * static_cast<int64_t>(d.hidden_size));
    }
    if (num_wanted > 0) read_out(d, wanted, num_wanted, logits);
    return d.ranks != nullptr && d.ranks->ended() ? -2 : -1;
}
