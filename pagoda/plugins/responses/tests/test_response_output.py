# SPDX-License-Identifier: Apache-2.0
"""Items of a response, and their events."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pagoda.api.answers.output_parser import AnswerDelta, ToolCallDelta
from pagoda.plugins.responses.events import EventWriter
from pagoda.plugins.responses.output import Output


def new_call_id(name: str, index: int) -> str:
    return f"call_{name}_{index}"


TEXTS = st.text("aé\n", max_size=3)


@st.composite
def answers(draw: st.DrawFn) -> list[AnswerDelta]:
    """The deltas of an answer, whose parts come in any order."""
    deltas, call = [], -1
    for _ in range(draw(st.integers(0, 8))):
        pieces = []
        for _ in range(draw(st.integers(0, 2))):
            begins = call < 0 or draw(st.booleans())
            call += begins
            pieces.append(ToolCallDelta(call, "f" if begins else None, draw(TEXTS)))
        deltas.append(AnswerDelta(draw(TEXTS), draw(TEXTS), tuple(pieces)))
    return deltas


def rebuilt(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that events add up to, for a client that only adds deltas."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
            continue
        assert event["output_index"] == len(items) - 1
        item = items[-1]
        if kind == "output_item.done":
            assert {**item, "status": event["item"]["status"]} == event["item"]
            items[-1] = event["item"]
            continue
        assert event["item_id"] == item["id"]
        match kind:
            case "content_part.added":
                item["content"].append(event["part"])
            case "reasoning_summary_part.added":
                item["summary"].append(event["part"])
            case "output_text.delta" | "reasoning_text.delta":
                item["content"][event["content_index"]]["text"] += event["delta"]
            case "reasoning_summary_text.delta":
                item["summary"][event["summary_index"]]["text"] += event["delta"]
            case "function_call_arguments.delta":
                item["arguments"] += event["delta"]
            case "function_call_arguments.done":
                assert event["arguments"] == item["arguments"]
            case "content_part.done" | "reasoning_summary_part.done":
                assert event["part"] == (item.get("content") or item["summary"])[-1]
            case _:
                part = (item.get("content") or item["summary"])[-1]
                assert (kind[-5:], event["text"]) == (".done", part["text"])
    return items


@given(answers(), st.booleans(), st.booleans())
def test_the_events_of_an_answer_add_up_to_its_items(
    deltas: list[AnswerDelta], as_summary: bool, is_cut: bool
) -> None:
    encoded: list[bytes] = []
    output = Output(EventWriter(encoded.append), new_call_id, as_summary=as_summary, namespaces={})
    for delta in deltas:
        output.add(delta)
    items = output.end(is_cut=is_cut)
    events = [json.loads(event.split(b"data: ")[1]) for event in encoded]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    cut_calls = [
        event["item"]["id"]
        for event in events
        if event["type"] == "response.output_item.done"
        and (event["item"]["type"], event["item"]["status"]) == ("function_call", "incomplete")
    ]
    shown = [item for item in rebuilt(events) if item["id"] not in cut_calls]
    assert shown == (items if shown else [])
    assert all(item["status"] != "in_progress" for item in items)
    assert len(items) >= 1


@given(answers(), st.booleans())
def test_items_are_the_same_without_events(deltas: list[AnswerDelta], is_cut: bool) -> None:
    encoded: list[bytes] = []
    outputs = [
        Output(writer, new_call_id, as_summary=False, namespaces={})
        for writer in (None, EventWriter(encoded.append))
    ]
    for output in outputs:
        for delta in deltas:
            output.add(delta)
    said = [
        [{**item, "id": "", "call_id": ""} for item in output.end(is_cut=is_cut)]
        for output in outputs
    ]
    assert said[0] == said[1]
