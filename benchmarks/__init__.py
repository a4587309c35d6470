# SPDX-License-Identifier: Apache-2.0
"""Programs that measure what Pagoda promises. Figures, not tests: nothing here is asserted."""
