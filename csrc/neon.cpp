// SPDX-License-Identifier: Apache-2.0
#include "kernels_impl.h"

namespace pagoda {
extern const KernelTable kNeon = kTable;
}  // namespace pagoda
