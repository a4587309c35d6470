// SPDX-License-Identifier: Apache-2.0
// Lowering of the operations of attention and of other layers that go on from what earlier tokens left in the cache.
#pragma once

#include "lowering.h"

namespace pagoda {

// Records the operation of a node; false if it is none of these.
bool lower_layer(Program& program, const Graph& graph, int index);

}  // namespace pagoda
