// SPDX-License-Identifier: Apache-2.0
#include "kernels_impl.h"

namespace pagoda {
extern const KernelTable kAvxVnni = kTable;
}  // namespace pagoda
