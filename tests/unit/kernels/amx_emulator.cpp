// Runs the trial of the tile kernels, compiled for AMX, on a CPU without it: each instruction raises
// SIGILL, and the handler does what the manual says. So the real backing's operands are tested too.
// A CPU with AMX configures tiles by itself, and refuses the instructions on their data, for which
// nobody asked the kernel: then the configuration is read from the CPU.
// The exit status is the trial's; 9 for an instruction that nobody should have used.
#include <cpuid.h>
#include <immintrin.h>
#include <ucontext.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstring>

extern "C" int outrider_tiles_check();
extern "C" int outrider_tiles_permit() { return 1; }

namespace {

struct Tile {
    int rows, bytes;
    uint8_t data[16][64];

    void clear() { std::memset(data, 0, sizeof(data)); }
};

thread_local Tile tiles[8];
// Whether the CPU left configurations to the handler, and the newest one that the CPU took itself.
bool emulates_configurations = false;
thread_local uint8_t taken[64];

void demand(bool condition) {
    if (!condition) _exit(9);
}

// The fields of a three-byte VEX prefix, its opcode and what follows.
struct Instruction {
    const uint8_t* at;
    greg_t* registers;
    int length = 5;

    int prefix() const { return at[2] & 3; }  // none, 66, F3, F2
    int opcode() const { return at[3]; }
    int mode() const { return at[4] >> 6; }
    int reg() const { return at[4] >> 3 & 7; }
    int rm() const { return at[4] & 7; }
    int third() const { return ~at[2] >> 3 & 15; }

    int64_t value(int number) const {
        static constexpr int PLACES[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                                           REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                                           REG_R12, REG_R13, REG_R14, REG_R15};
        return registers[PLACES[number]];
    }

