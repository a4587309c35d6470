# SPDX-License-Identifier: Apache-2.0
"""Slots of the simulated worker: the tokens of requests and the places of their blocks."""

from __future__ import annotations

from array import array
from collections import defaultdict

from pagoda.messages.frontend import Pooling, PromptLogprobs
from pagoda.messages.worker import LostSegments, SlotStart
from pagoda.plugins.sim.model import sim_logprob, sim_token, token_by_seed

Place = tuple[str, int | bytes]
"""A kind of memory, and the number or key of a block in it."""


class SimSlot:
    """A request, as a worker keeps it."""

    def __init__(self, start: SlotStart, *, by_seed: bool = False) -> None:
        """`by_seed` is `SimConfig.answers_by_seed`."""
        self._by_seed = by_seed
        self.token_ids = list(start.token_ids)
        self.slot = start.slot
        self.block_ids = [list(block_ids) for block_ids in start.block_ids]
        self.cold: defaultdict[int, list[Place]] = defaultdict(list)
        """Leading blocks of groups that lie below the device."""
        self.lost: LostSegments | None = None
        """A cold block has gone: nothing right can be computed any more."""
        self.sampling = start.work.sampling
        self.num_computed_tokens = start.num_computed_tokens
        self.num_prompt_tokens = start.num_prompt_tokens
        self.num_told_tokens = len(start.token_ids)
        """Tokens that the stages know which do not sample."""
        self.pooling = start.work.pooling
        if self.pooling is Pooling.MEAN and start.num_computed_tokens:
            raise ValueError(
                "A prompt of which the mean is wanted is not computed from its start on."
            )
        self.draft: list[int] = []
        """The last of `token_ids`, which nobody has said."""
        self._num_scored = max(1, start.num_scored_tokens)
        self._eos_token_ids = {*start.work.eos_token_ids, *self.sampling.stop_token_ids}

    def scores(self, count: int, vocab_size: int) -> PromptLogprobs | None:
        """Log-probabilities of the prompt tokens behind the next `count` tokens, and of as many likeliest ones as
        are asked for and there are."""
        num_top, first = self.sampling.prompt_logprobs, self.num_computed_tokens + 1
        first, end = max(first, self._num_scored), min(first + count, self.num_prompt_tokens)
        if num_top is None or first >= end:
            return None
        num_top = min(num_top, vocab_size)
        logprobs, top_ids = array("f"), array("i")
        for position in range(first, end):
            token_id = self.token_ids[position]
            logprob = sim_logprob(self.token_ids[position - 1], token_id)
            logprobs.extend([logprob] * (1 + num_top))
            top_ids.extend([token_id] * num_top)
        ranks = array("i", [1] * (end - first))
        columns = (column.tobytes() for column in (ranks, top_ids, logprobs))
        return PromptLogprobs(first, num_top, *columns)

    def place(self, group: int, index: int) -> Place:
        """The place of a block."""
        cold = self.cold.get(group, ())
        return cold[index] if index < len(cold) else ("device", self.block_ids[group][index])

    def tell(self, token_id: int) -> None:
        if self.token_ids[self.num_told_tokens : self.num_told_tokens + 1] != [token_id]:
            raise ValueError(f"Token {token_id} was not what the last stage sampled.")
        self.num_told_tokens += 1

    def append_forced(self, token_ids: list[int]) -> None:
        """Takes tokens that all stages are told."""
        self.token_ids += token_ids
        self.num_told_tokens += len(token_ids)

    def take_draft(self, draft: list[int]) -> None:
        self.draft = draft
        self.token_ids += draft

    def choose(self, vocab_size: int, mask: bytes | None) -> int:
        """The next token; `mask` says which may be chosen."""
        position = len(self.token_ids) - self.num_prompt_tokens
        if self._by_seed:
            return token_by_seed(self.sampling.seed or 0, position)
        previous = self.token_ids[-1]
        token_id = sim_token(self.sampling.seed or 0, position, previous, vocab_size)
        if mask is not None:
            while not mask[token_id >> 3] >> (token_id & 7) & 1:
                token_id = (token_id + 1) % vocab_size
            return token_id
        while position < self.sampling.min_tokens and token_id in self._eos_token_ids:
            token_id = (token_id + 1) % vocab_size
        return token_id
