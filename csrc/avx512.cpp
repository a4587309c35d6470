#include "kernels_impl.h"

namespace pagoda {
extern const KernelTable kAvx512 = kTable;
}  // namespace pagoda
