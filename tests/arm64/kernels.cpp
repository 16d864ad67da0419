// Compares the native kernels with plain loops in double precision, on random inputs.
//
// For a CPU that the suite cannot run on: there is no Python in it, so an emulator of one program
// is enough (`scripts/arm64_check`). Integers, float16 and copies must be equal; sums of floats,
// within what rounding explains. Rows and threads that a row is computed beside must not change its
// bits. What calls these kernels in turn (forward, round, trees) is not compared here.
#include "plain.h"
#include "products.h"

namespace {

Doubles plain_rms(const float* x, const float* weight, int size, double eps) {
    double squares = 0;
    for (int i = 0; i < size; ++i) squares += double{x[i]} * x[i];
    Doubles out(size);
    for (int i = 0; i < size; ++i) out[i] = x[i] / std::sqrt(squares / size + eps) * weight[i];
    return out;
}

void pointwise(int size) {
    constexpr int ROWS = 5;
    const std::string of = " of " + std::to_string(size);
    const Floats x = normals(ROWS * size), weight = normals(size), bias = normals(size);
    Floats rms(x.size()), layer(x.size()), gelu(x.size()), silu(x.size() / 2 / size * size);
    outrider_rms_norm(three, x.data(), weight.data(), 1e-5f, rms.data(), ROWS, size);
    outrider_layer_norm(three, x.data(), weight.data(), bias.data(), 1e-5f, layer.data(), ROWS,
                        size);
    outrider_gelu(three, x.data(), gelu.data(), ROWS, size);
    outrider_silu_mul(three, x.data(), silu.data(), ROWS / 2, size);
    Floats gated(x.begin(), x.begin() + size);
    outrider_sigmoid_mul(three, x.data() + size, gated.data(), 1, size);
    Floats capped = x;
    outrider_soft_cap(three, capped.data(), 2.0f, ROWS, size);
    Doubles want_rms, want_layer, want_gelu, want_silu, want_gated, want_capped;
    for (int i = 0; i < size; ++i)
        want_gated.push_back(x[i] / (1 + std::exp(-double{x[size + i]})));
    for (float y : x) want_capped.push_back(2 * std::tanh(double{y} / 2));
    for (int n = 0; n < ROWS; ++n) {
        const float* row = &x[n * size];
        for (double y : plain_rms(row, weight.data(), size, 1e-5)) want_rms.push_back(y);
        const double mean = std::accumulate(row, row + size, 0.0) / size;
        double squares = 0;
        for (int i = 0; i < size; ++i) squares += (row[i] - mean) * (row[i] - mean);
        for (int i = 0; i < size; ++i)
            want_layer.push_back((row[i] - mean) / std::sqrt(squares / size + 1e-5) * weight[i]
                                 + bias[i]);
        for (int i = 0; i < size; ++i) {
            const double y = row[i], inner = std::sqrt(2 / M_PI) * (y + 0.044715 * y * y * y);
            want_gelu.push_back(y / 2 * (1 + std::tanh(inner)));
        }
    }
    for (int n = 0; n < ROWS / 2; ++n)
        for (int i = 0; i < size; ++i) {
            const double gate = x[2 * n * size + i], up = x[(2 * n + 1) * size + i];
            want_silu.push_back(gate / (1 + std::exp(-gate)) * up);
        }
    close(rms, want_rms, 2e-6, "rms_norm" + of);
    // One number less its mean is nothing but rounding.
    if (size > 1) close(layer, want_layer, 5e-6, "layer_norm" + of);
    close(gelu, want_gelu, 2e-6, "gelu" + of);
    close(capped, want_capped, 2e-6, "soft_cap" + of);
    close(silu, want_silu, 2e-6, "silu_mul" + of);
    close(gated, want_gated, 2e-6, "sigmoid_mul" + of);
}

void head_norm() {
    constexpr int ROWS = 3, HEADS = 4, KV = 2, DIM = 70, SIZE = (HEADS + 2 * KV) * DIM;
    const Floats x = normals(ROWS * SIZE), q = normals(DIM), k = normals(DIM);
    Floats got = x;
    outrider_head_norm(three, got.data(), q.data(), k.data(), 1e-6f, ROWS, HEADS, KV, DIM);
    Doubles want;
    for (int head = 0; head < ROWS * (HEADS + 2 * KV); ++head) {
        const int at = head % (HEADS + 2 * KV);
        const float* from = &x[head * DIM];
        if (at >= HEADS + KV) want.insert(want.end(), from, from + DIM);
        else
            for (double y : plain_rms(from, (at < HEADS ? q : k).data(), DIM, 1e-6))
                want.push_back(y);
    }
    close(got, want, 2e-6, "head_norm");
}

void argmax() {
    for (int64_t size : {1, 5, 64, 1027, 50257}) {
        Floats rows = normals(4 * size);
        rows[size + size / 2] = rows[size + size - 1] = 99;  // the first of two
        rows[2 * size + size / 3] = NAN;
        std::fill(rows.begin() + 3 * size, rows.end(), -INFINITY);
        std::vector<int64_t> got(4), want{0, size / 2, -1, 0};
        want[0] = std::max_element(rows.begin(), rows.begin() + size) - rows.begin();
        outrider_argmax(three, rows.data(), got.data(), 4, size);
        same(got, want, "argmax of " + std::to_string(size));
    }
}

// Two sequences, a chain and a tree, in pages that lie anywhere.
struct Case {
    static constexpr int HEADS = 4, KV = 2, PAGE = 8, COLUMNS = 20, SLOTS = 2 * COLUMNS * PAGE;
    int dim;
    std::vector<int32_t> positions, slots, seq, visible, pages, extra_offsets{0}, extra_slots;
    std::vector<std::vector<int>> keys;

