// Kernels of the other types; see groups_add.h. Types that differ by their tables share one.
#include "groups_add.h"

namespace outrider {

const Kernels* other_kernels(int type) {
    switch (type) {
        case 6: return &KERNELS<6>;
        case 7: return &KERNELS<7>;
        case 10: return &KERNELS<10>;
        case 11: return &KERNELS<11>;
        case 20: return &KERNELS<20>;
        case 23:
        case 16:
        case 18:
        case 19:
        case 21: return &KERNELS<23>;
        case 17:
        case 22:
        case 29: return &KERNELS<17>;
        case 40: return &KERNELS<40>;
        case 39: return &KERNELS<39>;
        case 128: return &KERNELS<128>;
        case 129: return &KERNELS<129>;
        case 130: return &KERNELS<130>;
        case 131: return &KERNELS<131>;
        case 132: return &KERNELS<132>;
        default: return nullptr;
    }
}

}  // namespace outrider
