# SPDX-License-Identifier: Apache-2.0
"""Backends: devices and the operations that a model needs of them."""
