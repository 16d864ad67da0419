// What surrounds the linears of a decoder layer: norms, rotary embedding with the write into the
// arena, SiLU gating and GELU, soft caps, and the greedy choice. Each row is computed alone.
#include <algorithm>
#include <cmath>
#include <limits>

#include "blocks.h"
#include "pass.h"
#include "team.h"
#include "vectors.h"

namespace outrider {

namespace {

// Elements a thread takes at once; less work than this runs on the caller alone.
constexpr int64_t GRAIN_ELEMENTS = 1 << 14;
// How many rows ahead of use memory is asked for places in the arena.
constexpr int PLACES_AHEAD = 4;

template <class Row>
void for_rows(Team& given, int num_rows, int64_t row_elements, const Row& row) {
    Team& team = given.here();
    std::lock_guard<std::mutex> lock(team.entry());
    const auto most = static_cast<int>(std::max<int64_t>(1, GRAIN_ELEMENTS / row_elements));
    team.run(num_rows, even_grain(num_rows, most), [&](int first, int last, int) {
        for (int n = first; n < last; ++n) row(n);
    });
}

// x / sqrt(mean(x^2) + eps) * weight, the squares summed in four fixed chains.
void rms_norm_row(const float* x, const float* weight, float eps, float* out, int size) {
    Vec sums[4] = {};
    for (int i = 0, chain = 0; i < size; i += LANES, chain = (chain + 1) % 4) {
        const Vec part = load_some(x + i, size - i);
        sums[chain] += part * part;
    }
    const float sum = sum_of_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    const float scale = 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
    for (int i = 0; i < size; i += LANES) {
        const int count = size - i;
        store_some(out + i, load_some(x + i, count) * scale * load_some(weight + i, count), count);
    }
}

// The RMS norm of what is centred, plus a bias. What is centred goes through `out`: lanes past the
// end are read back as zeros, and so add nothing to the sum of squares.
void layer_norm_row(const float* x, const float* weight, const float* bias, float eps, float* out,
                    int size) {
    Vec sums[4] = {};
    for (int i = 0, chain = 0; i < size; i += LANES, chain = (chain + 1) % 4)
        sums[chain] += load_some(x + i, size - i);
    const float sum = sum_of_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    const float mean = sum / static_cast<float>(size);
    for (int i = 0; i < size; i += LANES)
        store_some(out + i, load_some(x + i, size - i) - mean, size - i);
    rms_norm_row(out, weight, eps, out, size);
    for (int i = 0; i < size; i += LANES) {
        const int count = size - i;
        store_some(out + i, load_some(out + i, count) + load_some(bias + i, count), count);
    }
}

// x / 2 * (1 + tanh(u)) = x / (1 + e^(-2u)) for u = sqrt(2 / pi) * (x + 0.044715 x^3).
void gelu_row(const float* x, float* out, int size) {
    constexpr float SCALE = -1.5957691216f;  // -2 * sqrt(2 / pi)
    for (int i = 0; i < size; i += LANES) {
        const Vec part = load_some(x + i, size - i);
        const Vec inner = part + 0.044715f * (part * part * part);
        store_some(out + i, part / (exp(inner * SCALE) + 1.0f), size - i);
    }
}

void silu_mul_row(const float* gate, const float* up, float* out, int size) {
    for (int i = 0; i < size; i += LANES) {
        const Vec g = load_some(gate + i, size - i);
        store_some(out + i, g / (exp(-g) + 1.0f) * load_some(up + i, size - i), size - i);
    }
}

void sigmoid_mul_row(const float* gate, float* x, int size) {
    for (int i = 0; i < size; i += LANES) {
        const int count = size - i;
        store_some(x + i, load_some(x + i, count) / (exp(-load_some(gate + i, count)) + 1.0f), count);
    }
}

void gelu_mul_row(const float* gate, const float* up, float* out, int size) {
    gelu_row(gate, out, size);
    for (int i = 0; i < size; i += LANES) {
        const int count = size - i;
        store_some(out + i, load_some(out + i, count) * load_some(up + i, count), count);
    }
}

// The first largest of a row; -1 if it has a NaN.
int64_t argmax_row(const float* logits, int64_t size) {
    constexpr int64_t CHUNK = 64 * LANES;
    float best = -std::numeric_limits<float>::infinity();
    int64_t best_chunk = 0;
    IntVec is_nan = {};
    for (int64_t chunk = 0; chunk < size; chunk += CHUNK) {
        const int64_t end = std::min(chunk + CHUNK, size);
        Vec most[4] = {splat(best), splat(best), splat(best), splat(best)};
        int64_t i = chunk;
        for (; i + 4 * LANES <= end; i += 4 * LANES)
            for (int v = 0; v < 4; ++v) {
                const Vec logit = load(logits + i + v * LANES);
                most[v] = larger(logit, most[v]);
                is_nan |= logit != logit;
            }
        float largest =
            largest_lane(larger(larger(most[0], most[1]), larger(most[2], most[3])));
        for (; i < end; ++i) {
            largest = logits[i] > largest ? logits[i] : largest;
            is_nan[0] |= logits[i] != logits[i];
        }
        if (largest > best) best = largest, best_chunk = chunk;
    }
    for (int lane = 0; lane < LANES; ++lane)
        if (is_nan[lane]) return -1;
    for (int64_t i = best_chunk; i < std::min(best_chunk + CHUNK, size); ++i)
        if (logits[i] == best) return i;
    return 0;
}

// Rotates (x_j, x_{j + half}) by the angle of position and j, as Hugging Face's rotate_half does.
template <class To>
void rotate(const float* x, const float* cos, const float* sin, int half, To* to) {
    for (int j = 0; j < half; j += LANES) {
        const int count = half - j;
        const Vec low = load_some(x + j, count), high = load_some(x + half + j, count);
        const Vec c = load_some(cos + j, count), s = load_some(sin + j, count);
        store_some(to + j, low * c - high * s, count);
        store_some(to + half + j, high * c + low * s, count);
    }
}

template <class T>
void copy(const float* from, int size, T* to) {
    for (int i = 0; i < size; i += LANES)
        store_some(to + i, load_some(from + i, size - i), size - i);
}

// As the arena of integers has them (blocks.h). What is no finite number makes all of its group none.
__attribute__((noinline)) void copy(const float* from, int size, Int8* to) {
    constexpr float LARGEST = 127.0f, TO_INTEGER = 12582912.0f;
    Int8* scales = to + size;
    for (int first = 0; first < size; first += Int8::GROUP, scales += sizeof(Float16)) {
        Vec most = {}, none = {};
        for (int i = first; i < first + Int8::GROUP; i += LANES) {
            const Vec x = load(from + i);
            most = larger(larger(x, -x), most);
            none += x * 0.0f;
        }
        const float scale = largest_lane(most) / LARGEST + sum_of_lanes(none);
        const HalfVec half = to_float16(splat(scale));
        store_halves(scales, half, 1);
        const float kept = from_float16(half)[0];
        const Vec inverse = splat(kept > 0.0f ? 1.0f / kept : 0.0f);
        uint32_t shifted[Int8::GROUP];
        for (int i = 0; i < Int8::GROUP; i += LANES) {
            const Vec x = load(from + first + i) * inverse;
            const Vec code = smaller(larger(x, splat(-LARGEST)), splat(LARGEST)) + TO_INTEGER;
            std::memcpy(shifted + i, &code, sizeof(code));
        }
        for (int i = 0; i < Int8::GROUP; ++i) to[first + i].bits = static_cast<int8_t>(shifted[i]);
    }
}

// Asks memory for the places where a token's keys and values will be written.
template <class T>
void ask_for_places(const Pass& pass, const Arena<T>& arena, int n) {
    constexpr int LINE = CACHE_LINE / sizeof(T);
    for (int g = 0; g < pass.num_kv_heads; ++g) {
        const T *key = arena.key(g, pass.slots[n]), *value = arena.value(g, pass.slots[n]);
        for (int d = 0; d < pass.slot_stride; d += LINE)
            ask_to_write(key + d), ask_to_write(value + d);
    }
}

template <class T>
void rope_append(const Pass& pass, float* qkv, const float* cos_table, const float* sin_table,
                 const Arena<T>& arena) {
    const int dim = pass.head_dim, half = dim / 2;
    for_rows(*pass.team, pass.num_tokens, pass.row_size, [&](int n) {
        float* row = qkv + static_cast<int64_t>(n) * pass.row_size;
        if (n + PLACES_AHEAD < pass.num_tokens) ask_for_places(pass, arena, n + PLACES_AHEAD);
        const int64_t angle = static_cast<int64_t>(pass.positions[n]) * half, slot = pass.slots[n];
        const float *cos = cos_table + angle, *sin = sin_table + angle;
        for (int h = 0; h < pass.num_heads; ++h, row += dim) rotate(row, cos, sin, half, row);
        for (int g = 0; g < pass.num_kv_heads; ++g, row += dim)
            if constexpr (std::is_same_v<T, Int8>) {
                rotate(row, cos, sin, half, row);
                copy(row, dim, arena.key(g, slot));
            } else {
                rotate(row, cos, sin, half, arena.key(g, slot));
            }
        if (arena.keys == arena.values) return;  // a value is its key
        for (int g = 0; g < pass.num_kv_heads; ++g, row += dim)
            copy(row, dim, arena.value(g, slot));
    });
}

}  // namespace

}  // namespace outrider

