# SPDX-License-Identifier: Apache-2.0
"""Fixed shapes of what library kernels are given: they choose their order of summation by it."""

ROWS = 16
"""Rows of a matrix product; fewer waste less on a single sequence, more waste less on many."""
