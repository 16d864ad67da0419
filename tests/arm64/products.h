// Linears and what they multiply, beside plain loops. Included by kernels.cpp alone.
#pragma once

#include "plain.h"

namespace {

void halves() {
    Floats all, wide;
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
        const Float16 half{static_cast<uint16_t>(bits)};
        const float got = load_some(&half, 1)[0], want = Plain<Float16>::read(half);
        if (bits_of(got) != bits_of(want) && want == want) check(false, "a half is widened");
        // Every number, its neighbours, and what lies halfway to the next.
        for (int step : {-1, 0, 1, 0xfff, 0x1000, 0x1001})
            wide.push_back(cast<float>(bits_of(want) + step));
    }
    for (float x : normals(1 << 16, 1e-5f)) wide.push_back(x);
    int wrong = 0;
    for (float x : wide) {
        Float16 got;
        store_some(&got, load_some(&x, 1), 1);
        const Float16 want = Plain<Float16>::stored(x);
        wrong += x == x ? got.bits != want.bits : (got.bits & 0x7c00u) != 0x7c00u;
    }
    check(wrong == 0, "float32 rounded to float16");
}

// Rows of which each must have the bits that it has alone, on one thread and on three.
void rows_alone(int num_rows, int num_in, int num_out, const std::string& what,
                const std::function<void(Team*, int, int, float*)>& call) {
    Floats alone(static_cast<size_t>(num_rows) * num_out);
    for (int row = 0; row < num_rows; ++row) call(one, row, 1, &alone[row * num_out]);
    for (int count = 2; count <= num_rows; ++count) {
        Floats together(static_cast<size_t>(count) * num_out);
        call(count % 2 ? one : three, 0, count, together.data());
        same(together, Floats(alone.begin(), alone.begin() + count * num_out),
              what + ": a row beside others, " + std::to_string(count) + " x "
                  + std::to_string(num_in));
    }
}

template <class T, class Pack, class Linear>
void linear(int num_out, int num_in, Pack pack, Linear call) {
    constexpr int ROWS = 18;
    const std::string what = std::string("linear ") + Plain<T>::NAME;
    const int block = outrider_block(), padded = (num_out + block - 1) / block * block;
    const Floats x = normals(ROWS * num_in);
    const auto weights = stored<T>(normals(num_out * num_in));
    std::vector<T> packed(static_cast<size_t>(padded) * num_in);
    pack(three, weights.data(), packed.data(), num_out, num_in);
    const Floats inputs = rounded<T>(x);
    Doubles want(ROWS * num_out);
    for (int n = 0; n < ROWS; ++n)
        for (int o = 0; o < num_out; ++o)
            for (int i = 0; i < num_in; ++i)
                want[n * num_out + o] +=
                    double{inputs[n * num_in + i]} * Plain<T>::read(weights[o * num_in + i]);
    Floats got(want.size());
    const Weights w{three, packed.data(), num_in, num_out};
    call(&w, x.data(), got.data(), ROWS, 0);
    close(got, want, 2e-6, what);
    rows_alone(ROWS, num_in, num_out, what, [&](Team* team, int row, int count, float* out) {
        const Weights own{team, packed.data(), num_in, num_out};
        call(&own, &x[row * num_in], out, count, 0);
    });
    call(&w, x.data(), got.data(), ROWS, 1);
    for (double& sum : want) sum *= 2;
    close(got, want, 2e-6, what + ", accumulated");
}

// A row as integers of -127 to 127 and what one of them means.
float integers_of(const float* x, int count, std::vector<int>* to) {
    float largest = 0;
    for (int i = 0; i < count; ++i) largest = std::max(largest, std::fabs(x[i]));
    const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
    for (int i = 0; i < count; ++i) {
        volatile float product = x[i] * inverse;
        (*to)[i] = static_cast<int>(std::nearbyint(product));
    }
    return largest / 127.0f;
}

// The layout that kernels/native/ops.py makes. Sums of integers are exact, so results are
// equal.
inline void quantised(int num_out, int num_in) {
    constexpr int ROWS = 18, GROUP = 32;
    const int block = outrider_block(), padded_out = (num_out + block - 1) / block * block;
    const int padded_in = (num_in + GROUP - 1) / GROUP * GROUP;
    std::uniform_int_distribution<int> integer(-127, 127);
    std::vector<int> values(static_cast<size_t>(padded_out) * padded_in);
    for (size_t i = 0; i < values.size(); ++i)
        values[i] = static_cast<int>(i % padded_in) < num_in ? integer(random_bits) : 0;
    const Floats scales = normals(padded_out);
    const auto value = [&](int o, int i) { return values[o * padded_in + i]; };
    std::vector<uint8_t> packed;
    for (int first = 0; first < padded_out; first += block) {
        const auto* bytes = reinterpret_cast<const uint8_t*>(&scales[first]);
        packed.insert(packed.end(), bytes, bytes + sizeof(float) * block);
        for (int i = 0; i < padded_in; i += 4)
            for (int o = first; o < first + block; ++o)
                for (int j = i; j < i + 4; ++j)
                    packed.push_back(static_cast<uint8_t>(value(o, j) + 128));
    }
    packed.resize(packed.size() + 4096);  // what is asked for ahead
    const Floats x = normals(ROWS * num_in);
    Floats got(ROWS * num_out), want(ROWS * num_out);
    std::vector<int> inputs(padded_in);
    for (int n = 0; n < ROWS; ++n) {
        const float scale = integers_of(&x[n * num_in], num_in, &inputs);
        for (int o = 0; o < num_out; ++o) {
            int64_t sum = 0;
            for (int i = 0; i < padded_in; ++i) sum += value(o, i) * inputs[i];
            volatile float both = scales[o] * scale;
            want[n * num_out + o] = static_cast<float>(sum) * both;
        }
    }
    const Weights w{three, packed.data(), num_in, num_out};
    outrider_linear_int8(&w, x.data(), got.data(), ROWS, 0);
    same(got, want, "linear int8 has the sums of integers");
    rows_alone(ROWS, num_in, num_out, "linear int8", [&](Team* team, int row, int count, float* out) {
        const Weights own{team, packed.data(), num_in, num_out};
        outrider_linear_int8(&own, &x[row * num_in], out, count, 0);
    });
}

