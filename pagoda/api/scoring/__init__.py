# SPDX-License-Identifier: Apache-2.0
"""Routes that answer with vectors, scores and ranks of texts."""
