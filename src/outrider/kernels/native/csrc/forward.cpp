// A whole pass of a Llama-shaped decoder in one call: embed, all layers, the wanted rows' logits.
//
// Nothing is computed here. The same operators run in the same order on the same buffers as when
// each is called by itself, so the bits are the same; what is saved is the way through Python
// between them, which costs a small model as much as its arithmetic does.
//
// Draft heads are such decoders too. Theirs have an entrance: a token comes with the state of the
// token before it, and what the layers make of both is left for the token after.
#include <cstring>

#include "pass.h"
#include "vectors.h"

using namespace outrider;

extern "C" {

void outrider_rms_norm(Team*, const float* x, const float* weight, float eps, float* out,
                       int num_rows, int size);
void outrider_head_norm(Team*, float* qkv, const float* q_weight, const float* k_weight, float eps,
                        int num_rows, int num_heads, int num_kv_heads, int dim);
void outrider_silu_mul(Team*, const float* gate_up, float* out, int num_rows, int size);
}

namespace outrider {

namespace {

// Mirrored by `_Linear`, `_Layer` and `_Decoder` in forward.py. A bias may be null.
struct Linear {
    void (*call)(const void* weights, const float* x, float* out, int num_rows, int accumulate);
    const void* weights;
    const float* bias;

    void operator()(const float* x, float* out, int num_rows, int size, bool accumulate) const {
        call(weights, x, out, num_rows, accumulate);
        if (bias == nullptr) return;
        for (int n = 0; n < num_rows; ++n, out += size)
            for (int i = 0; i < size; i += LANES)
                store_some(out + i, load_some(out + i, size - i) + load_some(bias + i, size - i),
                           size - i);
    }
};

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

struct Layer {
    const float* attention_norm;
    Linear qkv;
    const float *q_norm, *k_norm;  // null where heads are not normalised
    Linear out;
    const float* ffn_norm;
    Linear gate_up, down;
    void *keys, *values;
};

// What the embedding and kept states are made of: the place in SUFFIXES of ops.py.
enum Dtype { FLOAT32, BFLOAT16, FLOAT16 };

struct Decoder {
    Team* team;
    void (*rope_append)(const Pass*, float* qkv, const float* cos, const float* sin, void* keys,
                        void* values);
    void (*attention)(const Pass*, const float* qkv, void* keys, void* values, float scale,
                      float* out);
    const void* embedding;
    // Reads rows of an embedding that is a packed matrix; null for one that is a table.
    void (*lookup)(const void* embedding, const int32_t* tokens, float* x, int num_tokens);
    const float* final_norm;
    Linear head;
    const float *cos, *sin;
    const Layer* layers;
    float *x, *norm, *qkv, *attended, *up, *activated;
    void* hidden;              // [slots][num_captured][hidden_size], of the embedding's type
    const int32_t* captured;   // after how many layers the residual is kept
    const Entrance* entrance;  // null but for heads
    float eps, scale;
    int32_t num_layers, hidden_size, ffn_size, vocab_size, dtype, num_captured;
};

template <class From, class To>
void copy_row(const From* from, To* to, int size) {
    for (int i = 0; i < size; i += LANES)
        store_some(to + i, load_some(from + i, size - i), size - i);
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
    outrider_rms_norm(d.team, d.x, layer.attention_norm, d.eps, d.norm, num, d.hidden_size);
    return d.norm;
}

void attend(const Decoder& d, const Layer& layer, const Pass& pass) {
    const int num = pass.num_tokens, size = d.hidden_size;
    layer.qkv(attention_input(d, layer, num), d.qkv, num, pass.row_size, false);
    if (layer.q_norm != nullptr)
        outrider_head_norm(d.team, d.qkv, layer.q_norm, layer.k_norm, d.eps, num, pass.num_heads,
                           pass.num_kv_heads, pass.head_dim);
    d.rope_append(&pass, d.qkv, d.cos, d.sin, layer.keys, layer.values);
    d.attention(&pass, d.qkv, layer.keys, layer.values, d.scale, d.attended);
    layer.out(d.attended, d.x, num, size, true);
}

void feed(const Decoder& d, const Layer& layer, int num) {
    outrider_rms_norm(d.team, d.x, layer.ffn_norm, d.eps, d.norm, num, d.hidden_size);
    layer.gate_up(d.norm, d.up, num, 2 * d.ffn_size, false);
    outrider_silu_mul(d.team, d.up, d.activated, num, d.ffn_size);
    layer.down(d.activated, d.x, num, d.hidden_size, true);
}

// The rows move to the front of `norm`, and their norms, if the head reads those, to that of `x`,
// which is spent by then.
void read_out(const Decoder& d, const int32_t* wanted, int num_wanted, float* logits) {
    const int64_t size = d.hidden_size;
    for (int m = 0; m < num_wanted; ++m)
        std::memcpy(d.norm + m * size, d.x + wanted[m] * size, sizeof(float) * size);
    const float* rows = d.norm;
    if (d.final_norm != nullptr) {
        outrider_rms_norm(d.team, d.norm, d.final_norm, d.eps, d.x, num_wanted, d.hidden_size);
        rows = d.x;
    }
    d.head(rows, logits, num_wanted, d.vocab_size, false);
}

// T is the type of the embedding and of kept states.
template <class T>
void run(const Decoder& d, const Pass& pass, const int32_t* tokens) {
    embed<T>(d, tokens, pass.num_tokens);
    if (d.entrance != nullptr) enter(d, *d.entrance, pass.num_tokens);
    for (int i = 0; i < d.num_layers; ++i) {
        capture<T>(d, pass, i);
        attend(d, d.layers[i], pass);
        feed(d, d.layers[i], pass.num_tokens);
    }
    capture<T>(d, pass, d.num_layers);
}

}  // namespace

}  // namespace outrider

// The first packed token that is not in the vocabulary, before anything is computed; else -1.
extern "C" int outrider_forward(const Decoder* decoder, const Pass* pass, const int32_t* tokens,
                                const int32_t* wanted, int num_wanted, float* logits) {
    const Decoder& d = *decoder;
    for (int n = 0; n < pass->num_tokens; ++n)
        if (tokens[n] < 0 || tokens[n] >= d.vocab_size) return n;
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
    return -1;
}
