# SPDX-License-Identifier: Apache-2.0
"""A chat template like Qwen's, and what a model says with it."""

from __future__ import annotations

from typing import Any

from scripted_endpoint import TEXT

from pagoda.text.model_text import ModelText
from pagoda.text.templates.chat_template import ChatTemplate

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
SOURCE = (
    "{% if tools %}{{ tools | tojson }}<tool_call></tool_call>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% if opened is defined %}<think>\n{% endif %}"
)


def text(source: str | None) -> ModelText:
    template = ChatTemplate(source, special_tokens={}) if source else None
    return ModelText(TEXT.tokenizer, template, TEXT.eos_token_ids)


QWEN = text(SOURCE)
PARTS = text(
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""A template that takes the parts of a content."""


def prompt_of(api: Any) -> str:
    return bytes(api.endpoint.requests[-1].prompt_token_ids).decode()
