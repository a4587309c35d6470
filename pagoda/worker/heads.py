"""How a rank of the last stage gets to know the tokens that a step samples.

Of several tensor-parallel ranks each has the logits of a part of the vocabulary. The first one says which rows are
wanted in what way, all compute their parts together, the first samples and tells the others: so they agree by
construction, and only the first keeps what sampling needs to know.
"""

from __future__ import annotations

import logging
from typing import Protocol

import msgspec
from torch import Tensor

from pagoda.messages.worker import SlotStart
from pagoda.parallel.collectives import Collectives
from pagoda.telemetry.tracer import Tracer
from pagoda.worker.sampler import Sampled, Sampler, joined, take_likeliest

BROKE_A_STEP = "this request broke a step; the server's log says why"

_log = logging.getLogger(__name__)


class Logits(Protocol):
    """The part of a model behind its last hidden states."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[m, hidden] to [m, vocab] float32."""
        ...

    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[m, hidden] to the index of the highest logit [m], and whether all are finite [m] bool."""
        ...


class Head(Protocol):
    """Keeps what each slot's sampling needs, as far as this rank needs it."""

    def start(self, start: SlotStart) -> str | None:
        """Takes a request; returns what is wrong with it, if this can be said at once."""
        ...

    def free(self, slot: int) -> None: ...

    def choose(self, model: Logits, hidden: Tensor, rows: dict[int, int]) -> Sampled:
        """The next token of each slot from its row of hidden states [n, hidden].

        Choosing again gives the same tokens until `append` says what was drawn.
        """
        ...

    def append(self, slot: int, token_id: int) -> None:
        """The slot's answer has grown by this token."""
        ...


class OwnHead:
    """Of a rank that computes by itself."""

    def __init__(self, sampler: Sampler, tracer: Tracer) -> None:
        self._sampler = sampler
        self._tracer = tracer

    def start(self, start: SlotStart) -> str | None:
        try:
            self._sampler.start(start)
        except Exception:
            _log.exception("cannot be started", extra={"request_id": start.request_id})
            return BROKE_A_STEP
        return None

    def free(self, slot: int) -> None:
        self._sampler.free(slot)

    def choose(self, model: Logits, hidden: Tensor, rows: dict[int, int]) -> Sampled:
        ways = _ways(self._sampler, rows)
        return _sample(self._sampler, model, hidden, ways, self._tracer)

    def append(self, slot: int, token_id: int) -> None:
        self._sampler.append(slot, token_id)


class LeadingHead:
    """Of the first of the last stage's ranks, where others take part in a step."""

    def __init__(self, sampler: Sampler, group: Collectives, tracer: Tracer) -> None:
        self._own = OwnHead(sampler, tracer)
        self._sampler = sampler
        self._tracer = tracer
        self._group = group
        self._errors: dict[int, str] = {}
        """Of slots that could not be started: told to all when they come to sample, as all must compute alike."""

    def start(self, start: SlotStart) -> str | None:
        error = self._own.start(start)
        if error is not None:
            self._errors[start.slot] = error
        return None

    def free(self, slot: int) -> None:
        self._errors.pop(slot, None)
        self._own.free(slot)

    def choose(self, model: Logits, hidden: Tensor, rows: dict[int, int]) -> Sampled:
        errors = {slot: self._errors[slot] for slot in rows if slot in self._errors}
        ways = _ways(self._sampler, {s: row for s, row in rows.items() if s not in errors})
        self._group.broadcast(msgspec.msgpack.encode(ways))
        sampled = joined(
            [
                Sampled(errors=errors),
                _sample(self._sampler, model, hidden, ways, self._tracer),
            ]
        )
        told = _Told(sampled.token_ids, sampled.errors)
        self._group.broadcast(msgspec.msgpack.encode(told))
        return sampled

    def append(self, slot: int, token_id: int) -> None:
        self._own.append(slot, token_id)


class FollowingHead:
    """Of the other ranks."""

    def __init__(self, group: Collectives, tracer: Tracer) -> None:
        self._group = group
        self._tracer = tracer

    def start(self, start: SlotStart) -> str | None:
        pass

    def free(self, slot: int) -> None:
        pass

    def choose(self, model: Logits, hidden: Tensor, rows: dict[int, int]) -> Sampled:  # noqa: ARG002
        ways = msgspec.msgpack.decode(self._group.broadcast(None), type=_Ways)
        if ways.greedy:
            _greedy(model, hidden, ways, self._tracer)
        if ways.other:
            _logits(model, hidden, ways, self._tracer)
        told = msgspec.msgpack.decode(self._group.broadcast(None), type=_Told)
        return Sampled(told.token_ids, {}, told.errors)

    def append(self, slot: int, token_id: int) -> None:
        pass


class _Ways(msgspec.Struct, frozen=True, array_like=True):
    """The rows of slots of which only the likeliest token is wanted, and of the others."""

    greedy: dict[int, int]
    other: dict[int, int]


class _Told(msgspec.Struct, frozen=True, array_like=True):
    token_ids: dict[int, int]
    errors: dict[int, str]


def _ways(sampler: Sampler, rows: dict[int, int]) -> _Ways:
    other = {slot: row for slot, row in rows.items() if sampler.needs_logits(slot)}
    return _Ways({slot: row for slot, row in rows.items() if slot not in other}, other)


def _sample(
    sampler: Sampler, model: Logits, hidden: Tensor, ways: _Ways, tracer: Tracer
) -> Sampled:
    sampled = Sampled()
    if ways.greedy:
        tokens, sound = _greedy(model, hidden, ways, tracer)
        sampled = take_likeliest(list(ways.greedy), tokens, sound)
    if ways.other:
        logits = _logits(model, hidden, ways, tracer)
        began = tracer.kernel()
        sampled = joined([sampled, sampler.sample(logits, list(ways.other))])
        if began:
            tracer.span("sampler", began, {"rows": len(ways.other)})
    return sampled


def _greedy(model: Logits, hidden: Tensor, ways: _Ways, tracer: Tracer) -> tuple[Tensor, Tensor]:
    began = tracer.kernel()
    likeliest = model.greedy(hidden[list(ways.greedy.values())])
    if began:
        tracer.span("greedy", began, {"rows": len(ways.greedy)})
    return likeliest


def _logits(model: Logits, hidden: Tensor, ways: _Ways, tracer: Tracer) -> Tensor:
    began = tracer.kernel()
    logits = model.logits(hidden[list(ways.other.values())])
    if began:
        tracer.span("logits", began, {"rows": len(ways.other)})
    return logits
