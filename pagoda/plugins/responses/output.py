# SPDX-License-Identifier: Apache-2.0
"""The output of a response: items that grow with the answer, and their events.

One item is open at a time. Its events are written as it grows, and its value in the response is what the events
add up to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeGuard

from pagoda.api.answers.output_parser import AnswerDelta, ToolCallDelta
from pagoda.api.bodies.items import Item, new_id
from pagoda.plugins.responses.events import DeltaTemplate, EventWriter

Status = Literal["in_progress", "completed", "incomplete"]
Logprobs = Sequence[dict[str, Any]]


class _TextItem:
    """A message, or reasoning as it is: one content part with a text.

    Every kind of item has `begin` and `end`, which write the events of its content, `add`, and `value`, which is
    the item as it is now.
    """

    def __init__(self, place: int, writer: EventWriter | None, *, is_message: bool) -> None:
        self.is_message = is_message
        self.item_id = new_id("msg" if is_message else "rs")
        self._writer = writer
        self._place = {"item_id": self.item_id, "output_index": place, "content_index": 0}
        self._event = "response.output_text" if self.is_message else "response.reasoning_text"
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        fields = {**self._place, "logprobs": []} if self.is_message else self._place
        self._template = DeltaTemplate(f"{self._event}.delta", fields)

    def _part(self) -> dict[str, Any]:
        text = "".join(self._texts)
        if not self.is_message:
            return {"type": "reasoning_text", "text": text}
        logprobs = list(self._logprobs)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def begin(self) -> None:
        if self._writer is not None:
            part = self._part()
            self._writer.write("response.content_part.added", **self._place, part=part)

    def add(self, text: str, logprobs: Logprobs = ()) -> None:
        self._texts.append(text)
        self._logprobs += logprobs
        if self._writer is None:
            return
        if not logprobs:
            self._writer.write_delta(self._template, text)
            return
        fields = {**self._place, "delta": text, "logprobs": logprobs}
        self._writer.write(f"{self._event}.delta", **fields)

    def end(self, status: Status) -> None:
        del status
        if self._writer is None:
            return
        part = self._part()
        fields = {**self._place, "text": part["text"]}
        if self.is_message:
            fields["logprobs"] = part["logprobs"]
        self._writer.write(f"{self._event}.done", **fields)
        self._writer.write("response.content_part.done", **self._place, part=part)

    def value(self, status: Status) -> Item:
        content = [self._part()] if self._texts else []
        base: Item = {"id": self.item_id, "status": status, "content": content}
        if self.is_message:
            return {"type": "message", "role": "assistant", **base}
        return {"type": "reasoning", "summary": [], "encrypted_content": None, **base}


class _SummaryItem:
    """Reasoning whose text is sent as its summary."""

    def __init__(self, place: int, writer: EventWriter | None) -> None:
        self.item_id = new_id("rs")
        self._writer = writer
        self._place = {"item_id": self.item_id, "output_index": place, "summary_index": 0}
        self._texts: list[str] = []
        self._template = DeltaTemplate("response.reasoning_summary_text.delta", self._place)

    def _part(self) -> dict[str, Any]:
        return {"type": "summary_text", "text": "".join(self._texts)}

    def begin(self) -> None:
        if self._writer is not None:
            part = self._part()
            self._writer.write("response.reasoning_summary_part.added", **self._place, part=part)

    def add(self, text: str) -> None:
        self._texts.append(text)
        if self._writer is not None:
            self._writer.write_delta(self._template, text)

    def end(self, status: Status) -> None:
        del status
        if self._writer is not None:
            part = self._part()
            text = part["text"]
            self._writer.write("response.reasoning_summary_text.done", **self._place, text=text)
            self._writer.write("response.reasoning_summary_part.done", **self._place, part=part)

    def value(self, status: Status) -> Item:
        summary = [self._part()] if self._texts else []
        base: Item = {"id": self.item_id, "status": status, "summary": summary}
        return {"type": "reasoning", "encrypted_content": None, **base}


class _CallItem:
    """A function call."""

    def __init__(
        self,
        call: ToolCallDelta,
        call_id: str,
        place: int,
        writer: EventWriter | None,
        namespaces: Mapping[str, tuple[str, str]],
    ) -> None:
        """`namespaces` is as in `Output`."""
        self.item_id = new_id("fc")
        self.index = call.index
        self._namespace, self._name = namespaces.get(call.name or "", ("", call.name or ""))
        self._call_id = call_id
        self._writer = writer
        self._place = {"item_id": self.item_id, "output_index": place}
        self._arguments: list[str] = []
        self._template = DeltaTemplate("response.function_call_arguments.delta", self._place)

    def begin(self) -> None:
        """The event of a new item says all."""

    def add(self, arguments: str) -> None:
        self._arguments.append(arguments)
        if self._writer is not None:
            self._writer.write_delta(self._template, arguments)

    def end(self, status: Status) -> None:
        if self._writer is None or status == "incomplete":
            return
        fields = {**self._place, "name": self._name, "arguments": "".join(self._arguments)}
        self._writer.write("response.function_call_arguments.done", **fields)

    def value(self, status: Status) -> Item:
        return {
            "type": "function_call",
            "id": self.item_id,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "".join(self._arguments),
            "status": status,
            **({"namespace": self._namespace} if self._namespace else {}),
        }


class Output:
    """The items of one response."""

    def __init__(
        self,
        writer: EventWriter | None,
        new_call_id: Callable[[str, int], str],
        *,
        as_summary: bool,
        namespaces: Mapping[str, tuple[str, str]],
    ) -> None:
        """`new_call_id` makes the id of a call out of its name and index. `as_summary`: reasoning is sent as
        summaries. `namespaces` has namespace and name of functions by the name that the model writes. Without a
        `writer` no events are made."""
        self._namespaces = namespaces
        self._writer = writer
        self._new_call_id = new_call_id
        self._as_summary = as_summary
        self._done: list[Item] = []
        self._open: _TextItem | _SummaryItem | _CallItem | None = None

    @property
    def items(self) -> list[Item]:
        """The items so far."""
        return self._done + ([] if self._open is None else [self._open.value("in_progress")])

    def add(self, parts: AnswerDelta, logprobs: Logprobs = ()) -> None:
        """Adds parts of an answer; `logprobs` are those of the tokens of the content."""
        if parts.reasoning:
            self._reasoning().add(parts.reasoning)
        if parts.content:
            self._message().add(parts.content, logprobs)
        for call in parts.tool_calls:
            self._call(call)

    def end(self, *, is_cut: bool) -> list[Item]:
        """Ends the last item, and returns all. A message without text stands for an answer without parts.

        A call that was cut is left out: a client must not make it.
        """
        if self._open is None and not self._done:
            self._message().add("")
        is_cut_call = is_cut and isinstance(self._open, _CallItem)
        self._close("incomplete" if is_cut else "completed")
        if is_cut_call:
            self._done.pop()
            if not self._done:  # no event tells of it: the call has had its place
                empty = _TextItem(0, None, is_message=True)
                empty.add("")
                self._done.append(empty.value("incomplete"))
        return self._done

    def _reasoning(self) -> _TextItem | _SummaryItem:
        item = self._open
        if not (isinstance(item, _SummaryItem) or _is_reasoning(item)):
            place = self._close()
            if self._as_summary:
                item = _SummaryItem(place, self._writer)
            else:
                item = _TextItem(place, self._writer, is_message=False)
            self._begin(item)
        return item

    def _message(self) -> _TextItem:
        item = self._open
        if not (isinstance(item, _TextItem) and item.is_message):
            item = _TextItem(self._close(), self._writer, is_message=True)
            self._begin(item)
        return item

    def _call(self, piece: ToolCallDelta) -> None:
        item = self._open
        if not (isinstance(item, _CallItem) and item.index == piece.index):
            call_id = self._new_call_id(piece.name or "", piece.index)
            item = _CallItem(piece, call_id, self._close(), self._writer, self._namespaces)
            self._begin(item)
        if piece.arguments:
            item.add(piece.arguments)

    def _begin(self, item: _TextItem | _SummaryItem | _CallItem) -> None:
        self._open = item
        if self._writer is not None:
            place = len(self._done)
            value = item.value("in_progress")
            self._writer.write("response.output_item.added", output_index=place, item=value)
            item.begin()

    def _close(self, status: Status = "completed") -> int:
        """Ends the open item, if there is one; returns the place of the next item."""
        item = self._open
        if item is not None:
            item.end(status)
            place, value = len(self._done), item.value(status)
            self._done.append(value)
            self._open = None
            if self._writer is not None:
                self._writer.write("response.output_item.done", output_index=place, item=value)
        return len(self._done)


def _is_reasoning(item: object) -> TypeGuard[_TextItem]:
    return isinstance(item, _TextItem) and not item.is_message