    explicit Case(int dim) : dim(dim), pages(2 * COLUMNS) {
        std::iota(pages.begin(), pages.end(), 0);
        std::shuffle(pages.begin(), pages.end(), random_bits);
        for (int i = 0; i < 6; ++i) add(0, 130 + i, 131 + i, {});
        for (const std::vector<int>& path : {std::vector<int>{0}, {0, 1}, {0, 2}, {0, 1, 3}, {4}})
            add(1, 40 + static_cast<int>(path.size()), 41, path);
    }

    int slot(int s, int t) const { return pages[s * COLUMNS + t / PAGE] * PAGE + t % PAGE; }

    void add(int s, int position, int seen, const std::vector<int>& path) {
        positions.push_back(position), seq.push_back(s), visible.push_back(seen);
        slots.push_back(path.empty() ? slot(s, position) : slot(s, 41 + path.back()));
        keys.emplace_back();
        for (int t = 0; t < seen; ++t) keys.back().push_back(slot(s, t));
        for (int node : path) {
            extra_slots.push_back(slot(s, 41 + node));
            keys.back().push_back(extra_slots.back());
        }
        extra_offsets.push_back(static_cast<int32_t>(extra_slots.size()));
    }

    int row_size() const { return (HEADS + 2 * KV) * dim; }
    int count() const { return static_cast<int>(positions.size()); }
    Pass pass(Team* team, int first, int num) const {
        return {team, int64_t{SLOTS} * dim, dim, row_size(), HEADS, KV, dim, PAGE, num, COLUMNS, 0,
                &positions[first], &slots[first], &seq[first], &visible[first], pages.data(),
                &extra_offsets[first], extra_slots.data()};
    }
};

template <class T, class Rope>
void rope(int dim, Rope call) {
    const Case c(dim);
    const int half = dim / 2;
    const Floats x = normals(c.count() * c.row_size());
    const Floats cos = normals(200 * half), sin = normals(200 * half);
    std::vector<T> keys(Case::KV * Case::SLOTS * dim), values(keys.size());
    Floats got = x, got_keys, got_values, want_values;
    const Pass pass = c.pass(three, 0, c.count());
    call(&pass, got.data(), cos.data(), sin.data(), keys.data(), values.data());
    Doubles want(x.begin(), x.end()), want_keys;
    for (int n = 0; n < c.count(); ++n)
        for (int h = 0; h < Case::HEADS + 2 * Case::KV; ++h) {
            const float* head = &x[n * c.row_size() + h * dim];
            const int g = h - Case::HEADS, v = g - Case::KV;
            const T* key = &keys[(std::max(g, 0) % Case::KV * Case::SLOTS + c.slots[n]) * dim];
            const T* value = &values[(std::max(v, 0) * Case::SLOTS + c.slots[n]) * dim];
            for (int j = 0; j < dim; ++j) {
                const int angle = c.positions[n] * half + j % half;
                const double turned = double{head[j]} * cos[angle]
                                    + (j < half ? -1.0 : 1.0) * head[(j + half) % dim] * sin[angle];
                if (v >= 0) {
                    got_values.push_back(Plain<T>::read(value[j]));
                    want_values.push_back(Plain<T>::read(Plain<T>::stored(head[j])));
                } else if (g >= 0) {
                    got_keys.push_back(Plain<T>::read(key[j]));
                    want_keys.push_back(turned);
                } else want[n * c.row_size() + h * dim + j] = turned;
            }
        }
    const std::string what = std::string("rope_append ") + Plain<T>::NAME;
    close(got, want, 1e-6, what + ", queries");
    close(got_keys, want_keys, Plain<T>::STEP, what + ", keys");
    same(got_values, want_values, what + ", values");
}

template <class T, class Attention>
void attention(int dim, const Look& look, Attention call) {
    const Case c(dim);
    const int size = Case::HEADS * dim;
    const Floats x = normals(c.count() * c.row_size());
    auto keys = stored<T>(normals(Case::KV * Case::SLOTS * dim));
    auto values = stored<T>(normals(Case::KV * Case::SLOTS * dim));
    Doubles want(c.count() * size);
    for (int n = 0; n < c.count(); ++n)
        for (int h = 0; h < Case::HEADS; ++h) {
            const int g = h / (Case::HEADS / Case::KV);
            Doubles scores;
            const size_t first = look.first_key(static_cast<int>(c.keys[n].size()));
            for (size_t t = first; t < c.keys[n].size(); ++t) {
                const int slot = c.keys[n][t];
                double dot = 0;
                for (int j = 0; j < dim; ++j)
                    dot += double{x[n * c.row_size() + h * dim + j]}
                         * Plain<T>::read(keys[(g * Case::SLOTS + slot) * dim + j]);
                dot *= look.scale;
                scores.push_back(look.cap > 0 ? look.cap * std::tanh(dot / look.cap) : dot);
            }
            double most = *std::max_element(scores.begin(), scores.end()), sum = 0;
            if (look.sinks != nullptr) {
                most = std::max(most, double{look.sinks[h]});
                sum = std::exp(look.sinks[h] - most);
            }
            for (double& score : scores) sum += score = std::exp(score - most);
            for (size_t t = 0; t < scores.size(); ++t)
                for (int j = 0; j < dim; ++j)
                    want[n * size + h * dim + j] +=
                        scores[t] / sum
                        * Plain<T>::read(
                            values[(g * Case::SLOTS + c.keys[n][first + t]) * dim + j]);
        }
    Floats got(want.size()), alone(want.size());
    const std::string what = std::string("attention ") + Plain<T>::NAME + " of window "
                           + std::to_string(look.window);
    for (Team* team : {one, three}) {
        const Pass pass = c.pass(team, 0, c.count());
        call(&pass, x.data(), keys.data(), values.data(), &look, got.data());
        close(got, want, 5e-6, what);
    }
    for (int n = 0; n < c.count(); ++n) {
        const Pass pass = c.pass(one, n, 1);
        call(&pass, &x[n * c.row_size()], keys.data(), values.data(), &look, &alone[n * size]);
    }
    same(got, alone, what + ": a token beside others");
}

// Rows of integers: what is written, and that they are read as float32 reads the same numbers.
void int8(int dim, const Look& look) {
    const Case c(dim);
    const int bytes = dim + dim / Int8::GROUP * 2, num_rows = Case::KV * Case::SLOTS;
    const auto code = [&](const float* x, Int8* to) {
        for (int group = 0; group < dim / Int8::GROUP; ++group, x += Int8::GROUP) {
            float most = 0;
            for (int i = 0; i < Int8::GROUP; ++i) most = std::max(most, std::fabs(x[i]));
            const Float16 scale = Plain<Float16>::stored(most / 127.0f);
            const float inverse = 1.0f / Plain<Float16>::read(scale);
            for (int i = 0; i < Int8::GROUP; ++i)
                to[group * Int8::GROUP + i].bits = static_cast<int8_t>(
                    std::nearbyint(std::clamp(x[i] * inverse, -127.0f, 127.0f)));
            std::memcpy(to + dim + 2 * group, &scale, sizeof(scale));
        }
    };
    const auto coded = [&](const Floats& x) {
        std::vector<Int8> rows(num_rows * bytes);
        for (int row = 0; row < num_rows; ++row) code(&x[row * dim], &rows[row * bytes]);
        return rows;
    };
    const auto floats = [&](const std::vector<Int8>& rows) {
        Floats found;
        for (int row = 0; row < num_rows; ++row)
            for (int i = 0; i < dim; ++i) {
                Float16 scale;
                std::memcpy(&scale, &rows[row * bytes + dim + i / Int8::GROUP * 2], sizeof(scale));
                found.push_back(rows[row * bytes + i].bits * Plain<Float16>::read(scale));
            }
        return found;
    };
    auto keys = coded(normals(num_rows * dim)), values = coded(normals(num_rows * dim));
    auto want_keys = keys, want_values = values;
    Floats x = normals(c.count() * c.row_size());
    const Floats still(200 * dim / 2, 1.0f), zero(200 * dim / 2);
    for (int n = 0; n < c.count(); ++n)
        for (int g = 0; g < Case::KV; ++g) {
            const float* key = &x[n * c.row_size() + (Case::HEADS + g) * dim];
            const int at = (g * Case::SLOTS + c.slots[n]) * bytes;
            code(key, &want_keys[at]);
            code(key + Case::KV * dim, &want_values[at]);
        }
    Pass pass = c.pass(three, 0, c.count()), wide = pass;
    pass.head_stride = int64_t{Case::SLOTS} * bytes, pass.slot_stride = bytes;
    outrider_rope_append_int8(&pass, x.data(), still.data(), zero.data(), keys.data(),
                              values.data());
    same(floats(keys), floats(want_keys), "rope_append int8, keys");
    same(floats(values), floats(want_values), "rope_append int8, values");
    Floats got(c.count() * Case::HEADS * dim), want(got.size());
    Floats wide_keys = floats(keys), wide_values = floats(values);
    outrider_attention_int8(&pass, x.data(), keys.data(), values.data(), &look, got.data());
    outrider_attention_float32(&wide, x.data(), wide_keys.data(), wide_values.data(), &look,
                               want.data());
    same(got, want, "attention int8");
}

void sampling(int64_t size) {
    const std::string of = " of " + std::to_string(size);
    const Floats logits = normals(2 * size, 3.0f);
    Floats probs(2 * size), left(size);
    outrider_softmax(three, logits.data(), 0.7f, probs.data(), 2, size);
    Doubles want(2 * size);
    for (int n = 0; n < 2; ++n) {
        double sum = 0;
        for (int64_t i = n * size; i < (n + 1) * size; ++i)
            sum += want[i] = std::exp(double{logits[i]} / 0.7f);
        for (int64_t i = n * size; i < (n + 1) * size; ++i) want[i] /= sum;
    }
    close(probs, want, 2e-6, "softmax" + of);
    const int32_t tokens[2] = {0, static_cast<int32_t>(size - 1)};
    double masses[2];
    outrider_masses(three, logits.data(), 0.7f, tokens, masses, 2, size);
    check(masses[0] == probs[0] && masses[1] == probs[2 * size - 1], "masses" + of);

    const double total = std::accumulate(probs.begin(), probs.begin() + size, 0.0);
    for (int turn = 0; turn < 50; ++turn) {
        const double uniform = outrider_uniform(7, turn, 1, 2, 3), goal = uniform * total;
        const int64_t got = outrider_pick(three, probs.data(), uniform, size);
        const double before = std::accumulate(probs.begin(), probs.begin() + got, 0.0);
        const bool holds = got >= 0 && probs[got] > 0 && before <= goal + 1e-9;
        check(holds && before + probs[got] > goal - 1e-9, "pick" + of);
    }

    for (uint32_t position = 0; position < 5; ++position) {
        int64_t winner = 0;
        double least = INFINITY;
        for (int64_t i = 0; i < size; ++i) {
            const double uniform = outrider_uniform(77, static_cast<uint32_t>(i), position, 3, 4);
            const double x = (std::floor(uniform * 0x1p52) + 0.5) * 0x1p-52;
            const double time = -std::log(x) / probs[i];
            if (probs[i] > 0 && time < least) least = time, winner = i;
        }
        check(outrider_race(three, probs.data(), 77, position, 3, size) == winner, "race" + of);
    }

    Doubles rest(size);
    for (int64_t i = 0; i < size; ++i)
        rest[i] = std::max(0.9 * probs[i] - double{probs[size + i]}, 0.0);
    const double sum =
        outrider_leftover(three, probs.data(), &probs[size], 0, 0.9, left.data(), size);
    close(left, rest, 2e-6, "leftover" + of);
    close(Doubles{sum}, Doubles{std::accumulate(rest.begin(), rest.end(), 0.0)}, 1e-5,
          "the sum of leftover" + of);

    const int64_t k = std::min<int64_t>(size, 7);
    Floats sorted(logits.begin(), logits.begin() + size), top(size), kept(size);
    std::sort(sorted.begin(), sorted.end(), std::greater<float>());
    for (int64_t i = 0; i < size; ++i)
        kept[i] = logits[i] >= sorted[k - 1] ? logits[i] : -INFINITY;
    outrider_top_k(three, logits.data(), k, top.data(), 1, size);
    same(top, kept, "top_k" + of);

    std::vector<int64_t> order(size);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return probs[a] > probs[b]; });
    Doubles likely(size);
    double reached = 0;
    for (int64_t i = 0; i < size && (i == 0 || reached < 0.8); ++i)
        reached += likely[order[i]] = probs[order[i]];
    for (double& p : likely) p /= reached;
    Floats filtered(probs.begin(), probs.begin() + size);
    outrider_keep_likely(three, filtered.data(), 0.8, 0.0, 1, size);
    close(filtered, likely, 2e-6, "keep_likely" + of);
}

