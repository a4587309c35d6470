# SPDX-License-Identifier: Apache-2.0
"""Routes that vLLM's server has besides those of OpenAI, Anthropic and others."""

from pagoda.api.plugin import ApiPlugin
from pagoda.plugins.vllm.routes import ROUTES

API = ApiPlugin(routes=ROUTES)
