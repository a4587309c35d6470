# SPDX-License-Identifier: Apache-2.0
"""Measurements of the backend of GPUs on a card."""
