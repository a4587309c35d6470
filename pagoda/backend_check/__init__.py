# SPDX-License-Identifier: Apache-2.0
"""Conformance suite of backends: `pagoda backend check NAME`, and its checks for tests of one."""
