// Whether this machine lets a process use tiles; cpu.py asks.
#include "tiles.h"

#if defined(__linux__) && defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace outrider {

namespace {

// Mirrored by `_MISSING` in cpu.py.
enum Missing { NOTHING, CPU, STATE, COMPILER };

#if defined(__linux__) && defined(__x86_64__) && !defined(OUTRIDER_SOFTWARE_TILES)

constexpr int TILE_DATA = 18;

bool cpu_has_tiles() {
    constexpr unsigned BFLOAT16 = 1u << 22, TILE = 1u << 24, INT8 = 1u << 25;
    constexpr unsigned ALL = BFLOAT16 | TILE | INT8;
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & ALL) == ALL;
}

// The operating system saves and restores the tiles of the threads that it switches.
bool state_is_kept() {
    constexpr unsigned XGETBV = 1u << 27, STATES = 3u << (TILE_DATA - 1);
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & XGETBV)) return false;
    asm volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    return (a & STATES) == STATES;
}

Missing missing() {
    if (!cpu_has_tiles()) return CPU;
    if (!state_is_kept()) return STATE;
#if defined(OUTRIDER_HAS_TILES)
    return NOTHING;
#else
    return COMPILER;
#endif
}

bool permitted() {
    constexpr int ASK_FOR_STATE = 0x1023;  // ARCH_REQ_XCOMP_PERM
    return syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA) == 0;
}

#elif defined(OUTRIDER_SOFTWARE_TILES)

Missing missing() { return NOTHING; }
bool permitted() { return true; }

#else

Missing missing() { return CPU; }
bool permitted() { return false; }

#endif

}  // namespace

}  // namespace outrider

extern "C" {

// What tiles lack here, by the CPU's own word; asking is harmless on any machine.
int outrider_tiles_missing() { return outrider::missing(); }

// Asks the kernel for tiles for all threads of this process. Only where nothing is missing.
int outrider_tiles_permit() { return outrider::permitted(); }
}
