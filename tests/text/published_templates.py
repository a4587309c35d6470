# SPDX-License-Identifier: Apache-2.0
"""Chat templates as published with models; `published_templates.json` says where they come from."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from pagoda.text.templates.chat_template import ChatTemplate

PUBLISHED: dict[str, str] = json.loads(
    Path(__file__).with_name("published_templates.json").read_text(encoding="utf-8")
)["templates"]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
JUDGES = ("granite3-guardian:2b", "shieldgemma:27b")
"""Models that are shown the last messages of a conversation, in a frame of their own."""


@cache
def published(name: str) -> ChatTemplate:
    return ChatTemplate(PUBLISHED[name], special_tokens=SPECIAL)
