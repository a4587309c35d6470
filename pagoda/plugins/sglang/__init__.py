# SPDX-License-Identifier: Apache-2.0
"""The routes that SGLang's server has of its own."""

from pagoda.api.plugin import ApiPlugin
from pagoda.plugins.sglang.routes import ROUTES

API = ApiPlugin(routes=ROUTES)
