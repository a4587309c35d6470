# SPDX-License-Identifier: Apache-2.0
"""A request of the engine's own that tells a broken machine from a request that crashes workers.

A request may crash one worker after the other: it fails, and the service goes on. Where nothing at all can be
computed any more, no request is at fault. So after some losses in a row one token is computed alone, before all
else; by a model that gives none, the vector of one token. It ends, and whoever crashed the workers is among the
requests; or it does not, and that counts against the machine.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagoda.engine.encoder_inputs import least_input
from pagoda.engine.request_queue import QUARANTINE_CRASHES
from pagoda.engine.scheduler import Scheduler
from pagoda.messages.frontend import GenerateRequest, Pooling, TokenChunk, Work
from pagoda.messages.sampling_params import SamplingParams

LOSSES_BEFORE = 3
"""Workers in a row that were lost without a finished step, after which the next one computes the canary first."""
CANARY_ID = "canary\N{NULL}"
"""No client can give this id: it would have to come in a header."""
_FIRST_OF_ALL = -(2**62)


class Canary:
    """Computes one token, or one vector, on a new worker that may not live long."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    @property
    def is_in_flight(self) -> bool:
        steps = self._scheduler.in_flight
        return any(
            part.request.request_id == CANARY_ID for step in steps for part in step.scheduled
        )

    def send(self) -> None:
        """The scheduler computes it alone, before all other requests; nothing if one is there already.
        Raises RuntimeError: the scheduler refuses it."""
        scheduler = self._scheduler
        if CANARY_ID in scheduler.requests:
            return
        gives_logits = scheduler.limits.gives_logits
        request = GenerateRequest(
            request_id=CANARY_ID,
            prompt_token_ids=[0],
            work=Work(
                SamplingParams(seed=0, max_tokens=1 if gives_logits else 0),
                pooling=None if gives_logits else Pooling.LAST,
                encoder_input=least_input(scheduler.limits),
            ),
            priority=_FIRST_OF_ALL,
        )
        for chunk in scheduler.add(request):
            if chunk.error is not None:
                raise RuntimeError(f"The canary was refused: {chunk.error}")
        added = scheduler.requests[CANARY_ID]
        added.crash_count = QUARANTINE_CRASHES
        scheduler.quarantine.requests.add(added)

    def take_back(self) -> None:
        """The worker that was to compute it is lost."""
        self._scheduler.abort(CANARY_ID)

    @staticmethod
    def without(chunks: Sequence[TokenChunk]) -> list[TokenChunk]:
        """The chunks of clients' requests."""
        return [chunk for chunk in chunks if chunk.request_id != CANARY_ID]
