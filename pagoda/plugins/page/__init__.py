# SPDX-License-Identifier: Apache-2.0
"""The page of a server: what it does now, a chat, and its routes."""

from pagoda.api.plugin import ApiPlugin
from pagoda.plugins.page.routes import ROUTES
from pagoda.plugins.page.state import PageState

API = ApiPlugin(routes=ROUTES, state=PageState)