using namespace outrider;

extern "C" {

void outrider_rms_norm(Team* team, const float* x, const float* weight, float eps, float* out,
                       int num_rows, int size) {
    for_rows(*team, num_rows, size, [&](int n) {
        const int64_t at = static_cast<int64_t>(n) * size;
        rms_norm_row(x + at, weight, eps, out + at, size);
    });
}

void outrider_layer_norm(Team* team, const float* x, const float* weight, const float* bias,
                         float eps, float* out, int num_rows, int size) {
    for_rows(*team, num_rows, size, [&](int n) {
        const int64_t at = static_cast<int64_t>(n) * size;
        layer_norm_row(x + at, weight, bias, eps, out + at, size);
    });
}

void outrider_head_norm(Team* team, float* qkv, const float* q_weight, const float* k_weight,
                        float eps, int num_rows, int num_heads, int num_kv_heads, int dim) {
    const int64_t row_size = static_cast<int64_t>(num_heads + 2 * num_kv_heads) * dim;
    for_rows(*team, num_rows, row_size, [&](int n) {
        float* head = qkv + n * row_size;
        for (int h = 0; h < num_heads; ++h, head += dim)
            rms_norm_row(head, q_weight, eps, head, dim);
        for (int g = 0; g < num_kv_heads; ++g, head += dim)
            rms_norm_row(head, k_weight, eps, head, dim);
    });
}

void outrider_gelu(Team* team, const float* x, float* out, int num_rows, int size) {
    for_rows(*team, num_rows, size, [&](int n) {
        const int64_t at = static_cast<int64_t>(n) * size;
        gelu_row(x + at, out + at, size);
    });
}

void outrider_squared_relu(Team* team, const float* x, float* out, int num_rows, int size) {
    for_rows(*team, num_rows, size, [&](int n) {
        const int64_t at = static_cast<int64_t>(n) * size;
        for (int i = 0; i < size; i += LANES) {
            const Vec some = larger(splat(0.0f), load_some(x + at + i, size - i));
            store_some(out + at + i, some * some, size - i);
        }
    });
}

void outrider_silu_mul(Team* team, const float* gate_up, float* out, int num_rows, int size) {
    for_rows(*team, num_rows, size, [&](int n) {
        const float* row = gate_up + static_cast<int64_t>(n) * 2 * size;
        silu_mul_row(row, row + size, out + static_cast<int64_t>(n) * size, size);
    });
}

void outrider_sigmoid_mul(Team* team, const float* gate, float* x, int num_rows, int size) {
    for_rows(*team, num_rows, size, [&](int n) {
        const int64_t at = static_cast<int64_t>(n) * size;
        sigmoid_mul_row(gate + at, x + at, size);
    });
}

void outrider_gelu_mul(Team* team, const float* gate_up, float* out, int num_rows, int size) {
    for_rows(*team, num_rows, size, [&](int n) {
        const float* row = gate_up + static_cast<int64_t>(n) * 2 * size;
        gelu_mul_row(row, row + size, out + static_cast<int64_t>(n) * size, size);
    });
}

void outrider_soft_cap(Team* team, float* x, float cap, int num_rows, int size) {
    for_rows(*team, num_rows, size, [&](int n) {
        float* row = x + static_cast<int64_t>(n) * size;
        for (int i = 0; i < size; i += LANES)
            store_some(row + i, capped(load_some(row + i, size - i), cap), size - i);
    });
}

void outrider_argmax(Team* team, const float* logits, int64_t* out, int num_rows, int64_t size) {
    for_rows(*team, num_rows, size, [&](int n) { out[n] = argmax_row(logits + n * size, size); });
}

void outrider_rope_append_float32(const Pass* pass, float* qkv, const float* cos, const float* sin,
                   float* keys, float* values) {
    rope_append<float>(*pass, qkv, cos, sin, {*pass, keys, values});
}

void outrider_rope_append_bfloat16(const Pass* pass, float* qkv, const float* cos, const float* sin,
                   BFloat16* keys, BFloat16* values) {
    rope_append<BFloat16>(*pass, qkv, cos, sin, {*pass, keys, values});
}

void outrider_rope_append_float16(const Pass* pass, float* qkv, const float* cos, const float* sin,
                                  Float16* keys, Float16* values) {
    rope_append<Float16>(*pass, qkv, cos, sin, {*pass, keys, values});
}

void outrider_rope_append_int8(const Pass* pass, float* qkv, const float* cos, const float* sin,
                               Int8* keys, Int8* values) {
    rope_append<Int8>(*pass, qkv, cos, sin, {*pass, keys, values});
}
}
