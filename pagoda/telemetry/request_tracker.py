# SPDX-License-Identifier: Apache-2.0
"""The statistics of each answer, recorded once for the log, the metrics, the traces and the live page."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from pagoda.concurrency.async_utils import LoopBudget
from pagoda.errors import (
    DeadlineError,
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    refuse,
)
from pagoda.messages.frontend import FinishReason, GenerateRequest, TokenChunk
from pagoda.telemetry.speculation import SpeculationCounts

REFUSED = "refused"
"""The finish reason of an answer that no engine accepted."""
TIMED_OUT = "timeout"
"""The finish reason of an answer that was not complete when its deadline passed."""
LOWEST_PRIORITY = -(2**31) + 1
"""The priority of requests that go before all others."""


class ClientRequest(msgspec.Struct, kw_only=True):
    """A request as the client sent it; one request may have many answers (several prompts, or `n`)."""

    id: str
    """`X-Request-Id`, or an id chosen here. Ids of the answers begin with it. Not unique: clients choose it."""
    arrived_ns: int
    """Time of the first byte, on the clock of the tracker."""
    key_name: str = ""
    """The name of the API key of the request, never the key; empty without keys."""
    model: str = ""
    """Name of the model that answers; empty for the only one of a server, or the default one."""
    weight: float = 1.0
    """The weight of that key beside others."""
    least_priority: int = LOWEST_PRIORITY
    """The lowest `priority` that the request may have, lest it go before requests of other keys."""
    timeout_s: float | None = None
    """Seconds from `arrived_ns` until the request ends, complete or not; None for no deadline."""
    traceparent: str | None = None
    """The client's span (https://www.w3.org/TR/trace-context/), if the client sent one."""
    tracestate: str | None = None
    data_parallel_rank: int | None = None
    """The replica that the client names (`GenerateRequest.data_parallel_rank`)."""
    body_id: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))
    """Id of the request that no other one has (`GenerateRequest.body`)."""
    route: str = ""
    """The route of the API, such as `/v1/completions`; empty for a request of a router."""
    budget: LoopBudget = msgspec.field(default_factory=LoopBudget)
    """The work on the body that may still be done on the event loop."""

    def time_left_s(self, now_ns: int) -> float | None:
        """Seconds that are left; None without a deadline. Raises DeadlineError: none are left."""
        if self.timeout_s is None:
            return None
        left_s = self.timeout_s - (now_ns - self.arrived_ns) / 1e9
        if left_s <= 0:
            raise DeadlineError
        return left_s

    num_body_bytes: int = 0
    """Bytes of the body, once it has been read."""
    num_answers: int = 0
    refusal: str = ""
    """The reason why one answer was refused. The other answers are aborted then: the client gets an error."""

    def check_priority(self, priority: int) -> None:
        """Raises InvalidRequestError: the request may not go before others so far."""
        if priority < self.least_priority:
            rule = f"must be {self.least_priority} or more: only keys with the scope urgent go before others"
            refuse("priority", rule)


