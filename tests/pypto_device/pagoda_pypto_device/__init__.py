# SPDX-License-Identifier: Apache-2.0
"""A model of the Ascend device: workers of its kernel library check all arguments and compute with `reference`."""
