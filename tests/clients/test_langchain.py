# SPDX-License-Identifier: Apache-2.0
"""langchain-openai, with the standard integration tests that langchain has for chat models."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from conftest import Server


class Asked(ChatOpenAI):
    """Asks for one call where a test leaves the choice to the model, as SmolLM2 was trained on no tools."""

    def bind_tools(self, tools: Any, *, tool_choice: Any = None, **options: Any) -> Any:
        options.setdefault("parallel_tool_calls", False)
        return super().bind_tools(tools, tool_choice=tool_choice or "any", **options)


class TestChatModel(ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def _server(self, smollm2: Server) -> None:
        type(self).server = smollm2

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return Asked

    @property
    def chat_model_params(self) -> dict[str, Any]:
        server = self.server
        return {
            "model": server.model,
            "base_url": server.v1,
            "api_key": "none",
            "temperature": 0,
            # Without it the small model goes on in circles.
            "frequency_penalty": 0.3,
            "max_tokens": 400,
            "stream_usage": True,
        }

    @property
    def supports_image_inputs(self) -> bool:
        return False

    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def has_structured_output(self) -> bool:
        return True
