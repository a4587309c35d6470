# SPDX-License-Identifier: Apache-2.0
"""Input items as they are kept: with ids, and with references resolved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from pagoda.api.bodies.items import Item, new_id
from pagoda.plugins.responses.bodies import Input

_MAX_ID_CHARS = 128
_ITEMS_OF_TURN = 1024
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


async def without_references(items: Sequence[Item], find: Callable[[str, str], Item]) -> list[Item]:
    """The items, with those that are named by id alone in full. `find` takes the id and the place of each; it is
    called on the event loop, where others go on between the items of a long list."""
    found = []
    for index, item in enumerate(items, start=1):
        if index % _ITEMS_OF_TURN == 0:
            await asyncio.sleep(0)
        found.append(find(item["id"], f"input[{index - 1}]") if _is_reference(item) else item)
    return found


def _is_reference(item: Item) -> bool:
    is_bare = item.get("type") is None and item.keys() <= {"id", "type"}
    return (item.get("type") == "item_reference" or is_bare) and isinstance(item.get("id"), str)


def kept_items(given: Input, items: Sequence[Item]) -> list[Item]:
    """The items of an input with all fields that a list of them shows; `given` may be a text."""
    if isinstance(given, str):
        return [_kept({"role": "user", "content": given})]
    return [_kept(item) for item in items]


def _kept(item: Item) -> Item:
    kind = item.get("type") or "message"
    item_id = item.get("id")
    if not isinstance(item_id, str) or len(item_id) > _MAX_ID_CHARS:
        item_id = new_id(_PREFIXES[kind])
    kept = {**item, "type": kind, "id": item_id, "status": item.get("status") or "completed"}
    if kind == "message" and isinstance(item.get("content"), str):
        kept["content"] = [_text_part(item)]
    if kind == "reasoning":
        kept.setdefault("summary", [])
    return kept


def _text_part(message: Item) -> dict[str, Any]:
    text = message["content"]
    if message["role"] == "assistant":
        return {"type": "output_text", "text": text, "annotations": []}
    return {"type": "input_text", "text": text}
