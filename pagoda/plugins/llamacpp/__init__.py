# SPDX-License-Identifier: Apache-2.0
"""The API of llama.cpp's server, besides what it has in common with OpenAI's."""

from pagoda.api.plugin import ApiPlugin
from pagoda.plugins.llamacpp.routes import ROUTES

API = ApiPlugin(routes=ROUTES)
