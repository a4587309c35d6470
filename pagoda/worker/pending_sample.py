# SPDX-License-Identifier: Apache-2.0
"""Pending samples: the sampled tokens of a step, known at once or still computed by a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from pagoda.backend.base import FutureTokens
from pagoda.messages.worker import LostSegments
from pagoda.worker.kv.segments import Streamed
from pagoda.worker.sampler import Sampled, merged


@dataclass(frozen=True)
class _OnDevice:
    """Tokens of some slots that nobody has read."""

    slots: dict[int, int]
    """Places of slots in `token_ids`."""
    token_ids: Tensor


@dataclass
class PendingSample:
    """The results of a step in parts, which are read in the end."""

    parts: list[Callable[[], Sampled]] = field(default_factory=list)
    on_device: list[_OnDevice] = field(default_factory=list)
    counts: list[Callable[[], list[int]]] = field(default_factory=list)
    """Tokens that went to each expert."""
    hidden: dict[int, Tensor] = field(default_factory=dict)
    """Hidden states [n, hidden] of each slot's tokens, for a head that drafts."""
    lost: dict[int, LostSegments] = field(default_factory=dict)
    """Slots of which a cold segment could not be read."""
    streamed_bytes: int = 0
    stream_time_s: float = 0.0

    @classmethod
    def of(cls, sampled: Sampled) -> PendingSample:
        """A pending sample that is known, for which nothing was computed."""
        return cls([lambda: sampled])

    def add(self, sampled: Sampled) -> None:
        self.parts.append(lambda: sampled)

    def add_pending(
        self, read: Callable[[], Sampled], slots: Iterable[int], token_ids: Tensor
    ) -> None:
        """Adds what `read` gives once the device has computed it; `token_ids` [slots] lie there."""
        self.parts.append(read)
        self.on_device.append(_OnDevice({slot: at for at, slot in enumerate(slots)}, token_ids))

    def note(self, streamed: Streamed, slots: Sequence[int]) -> None:
        """Notes what became of cold segments of the step's `slots`."""
        self.lost = {slots[at]: lost for at, lost in streamed.lost.items()}
        self.streamed_bytes, self.stream_time_s = streamed.num_bytes, streamed.seconds

    def read(self) -> Sampled:
        """The results, which may have to be waited for. Raises DeviceLostError: the device has failed."""
        found = [read() for read in self.parts]
        return found[0] if len(found) == 1 else merged(found)

    def expert_tokens(self, num_experts: int) -> list[int]:
        """Tokens that went to each expert, which may have to be waited for; raises what `read` does."""
        found = [read() for read in self.counts] or [[0] * num_experts]
        return found[0] if len(found) == 1 else list(map(sum, zip(*found, strict=True)))

    def future_tokens(self, rows: dict[int, int]) -> list[FutureTokens]:
        """Tokens of a step's slots that only the device knows; `rows` are the first rows of slots."""
        found = []
        for part in self.on_device:
            chosen = [slot for slot in rows if slot in part.slots]
            if chosen:
                places = [part.slots[slot] for slot in chosen]
                found.append(FutureTokens([rows[slot] for slot in chosen], part.token_ids, places))
        return found


def joined(pending_parts: Iterable[PendingSample]) -> PendingSample:
    """The pending samples of different slots together, launched in this order."""
    whole = PendingSample()
    for pending in pending_parts:
        whole.parts += pending.parts
        whole.on_device += pending.on_device
        whole.counts += pending.counts
        whole.hidden |= pending.hidden
        whole.lost |= pending.lost
        whole.streamed_bytes += pending.streamed_bytes
        whole.stream_time_s += pending.stream_time_s
    return whole