class RequestStatistics(msgspec.Struct, kw_only=True, eq=False):
    """One answer, from the arrival of its request to the last byte. Times: nanoseconds of the tracker's clock."""

    request_id: str
    client_request: ClientRequest
    num_prompt_tokens: int
    """Tokens of the client's prompt (`GenerateRequest.num_prompt_tokens`)."""
    num_encoded_positions: int = 0
    """Positions of audio that an encoder computes, which are no tokens of a prompt, but as much work."""
    max_tokens: int
    started_ns: int
    """Time at which the request had been tokenized and checked, and went to an engine."""
    traceparent: str | None
    """Parent span of the work for this answer: the client's span, or the span that a listener made."""
    tracestate: str | None
    queue_time_s: float | None = None
    """Seconds that the answer waited for its first step, for an engine and in the engine; None until known. An
    answer that ends before its first step waited all the time."""
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    ended_ns: int | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    speculation: SpeculationCounts = msgspec.field(default_factory=SpeculationCounts)
    finish_reason: str = ""
    """`stop`, `length`, `abort`, `error`, `timeout` or `refused`; empty while the answer runs."""
    error: str = ""
    """One sentence for the finish reasons `error`, `timeout` and `refused`."""
    ending: tuple[str, str] = (str(FinishReason.ABORT), "")
    """Finish reason and error, should the answer end now."""

    @property
    def admitted_ns(self) -> int | None:
        """Time of the first step, or of the end of an answer that had none; None until known."""
        if self.queue_time_s is None:
            return None
        admitted_ns = self.started_ns + int(self.queue_time_s * 1e9)
        return min(admitted_ns, self.first_token_ns or self.ended_ns or admitted_ns)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the arrival of the request to the first token."""
        return _seconds(self.client_request.arrived_ns, self.first_token_ns)

    @property
    def prefill_s(self) -> float | None:
        """Seconds from the first step to the first token."""
        return _seconds(self.admitted_ns, self.first_token_ns)

    @property
    def decode_s(self) -> float | None:
        """Seconds from the first token to the last one."""
        return _seconds(self.first_token_ns, self.last_token_ns)

    @property
    def itl_s(self) -> float | None:
        """Mean seconds between tokens; None with fewer than two."""
        gaps, decode_s = self.num_output_tokens - 1, self.decode_s
        return None if decode_s is None or gaps < 1 else decode_s / gaps

    @property
    def duration_s(self) -> float | None:
        return _seconds(self.client_request.arrived_ns, self.ended_ns)

    def with_time_left(self, request: GenerateRequest, now_ns: int) -> GenerateRequest:
        """Returns `request` with what is left of the time that its client gave it.
        Raises DeadlineError: nothing is left."""
        left_s = self.client_request.time_left_s(now_ns)
        if left_s is None:
            return request
        return msgspec.structs.replace(request, timeout_s=left_s)

    def with_span(self, request: GenerateRequest) -> GenerateRequest:
        """Returns `request` with the parent span of this answer."""
        if (request.traceparent, request.tracestate) == (self.traceparent, self.tracestate):
            return request
        return msgspec.structs.replace(
            request, traceparent=self.traceparent, tracestate=self.tracestate
        )


def _seconds(began_ns: int | None, ended_ns: int | None) -> float | None:
    return None if began_ns is None or ended_ns is None else (ended_ns - began_ns) / 1e9


StatisticsListener = Callable[[RequestStatistics], None]
TokensListener = Callable[[RequestStatistics, int, int, bool], None]
"""Arguments: the tokens that came together, the nanoseconds that the client waited for them (since the tokens
before them, or since the arrival of the request), and whether these are the first tokens of the answer."""
DeliveryListener = Callable[[RequestStatistics, int, int, int], None]
"""Arguments: three times of a chunk: received by the frontend, turned into text, written to the client."""


class RequestTracker:
    """The one recorder of answers: keeps the statistics of running answers and tells listeners of changes.

    Listeners are called in the event loop, at once, and must not raise.
    """

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self.clock_ns = clock_ns
        self.running: dict[str, RequestStatistics] = {}
        self._running_of: dict[str, dict[str, RequestStatistics]] = {}
        self.num_tokens = 0
        self.delivery_listeners: list[DeliveryListener] = []
        """Times of deliveries are measured only while this is not empty: they cost time with each token."""
        self._start_listeners: list[StatisticsListener] = []
        self._token_listeners: list[TokensListener] = []
        self._finish_listeners: list[StatisticsListener] = []
        self._all_listeners: tuple[list[Any], ...] = (
            self._start_listeners,
            self._token_listeners,
            self._finish_listeners,
            self.delivery_listeners,
        )

    @property
    def num_listeners(self) -> int:
        return sum(map(len, self._all_listeners))

    def subscribe(
        self,
        *,
        on_start: StatisticsListener | None = None,
        on_tokens: TokensListener | None = None,
        on_finish: StatisticsListener | None = None,
        on_delivery: DeliveryListener | None = None,
    ) -> Callable[[], None]:
        """Calls the listeners until the returned function is called. Running answers are not announced again."""
        given = (on_start, on_tokens, on_finish, on_delivery)
        pairs = [pair for pair in zip(self._all_listeners, given, strict=True) if pair[1]]
        for listeners, listener in pairs:
            listeners.append(listener)

        def unsubscribe() -> None:
            for listeners, listener in pairs:
                listeners.remove(listener)

        return unsubscribe

    def running_of(self, key_name: str) -> Mapping[str, RequestStatistics]:
        """Running answers by id, oldest first, whose requests came with this API key."""
        return self._running_of.get(key_name, {})

    def longest_wait_ns(self) -> int:
        """The age of the oldest request that has no token yet; 0 without such a request."""
        now, running = self.clock_ns(), self.running.values()
        waiting = (record.client_request for record in running if record.first_token_ns is None)
        return max((now - request.arrived_ns for request in waiting), default=0)

    @contextmanager
    def answering(
        self, request: GenerateRequest, client_request: ClientRequest | None = None
    ) -> Iterator[RequestStatistics]:
        """Records an answer to `request`, until the block ends, as what `ending` says then.

        Without a `client_request` the request itself is taken as the client's.
        """
        beside = request.work.encoder_input
        record = self.start(
            request.request_id,
            client_request
            or ClientRequest(
                id=request.request_id,
                arrived_ns=self.clock_ns(),
                traceparent=request.traceparent,
                tracestate=request.tracestate,
            ),
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=request.work.sampling.max_tokens or 0,
            num_encoded_positions=0 if beside is None else beside.positions - beside.num_tokens,
        )
        try:
            yield record
        except OverloadedError as refusal:
            record.ending = REFUSED, str(refusal)
            raise
        except DeadlineError as late:
            record.ending = TIMED_OUT, str(late)
            raise
        except (EngineDeadError, InvalidRequestError) as death:
            record.ending = str(FinishReason.ERROR), str(death)
            raise
        finally:
            self.finish(record, *record.ending)

    def start(
        self,
        request_id: str,
        client_request: ClientRequest,
        *,
        num_prompt_tokens: int,
        max_tokens: int,
        num_encoded_positions: int = 0,
    ) -> RequestStatistics:
        record = RequestStatistics(
            request_id=request_id,
            client_request=client_request,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
            num_encoded_positions=num_encoded_positions,
            started_ns=self.clock_ns(),
            traceparent=client_request.traceparent,
            tracestate=client_request.tracestate,
        )
        client_request.num_answers += 1
        self.running[request_id] = record
        self._running_of.setdefault(client_request.key_name, {})[request_id] = record
        for listener in self._start_listeners:
            listener(record)
        return record

    def on_chunk(self, record: RequestStatistics, chunk: TokenChunk, num_tokens: int) -> None:
        """Records a chunk of which `num_tokens` tokens belong to the answer."""
        if chunk.queue_time_s is not None and record.first_token_ns is None:
            record.queue_time_s = chunk.queue_time_s
        if not chunk.token_ids and chunk.finish_reason is None:
            return
        record.num_cached_tokens = chunk.num_cached_tokens
        if chunk.num_drafted:
            record.speculation.count(chunk.num_drafted, chunk.num_accepted)
        if num_tokens:
            self.add_tokens(record, num_tokens, chunk.received_ns)

    def add_tokens(self, record: RequestStatistics, num_tokens: int, received_ns: int = 0) -> None:
        """Records new tokens, received at `received_ns` or now."""
        received_ns = received_ns or self.clock_ns()
        is_first = record.first_token_ns is None
        since_ns = record.last_token_ns or record.client_request.arrived_ns
        record.last_token_ns = received_ns
        if is_first:
            record.first_token_ns = received_ns
        record.num_output_tokens += num_tokens
        self.num_tokens += num_tokens
        for listener in self._token_listeners:
            listener(record, num_tokens, received_ns - since_ns, is_first)

    def finish(self, record: RequestStatistics, finish_reason: str, error: str = "") -> None:
        """Records that the client has the last byte, or will never have it. Later calls do nothing."""
        if record.finish_reason:
            return
        if finish_reason == REFUSED:
            record.client_request.refusal = error
        elif finish_reason == FinishReason.ABORT and record.client_request.refusal:
            finish_reason, error = REFUSED, record.client_request.refusal
        record.finish_reason, record.error = finish_reason, error
        record.ended_ns = self.clock_ns()
        if record.first_token_ns is None and record.queue_time_s is None:
            record.queue_time_s = (record.ended_ns - record.started_ns) / 1e9
        if self.running.get(record.request_id) is record:
            key_name = record.client_request.key_name
            del self.running[record.request_id], self._running_of[key_name][record.request_id]
            if not self._running_of[key_name]:
                del self._running_of[key_name]
        for listener in self._finish_listeners:
            listener(record)