// A text from its beginning: the formula of kernels/reference/delta.py, token by token.
void delta(int key_dim, int value_dim) {
    constexpr int TOKENS = 9, TAPS = 4, KEYS = 2, SHARED = 2, HEADS = KEYS * SHARED;
    const int channels = 2 * KEYS * key_dim + HEADS * value_dim, row = channels + 2 * HEADS;
    const Floats rows = normals(TOKENS * row), bias = normals(HEADS);
    const Floats conv = normals(TAPS * channels);
    Floats rate = normals(HEADS);
    for (float& r : rate) r = std::fabs(r);
    Floats window((TAPS - 1) * channels), state(HEADS * key_dim * value_dim);
    const int64_t cells[2] = {reinterpret_cast<int64_t>(window.data()),
                              reinterpret_cast<int64_t>(state.data())};
    const int32_t run[6] = {0, TOKENS, -1, -1, 0, 0};
    std::vector<int32_t> states(TOKENS, -1), inputs(TOKENS, -1);
    states.back() = 0;
    const DeltaLayer layer{conv.data(), rate.data(), bias.data(), TAPS, channels, KEYS, HEADS,
                           key_dim, value_dim};
    Floats got(TOKENS * HEADS * value_dim);
    const DeltaPass pass{three, run, states.data(), inputs.data(), nullptr, cells, nullptr, 1};
    outrider_delta(&pass, &layer, rows.data(), row, channels, 0, got.data());

    Doubles want, memory(state.size());
    for (int t = 0; t < TOKENS; ++t) {
        Doubles mixed(channels);
        for (int c = 0; c < channels; ++c) {
            for (int tap = 0; tap < TAPS; ++tap)
                if (const int at = t + tap - (TAPS - 1); at >= 0)
                    mixed[c] += double{rows[at * row + c]} * conv[tap * channels + c];
            mixed[c] /= 1 + std::exp(-mixed[c]);
        }
        for (int head = 0; head < 2 * KEYS; ++head) {
            double squares = 1e-6;
            for (int i = 0; i < key_dim; ++i)
                squares += mixed[head * key_dim + i] * mixed[head * key_dim + i];
            const double length = std::sqrt(squares * (head < KEYS ? key_dim : 1));
            for (int i = 0; i < key_dim; ++i) mixed[head * key_dim + i] /= length;
        }
        for (int h = 0; h < HEADS; ++h) {
            const double *q = &mixed[h / SHARED * key_dim], *k = q + KEYS * key_dim;
            const double *v = &mixed[2 * KEYS * key_dim + h * value_dim];
            const float* gates = &rows[t * row + channels];
            const double b = 1 / (1 + std::exp(-double{gates[h]}));
            const double step = std::log1p(std::exp(double{gates[HEADS + h]} + bias[h]));
            const double decay = std::exp(-rate[h] * step);
            for (int j = 0; j < value_dim; ++j) {
                double* s = &memory[h * key_dim * value_dim + j];
                double seen = 0, out = 0;
                for (int i = 0; i < key_dim; ++i) seen += (s[i * value_dim] *= decay) * k[i];
                for (int i = 0; i < key_dim; ++i)
                    out += (s[i * value_dim] += k[i] * b * (v[j] - seen)) * q[i];
                want.push_back(out);
            }
        }
    }
    close(got, want, 1e-5, "delta");
    close(state, memory, 1e-5, "the state of delta");
    same(window, [&] {
        Floats last;
        for (int t = TOKENS - TAPS + 1; t < TOKENS; ++t)
            last.insert(last.end(), &rows[t * row], &rows[t * row] + channels);
        return last;
    }(), "the window of delta");
}

