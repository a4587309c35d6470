# SPDX-License-Identifier: Apache-2.0
"""Faults that tests inject into the processes of a server; see docs/reliability.md."""
