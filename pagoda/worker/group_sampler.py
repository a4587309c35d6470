"""Sampling on the ranks of the last stage.

Each of several tensor-parallel ranks has the logits of a part of the vocabulary. The first rank announces which
rows are wanted in which mode, all ranks compute their parts together, the first rank samples and broadcasts the
tokens: so ranks agree by construction, and only the first keeps the state of sampling.
"""

from __future__ import annotations

import logging
from typing import Protocol

import msgspec
from torch import Tensor

from pagoda.messages.worker import SlotStart
from pagoda.parallel.collectives import Collectives
from pagoda.telemetry.tracer import Tracer
from pagoda.worker.sampler import Sampled, Sampler, argmax_tokens, merged

BROKE_A_STEP = "this request broke a step; the server's log says why"

_log = logging.getLogger(__name__)


class Logits(Protocol):
    """The part of a model behind its last hidden states."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [m, vocab] float32 of hidden states [m, hidden]."""
        ...

    def argmax(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Indices [m] of the highest logits of hidden states [m, hidden], and a flag [m] that all are finite."""
        ...


class GroupSampler(Protocol):
    """One rank's part in sampling."""

    def start(self, start: SlotStart) -> None:
        """Takes a request; if that fails, `sample` says so."""
        ...

    def free(self, slot: int) -> None: ...

    def sample(self, model: Logits, hidden: Tensor, rows: dict[int, int]) -> Sampled:
        """The next token of each slot from its row of hidden states [n, hidden].

        Sampling again gives the same tokens until `append` adds one to a slot's answer.
        """
        ...

    def append(self, slot: int, token_id: int) -> None: ...


class LeadingSampler:
    """The only rank, or the first of several."""

    def __init__(self, sampler: Sampler, group: Collectives, tracer: Tracer) -> None:
        self._sampler = sampler
        self._tracer = tracer
        self._group = group
        self._errors: dict[int, str] = {}
        """Errors of slots that could not start; reported when they sample, as all ranks must compute alike."""

    def start(self, start: SlotStart) -> None:
        try:
            self._sampler.start(start)
        except Exception:
            _log.exception("cannot be started", extra={"request_id": start.request_id})
            self._errors[start.slot] = BROKE_A_STEP

    def free(self, slot: int) -> None:
        self._errors.pop(slot, None)
        self._sampler.free(slot)

    def sample(self, model: Logits, hidden: Tensor, rows: dict[int, int]) -> Sampled:
        errors = {slot: self._errors[slot] for slot in rows if slot in self._errors}
        modes = self._modes({slot: row for slot, row in rows.items() if slot not in errors})
        if self._group.size > 1:
            self._group.broadcast(msgspec.msgpack.encode(modes))
        parts = [Sampled(errors=errors)]
        if modes.argmax:
            tokens, finite = _argmax(model, hidden, modes, self._tracer)
            parts.append(argmax_tokens(list(modes.argmax), tokens, finite))
        if modes.logits:
            logits = _logits(model, hidden, modes, self._tracer)
            began = self._tracer.kernel()
            parts.append(self._sampler.sample(logits, list(modes.logits)))
            if began:
                self._tracer.span("sampler", began, {"rows": len(modes.logits)})
        sampled = merged(parts)
        if self._group.size > 1:
            tokens_drawn = _Drawn(sampled.token_ids, sampled.errors)
            self._group.broadcast(msgspec.msgpack.encode(tokens_drawn))
        return sampled

    def append(self, slot: int, token_id: int) -> None:
        self._sampler.append(slot, token_id)

    def _modes(self, rows: dict[int, int]) -> _SamplingModes:
        logits = {slot: row for slot, row in rows.items() if self._sampler.needs_logits(slot)}
        argmax = {slot: row for slot, row in rows.items() if slot not in logits}
        return _SamplingModes(argmax, logits)


class FollowingSampler:
    """Any other rank: computes its part of the logits and hears the tokens."""

    def __init__(self, group: Collectives, tracer: Tracer) -> None:
        self._group = group
        self._tracer = tracer

    def start(self, start: SlotStart) -> None:
        pass

    def free(self, slot: int) -> None:
        pass

    def sample(self, model: Logits, hidden: Tensor, rows: dict[int, int]) -> Sampled:  # noqa: ARG002
        modes = msgspec.msgpack.decode(self._group.broadcast(None), type=_SamplingModes)
        if modes.argmax:
            _argmax(model, hidden, modes, self._tracer)
        if modes.logits:
            _logits(model, hidden, modes, self._tracer)
        drawn = msgspec.msgpack.decode(self._group.broadcast(None), type=_Drawn)
        return Sampled(drawn.token_ids, {}, drawn.errors)

    def append(self, slot: int, token_id: int) -> None:
        pass


class _SamplingModes(msgspec.Struct, frozen=True, array_like=True):
    """Rows of hidden states by slot."""

    argmax: dict[int, int]
    """Slots that need the likeliest token only."""
    logits: dict[int, int]
    """Slots that need all logits."""


class _Drawn(msgspec.Struct, frozen=True, array_like=True):
    token_ids: dict[int, int]
    errors: dict[int, str]


def _argmax(
    model: Logits, hidden: Tensor, modes: _SamplingModes, tracer: Tracer
) -> tuple[Tensor, Tensor]:
    began = tracer.kernel()
    likeliest = model.argmax(hidden[list(modes.argmax.values())])
    if began:
        tracer.span("argmax", began, {"rows": len(modes.argmax)})
    return likeliest


def _logits(model: Logits, hidden: Tensor, modes: _SamplingModes, tracer: Tracer) -> Tensor:
    began = tracer.kernel()
    logits = model.logits(hidden[list(modes.logits.values())])
    if began:
        tracer.span("logits", began, {"rows": len(modes.logits)})
    return logits
