# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests that ask a server."""

from api_server import api, serve_api

__all__ = ["api", "serve_api"]
