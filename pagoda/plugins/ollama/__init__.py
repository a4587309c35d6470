# SPDX-License-Identifier: Apache-2.0
"""The API of Ollama (https://docs.ollama.com/api): chat, generate and the list of models."""

from pagoda.api.plugin import ApiPlugin
from pagoda.plugins.ollama.routes import ROUTES

API = ApiPlugin(routes=ROUTES)
