# SPDX-License-Identifier: Apache-2.0
"""The reference backend: plain PyTorch, the specification of the others."""
