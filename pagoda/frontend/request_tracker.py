"""What becomes of each answer, as the frontend sees it: for the log, the metrics, the traces and the live page.

Counting is all that happens here; whoever wants to know more observes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from pagoda.messages.frontend import FinishReason, GenerateRequest, TokenChunk

REFUSED = "refused"
"""The finish reason of what no engine took."""


class Origin(msgspec.Struct, kw_only=True):
    """Where a request comes from."""

    name: str
    """What the client calls it (`X-Request-Id`), or what it is called here; ids of its answers begin with it."""
    arrived_ns: int
    """When its first byte was read, on the clock of the book."""
    key: str = ""
    """Which API key it came with, as operators know it; never the key itself."""
    traceparent: str | None = None
    """The client's span (https://www.w3.org/TR/trace-context/), if it has one."""
    tracestate: str | None = None
    """What comes along with it."""
    route: str = ""
    """Of the API that it asked for; empty for what comes from a router."""
    num_answers: int = 0
    """That were begun for it; the book counts them."""
    refusal: str = ""
    """Why one of its answers was refused, which ends the others: the client gets none of them."""


class RequestStatistics:
    """One answer, from its arrival to its last byte. Times are nanoseconds of the book's clock."""

    __slots__ = (
        "ended_ns",
        "error",
        "finish_reason",
        "first_token_ns",
        "last_token_ns",
        "max_tokens",
        "num_cached_tokens",
        "num_output_tokens",
        "num_prompt_tokens",
        "origin",
        "queue_time_s",
        "request_id",
        "started_ns",
        "traceparent",
        "tracestate",
    )

    def __init__(
        self,
        request_id: str,
        origin: Origin,
        *,
        num_prompt_tokens: int,
        max_tokens: int,
        started_ns: int,
    ) -> None:
        self.request_id = request_id
        self.origin = origin
        self.traceparent = origin.traceparent
        """The span that what is done for it is part of: the client's, or that of an observer which makes one."""
        self.tracestate = origin.tracestate
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.started_ns = started_ns
        """When it was tokenized and checked, and went to an engine."""
        self.queue_time_s: float | None = None
        """How long it waited before its first step: for an engine, and in it. None until that is known; of one
        that ends before it, all the time."""
        self.first_token_ns: int | None = None
        self.last_token_ns: int | None = None
        self.ended_ns: int | None = None
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason = ""
        """`stop`, `length`, `abort` or `error`; `refused` if no engine took it; empty while it runs."""
        self.error = ""
        """Why, with `error` and `refused`."""

    def carried_by(self, request: GenerateRequest) -> GenerateRequest:
        """The request with the span that it is part of now."""
        if (request.traceparent, request.tracestate) == (self.traceparent, self.tracestate):
            return request
        return msgspec.structs.replace(
            request, traceparent=self.traceparent, tracestate=self.tracestate
        )


class Growth(NamedTuple):
    """Tokens of an answer that came together."""

    num_tokens: int
    waited_ns: int
    """Since those before them came, or for the first ones since the request arrived."""
    is_first: bool


class RequestObserver(Protocol):
    """Is told of each answer, in the event loop, at once; must not raise."""

    def began(self, record: RequestStatistics) -> None: ...

    def grew(self, record: RequestStatistics, growth: Growth) -> None:
        """At `record.last_token_ns`. What is waited for the first tokens is the TTFT, for others the ITL, which
        counts once however many come together."""
        ...

    def ended(self, record: RequestStatistics) -> None: ...


class Delivery(msgspec.Struct, frozen=True):
    """Some tokens on their way from the engine to the client, on the book's clock."""

    taken_ns: int
    made_ns: int
    """They are text."""
    handed_on_ns: int
    """Whoever gives the answer to the client wants more: in a stream, the socket has them."""


class DeliveryObserver(Protocol):
    """Is told of each, in the event loop; must not raise."""

    def delivered(self, record: RequestStatistics, delivery: Delivery) -> None: ...


class RequestTracker:
    """The answers that are being given, in the order of their arrival."""

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self.clock_ns = clock_ns
        self.live: dict[str, RequestStatistics] = {}
        self.deliveries: DeliveryObserver | None = None
        """None as long as nobody wants to know: it costs time with each token."""
        self._observers: list[RequestObserver] = []

    def longest_wait_ns(self) -> int:
        """How long the request that waits longest for its first token has done so by now; 0 if none does."""
        now = self.clock_ns()
        arrivals = (r.origin.arrived_ns for r in self.live.values() if r.first_token_ns is None)
        return max((now - arrived_ns for arrived_ns in arrivals), default=0)

    def observe(self, observer: RequestObserver) -> Callable[[], None]:
        """Until the function returned is called. Answers that run already go on."""
        self._observers.append(observer)
        return partial(self._observers.remove, observer)

    def open(
        self, request_id: str, origin: Origin, *, num_prompt_tokens: int, max_tokens: int
    ) -> RequestStatistics:
        """An answer goes to an engine."""
        record = RequestStatistics(
            request_id,
            origin,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
            started_ns=self.clock_ns(),
        )
        origin.num_answers += 1
        self.live[request_id] = record
        for observer in self._observers:
            observer.began(record)
        return record

    def note(self, record: RequestStatistics, chunk: TokenChunk, num_tokens: int) -> None:
        """Takes what a chunk says; so many of its tokens are part of the answer."""
        if chunk.queue_time_s is not None and record.first_token_ns is None:
            record.queue_time_s = chunk.queue_time_s
        if chunk.is_news:
            return
        record.num_cached_tokens = chunk.num_cached_tokens
        if num_tokens:
            self.grow(record, num_tokens, chunk.received_ns)

    def grow(self, record: RequestStatistics, num_tokens: int, at_ns: int = 0) -> None:
        """New tokens came then, or now."""
        at_ns = at_ns or self.clock_ns()
        is_first = record.first_token_ns is None
        since_ns = record.last_token_ns or record.origin.arrived_ns
        record.last_token_ns = at_ns
        if is_first:
            record.first_token_ns = at_ns
        record.num_output_tokens += num_tokens
        growth = Growth(num_tokens, at_ns - since_ns, is_first)
        for observer in self._observers:
            observer.grew(record, growth)

    def close(self, record: RequestStatistics, finish_reason: str, error: str = "") -> None:
        """The client has the last byte, or will never have it. Only the first call counts."""
        if record.finish_reason:
            return
        if finish_reason == REFUSED:
            record.origin.refusal = error
        elif finish_reason == FinishReason.ABORT and record.origin.refusal:
            finish_reason, error = REFUSED, record.origin.refusal
        record.finish_reason, record.error = finish_reason, error
        record.ended_ns = self.clock_ns()
        if record.first_token_ns is None and record.queue_time_s is None:
            record.queue_time_s = (record.ended_ns - record.started_ns) / 1e9
        self.live.pop(record.request_id, None)
        for observer in self._observers:
            observer.ended(record)
