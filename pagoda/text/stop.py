# SPDX-License-Identifier: Apache-2.0
"""Stop strings in a stream of text.

The text ends at the first character that completes a stop string; where several are completed at once, the longest
one counts. Text is held back only as long as it could still be the beginning of a stop string. The search is an
automaton over all stop strings (Aho & Corasick 1975): its state is the longest end of the text that begins a stop
string, so a character costs O(1) and the result does not depend on how the text was cut into deltas.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopHit:
    text: str
    """The text before the stop string that has not been emitted yet."""
    stop: str


class _Node:
    __slots__ = ("children", "depth", "fallback", "match")

    def __init__(self, depth: int) -> None:
        self.children: dict[str, _Node] = {}
        self.depth = depth
        self.fallback = self
        self.match: str | None = None


class StopStrings:
    """The automaton of some stop strings. Shared by all answers to one body: it may have thousands of states."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.root = root = _Node(0)
        for stop in stops:
            node = root
            for character in stop:
                if character not in node.children:
                    node.children[character] = _Node(node.depth + 1)
                node = node.children[character]
            node.match = stop
        queue = deque([root])
        while queue:
            node = queue.popleft()
            for character, child in node.children.items():
                child.fallback = root if node is root else self.next(node.fallback, character)
                child.match = child.match or child.fallback.match
                queue.append(child)

    def next(self, node: _Node, character: str) -> _Node:
        while character not in node.children and node is not self.root:
            node = node.fallback
        return node.children.get(character, self.root)


class StopMatcher:
    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._node = stops.root
        self._held = ""

    def push(self, delta: str, *, counts: bool = True) -> str | StopHit:
        """The text that can be emitted now, or the hit that ends it; nothing may follow a hit. A stop string that
        ends in a delta that does not count is none."""
        text = self._held + delta
        node = self._node
        for end, character in enumerate(delta, start=len(self._held) + 1):
            node = self._stops.next(node, character)
            if counts and node.match is not None:
                return StopHit(text=text[: end - len(node.match)], stop=node.match)
        self._node = node
        emitted = len(text) - node.depth
        self._held = text[emitted:]
        return text[:emitted]

    def flush(self) -> str:
        """The text that was held back, once no more text follows."""
        held, self._held, self._node = self._held, "", self._stops.root
        return held
