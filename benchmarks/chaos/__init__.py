# SPDX-License-Identifier: Apache-2.0
"""The failures that a server must survive, each provoked and measured: `python -m benchmarks.chaos`."""
