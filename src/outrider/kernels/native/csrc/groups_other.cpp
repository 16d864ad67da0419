// Kernels of the other types; see groups_add.h. Types that differ by their tables share one.
#include "groups_add.h"

namespace outrider {

const Adds* other_adds(int type) {
    switch (type) {
        case 6: return &ADDS<6>;
        case 7: return &ADDS<7>;
        case 10: return &ADDS<10>;
        case 11: return &ADDS<11>;
        case 20: return &ADDS<20>;
        case 23:
        case 16:
        case 18:
        case 19:
        case 21: return &ADDS<23>;
        case 17:
        case 22:
        case 29: return &ADDS<17>;
        case 40: return &ADDS<40>;
        case 39: return &ADDS<39>;
        case 128: return &ADDS<128>;
        case 129: return &ADDS<129>;
        case 130: return &ADDS<130>;
        case 131: return &ADDS<131>;
        case 132: return &ADDS<132>;
        default: return nullptr;
    }
}

}  // namespace outrider
