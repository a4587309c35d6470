# SPDX-License-Identifier: Apache-2.0
"""Decoder models: their shape, their weights and their arithmetic in terms of a backend."""
