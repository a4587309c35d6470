"""A request inside the engine: its tokens and three numbers.

    num_tokens            prompt and output, as far as the engine has seen them
    num_scheduled_tokens  given to a step, whether or not its result has come
    num_computed_tokens   K and V are in the cache for certain

With run-ahead, a step may be planned before the sampled token of the step before is known to the engine
(the worker knows it). Such tokens are counted in `num_pending_samples`. Where the worker has several stages, the
first does not know what the last has sampled: there, a request waits for its sample, and is told of it.
"""

from __future__ import annotations

from pagoda.kv.connector import PrefixRequest
from pagoda.kv.manager import BlockTable
from pagoda.messages.frontend import GenerateRequest


class Request:
    """The scheduler's view of one `GenerateRequest`."""

    __slots__ = (
        "added_at",
        "admission",
        "eos_token_ids",
        "fetched",
        "finished",
        "kv_source",
        "load_tried",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_pending_samples",
        "num_prompt_tokens",
        "num_saved",
        "num_scheduled_tokens",
        "num_told_tokens",
        "prefix",
        "queue_time_s",
        "rank",
        "request_id",
        "runs_ahead",
        "sampling",
        "slot",
        "stop_token_ids",
        "strike_point",
        "strikes",
        "table",
        "token_ids",
        "transfer_id",
    )

    def __init__(
        self,
        message: GenerateRequest,
        *,
        arrival: int,
        table: BlockTable,
        max_model_len: int,
        runs_ahead: bool = True,
        added_at: float = 0.0,
    ) -> None:
        self.added_at = added_at
        """When it came, on the engine's clock."""
        self.queue_time_s: float | None = None
        """How long it waited for its first admission; None before it, and once it was told."""
        self.request_id = message.request_id
        self.sampling = message.sampling
        self.eos_token_ids = frozenset(message.eos_token_ids)
        self.stop_token_ids = frozenset(message.sampling.stop_token_ids)
        self.token_ids = [*message.prompt_token_ids, *message.output_token_ids]
        self.num_prompt_tokens = len(message.prompt_token_ids)
        max_tokens = message.sampling.max_tokens
        self.max_total_tokens = (
            max_model_len
            if max_tokens is None
            else min(max_model_len, self.num_prompt_tokens + max_tokens)
        )
        if message.holds_kv:
            self.max_total_tokens = min(self.max_total_tokens, self.num_tokens + 1)
        self.transfer_id: str | None = None
        """Under which its KV is held for another engine; None if it is not."""
        self.kv_source = message.kv_source
        """Whom else to ask for its KV; None once that was tried, or there is no need."""
        self.rank = (message.priority, arrival)
        """Requests are served in this order and preempted in the reverse of it."""
        self.table = table
        self.slot: int | None = None
        """The request's place in the worker while it runs; None while it waits."""
        self.admission = 0
        """Counts admissions; tells results of this one from those of one before a preemption."""
        self.num_scheduled_tokens = 0
        self.num_computed_tokens = 0
        self.num_pending_samples = 0
        self.num_told_tokens = 0
        """Tokens that all stages of the worker know, or will from plans that are made."""
        self.runs_ahead = runs_ahead
        """Whether a token may be computed before the engine knows it."""
        self.num_cached_tokens: int | None = None
        """Prefix tokens found in the cache at first admission; None before it."""
        self.prefix: PrefixRequest | None = None
        """What connectors were told of it, from when it is queued until it is admitted."""
        self.load_tried = False
        """Whether KV was loaded for it, or waited for in vain, since it was queued."""
        self.fetched = range(0)
        """Blocks that were computed elsewhere for it, and loaded."""
        self.num_saved = 0
        """Leading blocks that connectors were offered."""
        self.strikes = 0
        """Worker deaths during steps of this request, since it last got past `strike_point`."""
        self.strike_point = 0
        """How many tokens it had scheduled at its last strike."""
        self.finished = False

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_schedulable_tokens(self) -> int:
        """Tokens that the next step may compute; 0 when the last sample that counts is on its way."""
        expected = len(self.token_ids) + self.num_pending_samples
        if self.num_pending_samples and (not self.runs_ahead or expected >= self.max_total_tokens):
            return 0
        return expected - self.num_scheduled_tokens

    def lose_workers(self) -> None:
        """No step of it is under way any more, and what was offered may be gone."""
        self.forget_kv()
        self.num_pending_samples = 0
        self.num_saved = 0

    def forget_kv(self) -> None:
        """Back to a value: all tokens are kept, none is computed."""
        self.slot = None
        self.num_scheduled_tokens = 0
        self.num_computed_tokens = 0
