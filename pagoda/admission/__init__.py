# SPDX-License-Identifier: Apache-2.0
"""Admission to waiting queues, of engines and of the dispatchers in front of them."""
