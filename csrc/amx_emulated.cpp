// SPDX-License-Identifier: Apache-2.0
#define PAGODA_EMULATED_TILES
#include "impl/tile_kernels.h"

namespace pagoda {
extern const TileKernels kAmxEmulated = kTileKernels;
}  // namespace pagoda
