"""Programs that measure what Pagoda promises. Figures, not tests: nothing here is asserted."""
