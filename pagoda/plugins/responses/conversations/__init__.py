# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Conversations API: lists of items that responses go on from and add to."""
