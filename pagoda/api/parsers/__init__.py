# SPDX-License-Identifier: Apache-2.0
"""Readers of what models write: reasoning, tool calls in the format of each family, and content."""
