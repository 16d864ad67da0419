// What the comparisons of kernels.cpp share: the kernels' functions, random numbers, and each
// precision in plain arithmetic. Included by that program alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "blocks.h"
#include "groups.h"
#include "pass.h"
#include "team.h"
#include "vectors.h"

using namespace outrider;

struct Weights {
    Team* team;
    const void* packed;
    int32_t num_in, num_out;
};

struct DeltaLayer {
    const float *conv, *rate, *dt_bias;
    int32_t taps, channels, key_heads, heads, key_dim, value_dim;
};

struct DeltaPass {
    Team* team;
    const int32_t *runs, *states, *inputs, *replayed;
    const int64_t *state_cells, *input_cells;
    int32_t num_runs;
};

extern "C" {
void* outrider_team(int num_threads, const int* pinned);
int outrider_block();
uint64_t outrider_stream(Team*, const char*, int64_t, int);
double outrider_uniform(uint64_t, uint32_t, uint32_t, uint32_t, uint32_t);
void outrider_pack_float32(Team*, const float*, float*, int, int);
void outrider_pack_bfloat16(Team*, const BFloat16*, BFloat16*, int, int);
void outrider_pack_float16(Team*, const Float16*, Float16*, int, int);
void outrider_linear_float32(const Weights*, const float*, float*, int, int);
void outrider_linear_bfloat16(const Weights*, const float*, float*, int, int);
void outrider_linear_float16(const Weights*, const float*, float*, int, int);
int64_t outrider_grouped_bytes(int, int, int);
void outrider_pack_grouped(Team*, int, const uint8_t*, const int32_t*, const uint8_t*, uint8_t*, int,
                           int);
void outrider_grouped_rows(const Grouped*, const int32_t*, float*, int);
void outrider_linear_grouped(const Grouped*, const float*, float*, int, int);
void outrider_linear_int8(const Weights*, const float*, float*, int, int);
void outrider_rms_norm(Team*, const float*, const float*, float, float*, int, int);
void outrider_layer_norm(Team*, const float*, const float*, const float*, float, float*, int, int);
void outrider_head_norm(Team*, float*, const float*, const float*, float, int, int, int, int);
void outrider_gelu(Team*, const float*, float*, int, int);
void outrider_silu_mul(Team*, const float*, float*, int, int);
void outrider_sigmoid_mul(Team*, const float*, float*, int, int);
void outrider_soft_cap(Team*, float*, float, int, int);
void outrider_argmax(Team*, const float*, int64_t*, int, int64_t);
void outrider_rope_append_float32(const Pass*, float*, const float*, const float*, float*, float*);
void outrider_rope_append_bfloat16(const Pass*, float*, const float*, const float*, BFloat16*,
                                   BFloat16*);
void outrider_rope_append_float16(const Pass*, float*, const float*, const float*, Float16*,
                                  Float16*);
void outrider_attention_float32(const Pass*, const float*, float*, float*, const Look*, float*);
void outrider_attention_bfloat16(const Pass*, const float*, BFloat16*, BFloat16*, const Look*,
                                 float*);
void outrider_attention_float16(const Pass*, const float*, Float16*, Float16*, const Look*, float*);
void outrider_rope_append_int8(const Pass*, float*, const float*, const float*, Int8*, Int8*);
void outrider_attention_int8(const Pass*, const float*, Int8*, Int8*, const Look*, float*);
void outrider_softmax(Team*, const float*, float, float*, int, int64_t);
void outrider_masses(Team*, const float*, float, const int32_t*, double*, int, int64_t);
int64_t outrider_pick(Team*, const float*, double, int64_t);
int64_t outrider_race(Team*, const float*, uint64_t, uint32_t, uint32_t, int64_t);
double outrider_leftover(Team*, const float*, const float*, int64_t, double, float*, int64_t);
void outrider_top_k(Team*, const float*, int64_t, float*, int, int64_t);
void outrider_keep_likely(Team*, float*, double, double, int, int64_t);
void outrider_delta(const DeltaPass*, const DeltaLayer*, const float*, int, int, int, float*);
}