void stream() {
    std::vector<uint64_t> data(1 << 17);
    for (uint64_t& word : data) word = random_bits();
    uint64_t want = 0;
    for (uint64_t word : data) want ^= word;
    const auto* bytes = reinterpret_cast<const char*>(data.data());
    check(outrider_stream(three, bytes, 8 * static_cast<int64_t>(data.size()), 2) == want, "stream");
}

}  // namespace

int main() {
    one = static_cast<Team*>(outrider_team(1, nullptr));
    three = static_cast<Team*>(outrider_team(3, nullptr));
    halves();
    for (auto [num_out, num_in] : {std::pair{1, 1}, {33, 70}, {64, 256}, {130, 1000}}) {
        linear<float>(num_out, num_in, outrider_pack_float32, outrider_linear_float32);
        linear<BFloat16>(num_out, num_in, outrider_pack_bfloat16, outrider_linear_bfloat16);
        linear<Float16>(num_out, num_in, outrider_pack_float16, outrider_linear_float16);
        quantised(num_out, num_in);
    }
    for (const BlockType& type : BLOCK_TYPES) {
        grouped(type, 5, 256);
        grouped(type, 77, 768);
        if (type.size == 32) grouped(type, 33, 70);
    }
    for (int size : {1, 17, 64, 350, 1001}) pointwise(size);
    head_norm();
    argmax();
    for (int dim : {6, 64, 80}) {
        rope<float>(dim, outrider_rope_append_float32);
        rope<BFloat16>(dim, outrider_rope_append_bfloat16);
        rope<Float16>(dim, outrider_rope_append_float16);
        const Floats sinks = normals(Case::HEADS, 3.0f);
        for (const Look& look : {Look{0.125f, 0.0f, 0, 0, nullptr}, {0.125f, 0.0f, 5, 0, nullptr},
                                 {0.5f, 1.5f, 11, 0, sinks.data()}}) {
            attention<float>(dim, look, outrider_attention_float32);
            attention<BFloat16>(dim, look, outrider_attention_bfloat16);
            attention<Float16>(dim, look, outrider_attention_float16);
            if (dim % Int8::GROUP == 0) int8(dim, look);
        }
    }
    for (int64_t size : {1, 17, 513, 50257}) sampling(size);
    for (auto [keys, values] : {std::pair{5, 7}, {64, 40}, {128, 128}}) delta(keys, values);
    stream();
    std::printf("%d comparisons, %d wrong, %d lanes\n", num_checks, num_wrong, LANES);
    return num_wrong > 0;
}
