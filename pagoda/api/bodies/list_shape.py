# SPDX-License-Identifier: Apache-2.0
"""The shape of APIs whose answers stand side by side in a list, and an only answer alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pagoda.api.answers.generation import AnswerShape


class WholeAnswer(AnswerShape, Protocol):
    """An answer that is an object by itself."""

    def whole(self) -> dict[str, Any]:
        """The answer in one piece, once it is complete."""
        ...


class ListShape:
    """The response to a body: an object, or a list of them."""

    def __init__(self, answers: Sequence[WholeAnswer], *, is_list: bool, end: bytes = b"") -> None:
        """`end` comes behind the events of a stream."""
        self.answers = answers
        self._is_list = is_list
        self._end = end

    def whole(self) -> Any:
        whole = [answer.whole() for answer in self.answers]
        return whole if self._is_list else whole[0]

    def end(self) -> bytes:
        return self._end