    // The address without an index, and the index: a tile's base and stride.
    uint8_t* address(int64_t* stride) {
        const bool has_sib = rm() == 4;
        const int sib = has_sib ? at[length++] : 0;
        const int base = (has_sib ? sib & 7 : rm()) | (at[1] & 0x20 ? 0 : 8);
        const int index = (sib >> 3 & 7) | (at[1] & 0x40 ? 0 : 8);
        demand(mode() != 3 && !(mode() == 0 && (base & 7) == 5));
        *stride = has_sib && index != 4 ? value(index) << (sib >> 6) : 0;
        int32_t displacement = 0;
        if (mode() == 1) displacement = static_cast<int8_t>(at[length++]);
        if (mode() == 2) std::memcpy(&displacement, at + length, 4), length += 4;
        return reinterpret_cast<uint8_t*>(value(base) + displacement);
    }
};

void configure(const uint8_t* from) {
    demand(from[0] == 1);
    for (int t = 0; t < 8; ++t) {
        uint16_t bytes;
        std::memcpy(&bytes, from + 16 + 2 * t, sizeof(bytes));
        demand(bytes <= 64 && from[48 + t] <= 16);
        tiles[t].rows = from[48 + t], tiles[t].bytes = bytes;
        tiles[t].clear();
    }
}

// A configuration that the CPU took itself: a new one clears all tiles, none gives them back.
void follow(const uint8_t* held) {
    if (std::memcmp(held, taken, sizeof(taken)) == 0) return;
    std::memcpy(taken, held, sizeof(taken));
    if (held[0] == 1) configure(held);
    else
        for (Tile& tile : tiles) tile.rows = 0;
}

// The kernel keeps the configuration of the interrupted code, state component 17, in the frame of
// the signal, and the handler itself begins without one.
void follow_interrupted(const ucontext_t* context) {
    constexpr unsigned LEGACY_BYTES = 512, COMPONENT = 17;
    static const uint8_t NONE[64] = {};
    const auto* frame = reinterpret_cast<const uint8_t*>(context->uc_mcontext.fpregs);
    uint64_t saved;
    std::memcpy(&saved, frame + LEGACY_BYTES, sizeof(saved));
    unsigned bytes, offset, flags, rest;
    __cpuid_count(0xd, COMPONENT, bytes, offset, flags, rest);
    follow(saved >> COMPONENT & 1 && bytes == sizeof(taken) ? frame + offset : NONE);
}

float widened(const uint8_t* from) {
    const uint32_t bits = static_cast<uint32_t>(from[0] | from[1] << 8) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

// Whole numbers alone: their sums are the same in every order.
void dot(Tile& c, const Tile& a, const Tile& b, int opcode, int prefix) {
    demand(&a != &c && &b != &c && &a != &b);
    demand(a.rows == c.rows && b.bytes == c.bytes && a.bytes / 4 == b.rows && c.rows > 0);
    const bool is_float = opcode == 0x5c, b_is_signed = prefix == 3;
    demand(is_float ? prefix == 2 : prefix >= 2);
    for (int m = 0; m < c.rows; ++m)
        for (int n = 0; n < c.bytes; n += 4) {
            float floats;
            int32_t integers;
            std::memcpy(&floats, c.data[m] + n, 4), std::memcpy(&integers, c.data[m] + n, 4);
            for (int k = 0; k < a.bytes; ++k) {
                const uint8_t *x = a.data[m] + k, *w = b.data[k / 4] + n + k % 4;
                const int weight = b_is_signed ? static_cast<int8_t>(*w) : *w;
                integers += static_cast<int8_t>(*x) * weight;
                if (k % 2 == 0) floats += widened(x) * widened(w);
            }
            if (is_float) std::memcpy(c.data[m] + n, &floats, 4);
            else std::memcpy(c.data[m] + n, &integers, 4);
        }
}

void move(Tile& tile, uint8_t* memory, int64_t stride, bool is_load) {
    demand(tile.rows > 0);
    if (is_load) tile.clear();
    for (int row = 0; row < tile.rows; ++row, memory += stride)
        is_load ? std::memcpy(tile.data[row], memory, tile.bytes)
                : std::memcpy(memory, tile.data[row], tile.bytes);
}

void emulate(int, siginfo_t*, void* context) {
    greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    Instruction is{reinterpret_cast<const uint8_t*>(registers[REG_RIP]), registers};
    demand(is.at[0] == 0xc4 && (is.at[1] & 0x1f) == 2);
    int64_t stride;
    if (is.opcode() == 0x49 && is.prefix() == 0) emulates_configurations = true;
    else if (!emulates_configurations) follow_interrupted(static_cast<ucontext_t*>(context));
    if (is.opcode() == 0x49 && is.prefix() == 0 && is.mode() == 3) {
        for (Tile& tile : tiles) tile.rows = 0;
    } else if (is.opcode() == 0x49 && is.prefix() == 0) {
        configure(is.address(&stride));
    } else if (is.opcode() == 0x49 && is.prefix() == 3) {
        tiles[is.reg()].clear();
    } else if (is.opcode() == 0x4b && is.prefix() != 0) {
        // Loads are F2, and 66 with a hint for the caches; F3 stores.
        uint8_t* memory = is.address(&stride);
        move(tiles[is.reg()], memory, stride, is.prefix() != 2);
    } else {
        demand(is.opcode() == 0x5c || is.opcode() == 0x5e);
        dot(tiles[is.reg()], tiles[is.rm()], tiles[is.third()], is.opcode(), is.prefix());
    }
    registers[REG_RIP] += is.length;
}

}  // namespace

int main() {
    struct sigaction action = {};
    action.sa_sigaction = emulate;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGILL, &action, nullptr);
    const int verdict = outrider_tiles_check();
    if (!emulates_configurations) {
        alignas(64) uint8_t held[64] = {};
        _tile_storeconfig(held);
        follow(held);
    }
    for (const Tile& tile : tiles) demand(tile.rows == 0);
    _exit(verdict);
}
