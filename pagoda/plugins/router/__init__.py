# SPDX-License-Identifier: Apache-2.0
"""Serving over several hosts: `pagoda route`, and the flags by which servers are hosts of routers."""
