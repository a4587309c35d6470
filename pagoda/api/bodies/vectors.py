# SPDX-License-Identifier: Apache-2.0
"""Vectors of texts in answers, whatever API spells them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from pagoda.api.http.sse import encode_json
from pagoda.text.embeddings import Embedding

MAX_INPUTS = 2048
"""Most texts in one body, as OpenAI has it."""


async def encoded_vectors(
    found: Sequence[Embedding], spell: Callable[[Embedding], object]
) -> list[msgspec.Raw]:
    """The JSON of the vector, or the vectors, of each text, as `spell` writes it; other streams go on between long
    ones."""
    encoded = []
    for one in found:
        await asyncio.sleep(0)
        encoded.append(msgspec.Raw(encode_json(spell(one))))
    return encoded
