#include "kernels_impl.h"

namespace pagoda {
extern const KernelTable kAvx2 = kTable;
}  // namespace pagoda
