// Attention over latents (LatentShape in core/spec.py): the products before it and after it.
//
// A head's key matrix is applied to the query instead of the keys, and its value matrix to what the
// head found instead of the values. So all heads attend to one row of a token, its latent and its
// rotated key, and that row is key and value at once:
//
//     query row of head h = [K_h^T still part of q, turning part of q]      key row = [latent, key]
//     output of head h = V_h (the latent's part of what attention gives)
//
// Kernels rotate a row's elements i and i + D / 2, so the turning part comes first in both halves.
#include <cstring>

#include "linears.h"

using namespace outrider;

extern "C" void outrider_rms_norm(Team*, const float* x, const float* weight, float eps, float* out,
                                  int num_rows, int size);

namespace outrider {

namespace {

float* memory_for(int64_t num_floats) {
    static thread_local Scratch scratch;
    return static_cast<float*>(scratch.take(sizeof(float) * num_floats));
}

// One row of attention from its two parts.
void join(const Latent& l, const float* still, const float* turning, float* row) {
    const int half = l.turning / 2, rest = l.rank / 2;
    for (int side = 0; side < 2; ++side, row += half + rest) {
        for (int i = 0; i < half; ++i)
            row[i] = turning[l.interleaved ? 2 * i + side : side * half + i];
        std::memcpy(row + half, still + side * rest, sizeof(float) * rest);
    }
}

// The latent's part of a row.
void part(const Latent& l, const float* row, float* still) {
    const int half = l.turning / 2, rest = l.rank / 2;
    for (int side = 0; side < 2; ++side)
        std::memcpy(still + side * rest, row + half + side * (half + rest), sizeof(float) * rest);
}

// Norms rows that lie `stride` apart; the normed ones are neighbours.
void norm_rows(const Latent& l, const float* x, int64_t stride, const float* weight, float* out,
               int num, int size) {
    for (int64_t n = 0; n < num; ++n)
        std::memcpy(out + n * size, x + n * stride, sizeof(float) * size);
    outrider_rms_norm(l.team, out, weight, l.eps, out, num, size);
}

}  // namespace

void latent_queries(const Latent& l, const Linear& first, const float* x, float* qkv, int num,
                    int64_t row_size) {
    const int64_t dim = l.rank + l.turning, head = l.still + l.turning;
    const int64_t num_queries = l.num_heads * head;
    const int64_t before = l.query_rank > 0 ? l.query_rank : num_queries, width = before + dim;
    float* given = memory_for(num * (width + l.query_rank + num_queries + 2 * l.rank + l.still));
    float *vectors = given + num * width, *queries = vectors + num * l.query_rank;
    float *latents = queries + num * num_queries, *still = latents + num * l.rank;
    float* absorbed = still + num * l.still;
    first(x, given, num, static_cast<int>(width), false);
    int64_t stride = width;
    if (l.query_rank > 0) {
        norm_rows(l, given, width, l.query_norm, vectors, num, l.query_rank);
        l.queries(vectors, queries, num, static_cast<int>(num_queries), false);
        stride = num_queries;
    } else {
        queries = given;
    }
    norm_rows(l, given + before, width, l.norm, latents, num, l.rank);
    for (int64_t h = 0; h < l.num_heads; ++h) {
        for (int64_t n = 0; n < num; ++n)
            std::memcpy(still + n * l.still, queries + n * stride + h * head,
                        sizeof(float) * l.still);
        l.keys[h](still, absorbed, num, l.rank, false);
        for (int64_t n = 0; n < num; ++n)
            join(l, absorbed + n * l.rank, queries + n * stride + h * head + l.still,
                 qkv + n * row_size + h * dim);
    }
    for (int64_t n = 0; n < num; ++n)
        join(l, latents + n * l.rank, given + n * width + before + l.rank,
             qkv + n * row_size + l.num_heads * dim);
}

const float* latent_values(const Latent& l, const float* attended, int num) {
    const int64_t dim = l.rank + l.turning, size = l.num_heads * static_cast<int64_t>(l.value_dim);
    float* out = memory_for(num * (size + l.rank + l.value_dim));
    float *latents = out + num * size, *values = latents + num * l.rank;
    for (int64_t h = 0; h < l.num_heads; ++h) {
        for (int64_t n = 0; n < num; ++n)
            part(l, attended + (n * l.num_heads + h) * dim, latents + n * l.rank);
        l.values[h](latents, values, num, l.value_dim, false);
        for (int64_t n = 0; n < num; ++n)
            std::memcpy(out + n * size + h * l.value_dim, values + n * l.value_dim,
                        sizeof(float) * l.value_dim);
    }
    return out;
}

}  // namespace outrider

extern "C" {

void outrider_latent_queries(const Latent* latent, const Linear* first, const float* x, float* qkv,
                             int num_rows, int64_t row_size) {
    latent_queries(*latent, *first, x, qkv, num_rows, row_size);
}

void outrider_latent_values(const Latent* latent, const float* attended, float* out,
                            int num_rows) {
    const float* from = latent_values(*latent, attended, num_rows);
    const int64_t size = latent->num_heads * static_cast<int64_t>(latent->value_dim);
    std::memcpy(out, from, sizeof(float) * num_rows * size);
}
}
