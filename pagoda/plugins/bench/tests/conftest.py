# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests of commands."""

from cli_fixtures import dummy_model, own_logging

__all__ = ["dummy_model", "own_logging"]
