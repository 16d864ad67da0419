// Kernels of the types that most files have; see groups_add.h.
#include "groups_add.h"

namespace outrider {

const Kernels* common_kernels(int type) {
    switch (type) {
        case 2:
        case 34:
        case 35:
        case 41:
        case 42: return &KERNELS<2>;
        case 3: return &KERNELS<3>;
        case 8: return &KERNELS<8>;
        case 12: return &KERNELS<12>;
        case 13: return &KERNELS<13>;
        case 14: return &KERNELS<14>;
        default: return nullptr;
    }
}

}  // namespace outrider