namespace {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;

std::mt19937_64 random_bits(1);
Team *one, *three;
int num_checks = 0, num_wrong = 0;

Floats normals(size_t count, float scale = 1.0f) {
    std::normal_distribution<float> normal(0.0f, scale);
    Floats found(count);
    for (float& x : found) x = normal(random_bits);
    return found;
}

void check(bool holds, const std::string& what) {
    ++num_checks;
    if (holds) return;
    ++num_wrong;
    std::printf("wrong: %s\n", what.c_str());
}

// The largest difference, as a share of the largest value.
template <class A, class B>
void close(const A& got, const B& want, double tolerance, const std::string& what) {
    double most = 1e-30, off = 0;
    bool is_number = got.size() == want.size();
    for (size_t i = 0; is_number && i < want.size(); ++i) {
        most = std::max<double>(most, std::fabs(want[i]));
        off = std::max<double>(off, std::fabs(got[i] - want[i]));
        is_number = got[i] == got[i];
    }
    check(is_number && off <= tolerance * most, what + ": off by " + std::to_string(off / most));
}

template <class T>
void same(const std::vector<T>& got, const std::vector<T>& want, const std::string& what) {
    check(got.size() == want.size()
              && std::memcmp(got.data(), want.data(), sizeof(T) * got.size()) == 0,
          what);
}

// What is stored of a float, and what it says; plain arithmetic, a number at a time.
uint32_t bits_of(float x) { return cast<uint32_t>(x); }

template <class T>
struct Plain;

template <>
struct Plain<float> {
    static constexpr const char* NAME = "float32";
    static constexpr double STEP = 1e-6;
    static float stored(float x) { return x; }
    static float read(float x) { return x; }
};

template <>
struct Plain<BFloat16> {
    static constexpr const char* NAME = "bfloat16";
    static constexpr double STEP = 0x1p-8;
    static BFloat16 stored(float x) {
        const uint32_t bits = bits_of(x);
        return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
    }
    static float read(BFloat16 x) { return cast<float>(uint32_t{x.bits} << 16); }
};

template <>
struct Plain<Float16> {
    static constexpr const char* NAME = "float16";
    static constexpr double STEP = 0x1p-11;
    static Float16 stored(float x) {
        const auto sign = static_cast<uint16_t>(bits_of(x) >> 16 & 0x8000u);
        const double size = std::fabs(x);
        if (x != x) return {static_cast<uint16_t>(sign | 0x7e00u)};
        if (size >= 65520.0) return {static_cast<uint16_t>(sign | 0x7c00u)};
        int exponent = -13;
        double part = std::ldexp(size, 24);
        if (size >= 0x1p-14) part = std::ldexp(std::frexp(size, &exponent), 11);
        const int field = size >= 0x1p-14 ? exponent + 13 : 0;
        return {static_cast<uint16_t>(sign | (field * 1024 + std::lrint(std::nearbyint(part))))};
    }
    static float read(Float16 x) {
        const int exponent = x.bits >> 10 & 31, part = x.bits & 1023;
        const double sign = x.bits & 0x8000u ? -1.0 : 1.0;
        if (exponent == 31) return part ? NAN : static_cast<float>(sign * INFINITY);
        const double size = exponent == 0 ? std::ldexp(part, -24)
                                          : std::ldexp(1024 + part, exponent - 25);
        return static_cast<float>(sign * size);
    }
};

template <class T>
std::vector<T> stored(const Floats& from) {
    std::vector<T> to(from.size());
    for (size_t i = 0; i < from.size(); ++i) to[i] = Plain<T>::stored(from[i]);
    return to;
}

template <class T>
Floats rounded(Floats from) {
    for (float& x : from) x = Plain<T>::read(Plain<T>::stored(x));
    return from;
}

}  // namespace
