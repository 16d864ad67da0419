// The CPU's matrix tiles: eight registers of up to 16 rows of 64 bytes, and sums of products of two.
//
// A dot adds to every 32-bit sum C[m][n] the products A[m][k] B[k][n] over all k, where k names a
// 32-bit lane of two bfloat16 or four bytes: both sides hold their inputs in neighbouring places,
// A along its rows, B along its columns. A row of C depends on that row of A and on B alone.
//
// Everything that touches tiles goes through `tiles::`, which has two backings: AMX, where the
// compiler may use it, and plain C++ for tests (OUTRIDER_SOFTWARE_TILES), so that all the rest is
// tested on any CPU. Without either, nothing that needs tiles is compiled.
#pragma once

#include <cstdint>

namespace outrider {

constexpr int TILE_ROWS = 16, TILE_BYTES = 64, TILE_COLUMNS = 16;

// What the kernels of this folder use of the eight: sums of two row tiles by two column tiles.
// `height` rows at a time; `inner` bytes of inputs.
struct TileShapes {
    static constexpr int ROWS_0 = 4, ROWS_1 = 5, COLUMNS_0 = 6, COLUMNS_1 = 7, NUM = 8;
    int height, inner;

    int rows_of(int tile) const { return tile >= COLUMNS_0 ? inner / 4 : height; }
    int bytes_of(int tile) const { return tile == ROWS_0 || tile == ROWS_1 ? inner : TILE_BYTES; }
};

}  // namespace outrider

#if defined(OUTRIDER_SOFTWARE_TILES)
#define OUTRIDER_HAS_TILES 1
#include "tiles_software.h"
#elif defined(__linux__) && defined(__x86_64__) && defined(__AMX_TILE__) && \
    defined(__AMX_INT8__) && defined(__AMX_BF16__)
#define OUTRIDER_HAS_TILES 1
#include "tiles_amx.h"
#endif

#if defined(OUTRIDER_HAS_TILES)

namespace outrider {

// This thread's tiles, from here to the end of the scope.
class Tiles {
  public:
    explicit Tiles(TileShapes shapes) { tiles::configure(shapes); }
    ~Tiles() { tiles::release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

}  // namespace outrider

#endif
