# SPDX-License-Identifier: Apache-2.0
"""Whole fleets in virtual time: routers, schedulers and KV caches as they are, devices and wires as models."""