struct BlockType {
    const char* name;
    int number, size, num_bytes;
    std::vector<int> halves;  // where a block has its float16
};

inline const std::vector<BlockType> BLOCK_TYPES = {
    {"Q4_0", 2, 32, 18, {0}},        {"Q4_1", 3, 32, 20, {0, 2}},
    {"Q5_0", 6, 32, 22, {0}},        {"Q5_1", 7, 32, 24, {0, 2}},
    {"Q8_0", 8, 32, 34, {0}},        {"Q2_K", 10, 256, 84, {80, 82}},
    {"Q3_K", 11, 256, 110, {108}},   {"Q4_K", 12, 256, 144, {0, 2}},
    {"Q5_K", 13, 256, 176, {0, 2}},  {"Q6_K", 14, 256, 210, {208}},
    {"IQ4_NL", 20, 32, 18, {0}},     {"IQ4_XS", 23, 256, 136, {0}},
    {"MXFP4", 39, 32, 17, {}},       {"NVFP4", 40, 64, 36, {}},
    {"TQ1_0", 34, 256, 54, {52}},    {"TQ2_0", 35, 256, 66, {64}},
    {"Q1_0", 41, 128, 18, {0}},      {"Q2_0", 42, 64, 18, {0}},
};

// Rows of random blocks, read back, and their products with rows of activations; the numbers of
// Q4_0 and Q8_0 are also made by hand.
inline void grouped(const BlockType& type, int num_out, int num_in) {
    constexpr int ROWS = 18, UNIT = 32;
    const std::string what = std::string("linear over ") + type.name;
    const int row_bytes = (num_in + type.size - 1) / type.size * type.num_bytes;
    std::vector<uint8_t> raw(static_cast<size_t>(num_out) * row_bytes);
    for (uint8_t& byte : raw) byte = static_cast<uint8_t>(random_bits());
    for (size_t at = 0; at < raw.size(); at += type.num_bytes) {
        for (int half : type.halves) {
            const Float16 small = Plain<Float16>::stored(normals(1, 0.01f)[0]);
            std::memcpy(&raw[at + half], &small, sizeof(small));
        }
        if (type.halves.empty()) raw[at] = static_cast<uint8_t>(118 + raw[at] % 8);
    }
    std::vector<uint8_t> packed(outrider_grouped_bytes(type.number, num_out, num_in) + 4096);
    outrider_pack_grouped(three, type.number, raw.data(), nullptr, nullptr, packed.data(), num_out, num_in);
    const auto weights = [&](Team* team) {
        Grouped found{team, num_in, num_out, 1, 0, {}};
        found.parts[0] = {packed.data(), type.number, 0, num_out, 1.0f};
        return found;
    };
    const Grouped w = weights(three);
    std::vector<int32_t> all(num_out);
    for (int o = 0; o < num_out; ++o) all[o] = o;
    Floats numbers(static_cast<size_t>(num_out) * num_in);
    outrider_grouped_rows(&w, all.data(), numbers.data(), num_out);
    if (type.number == 2 || type.number == 8) {
        Floats plain(numbers.size());
        for (size_t i = 0; i < plain.size(); ++i) {
            const int input = static_cast<int>(i % num_in), at = input % UNIT;
            const uint8_t* block = &raw[i / num_in * row_bytes + input / UNIT * type.num_bytes];
            Float16 scale;
            std::memcpy(&scale, block, sizeof(scale));
            const int code = type.number == 8 ? static_cast<int8_t>(block[2 + at])
                                              : (block[2 + at % 16] >> at / 16 * 4 & 15) - 8;
            plain[i] = static_cast<float>(Plain<Float16>::read(scale)) * static_cast<float>(code);
        }
        same(numbers, plain, what + " has the file's numbers");
    }
    const Floats x = normals(ROWS * num_in);
    Floats got(ROWS * num_out);
    Doubles want(got.size());
    std::vector<int> inputs(UNIT);
    for (int n = 0; n < ROWS; ++n)
        for (int first = 0; first < num_in; first += UNIT) {
            const int count = std::min(UNIT, num_in - first);
            const double scale = integers_of(&x[n * num_in + first], count, &inputs);
            for (int o = 0; o < num_out; ++o)
                for (int i = 0; i < count; ++i)
                    want[n * num_out + o] += scale * inputs[i] * numbers[o * num_in + first + i];
        }
    outrider_linear_grouped(&w, x.data(), got.data(), ROWS, 0);
    close(got, want, 2e-5, what);
    rows_alone(ROWS, num_in, num_out, what, [&](Team* team, int row, int count, float* out) {
        const Grouped own = weights(team);
        outrider_linear_grouped(&own, &x[row * num_in], out, count, 0);
    });
}

}  // namespace
