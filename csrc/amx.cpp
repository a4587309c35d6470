// SPDX-License-Identifier: Apache-2.0
#include "impl/tile_kernels.h"

namespace pagoda {
extern const TileKernels kAmx = kTileKernels;
}  // namespace pagoda
