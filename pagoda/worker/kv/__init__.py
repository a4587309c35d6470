# SPDX-License-Identifier: Apache-2.0
"""Copies of KV blocks between the device, its tiers and other engines."""
