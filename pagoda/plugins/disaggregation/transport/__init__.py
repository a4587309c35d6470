# SPDX-License-Identifier: Apache-2.0
"""Transports of KV from the workers of one engine to those of another: one small protocol, several ways."""
