# SPDX-License-Identifier: Apache-2.0
"""Numbers of messages on a connection that keeps their order: the receiver finds that one was lost or came twice.

A message has its number in a frame in front of it, counted from 1 at each end.
"""

from __future__ import annotations

from collections.abc import Sequence

_NUM_BYTES = 8


class LostMessageError(Exception):
    """A message of the peer got lost, came twice or out of turn; `str` is a clause."""


class Outgoing:
    """Messages that one end sends."""

    def __init__(self) -> None:
        self._count = 0

    def frames(self, payload: bytes) -> list[bytes]:
        self._count += 1
        return [self._count.to_bytes(_NUM_BYTES, "little"), payload]


class Incoming:
    """Messages that the other end receives."""

    def __init__(self) -> None:
        self._count = 0
        self.are_numbered = False

    def payload(self, frames: Sequence[bytes]) -> bytes:
        """The message in `frames`; a peer that numbers none need not.
        Raises LostMessageError, also for all that comes behind a message that was lost."""
        *number, payload = frames
        if number:
            self.are_numbered = True
            due, came = self._count + 1, int.from_bytes(number[0], "little")
            if came != due:
                raise LostMessageError(f"sent message {came} where number {due} was due")
            self._count = due
        return payload
