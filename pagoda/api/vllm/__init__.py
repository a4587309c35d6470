# SPDX-License-Identifier: Apache-2.0
"""Routes that vLLM's server has besides those of OpenAI, Anthropic and others."""
