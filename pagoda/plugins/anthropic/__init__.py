# SPDX-License-Identifier: Apache-2.0
"""Anthropic's Messages API: `/v1/messages` and its count of tokens."""

from pagoda.api.plugin import ApiPlugin
from pagoda.plugins.anthropic.models import VERSION_HEADER
from pagoda.plugins.anthropic.routes import MODEL_ROUTES, ROUTES

API = ApiPlugin(routes=ROUTES, header=VERSION_HEADER, header_routes=MODEL_ROUTES)
