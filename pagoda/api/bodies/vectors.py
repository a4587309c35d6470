# SPDX-License-Identifier: Apache-2.0
"""Vectors of texts in answers, whatever API spells them."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence

import msgspec

from pagoda.api.http.sse import encode_json
from pagoda.text.embeddings import Embedding

MAX_INPUTS = 2048
"""Most texts in one body, as OpenAI has it."""


async def encoded_vectors(
    found: Sequence[Embedding], spell: Callable[[array[float]], object]
) -> list[msgspec.Raw]:
    """The JSON of each text's vector as `spell` writes it, or a list of those of its tokens; other streams go on
    between long ones."""
    encoded = []
    for one in found:
        await asyncio.sleep(0)
        encoded.append(msgspec.Raw(encode_json(_spelled(one, spell))))
    return encoded


def _spelled(found: Embedding, spell: Callable[[array[float]], object]) -> object:
    return spell(found.vector) if found.count == 1 else [spell(row) for row in found.rows]
