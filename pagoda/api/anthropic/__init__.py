# SPDX-License-Identifier: Apache-2.0
"""Anthropic's Messages API: `/v1/messages` and its count of tokens."""
