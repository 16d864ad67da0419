// Kernels of the types that most files have; see groups_add.h.
#include "groups_add.h"

namespace outrider {

const Adds* common_adds(int type) {
    switch (type) {
        case 2:
        case 34:
        case 35:
        case 41:
        case 42: return &ADDS<2>;
        case 3: return &ADDS<3>;
        case 8: return &ADDS<8>;
        case 12: return &ADDS<12>;
        case 13: return &ADDS<13>;
        case 14: return &ADDS<14>;
        default: return nullptr;
    }
}

}  // namespace outrider
