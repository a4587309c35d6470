"""Tokens and blocks of each request, and the flat input of a step that is made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pagoda.backend.base import TokenBatch
from pagoda.messages.worker import SlotStart, StepPlan


def input_batch_bytes(max_num_seqs: int, max_model_len: int, block_size: int) -> int:
    """Bytes of an `InputBatch`: a token id of four bytes per place, a block id of four per block."""
    max_blocks = -(-max_model_len // block_size)
    return 4 * max_num_seqs * (max_model_len + 1 + max_blocks)


_NO_ADAPTER = -1


@dataclass
class _Slot:
    num_tokens: int
    num_computed_tokens: int
    num_blocks: int
    request_id: str
    adapter: int
    """Number of the adapter, or `_NO_ADAPTER`."""


class InputBatch:
    """Token ids and block tables by slot, in tables that are allocated once.

    Only what a slot's counts cover is ever read, and a start sets all of them, so nothing of an earlier request in
    the same slot can be seen. A plan that does not fit the slots raises ValueError.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        adapter_number: Callable[[str], int] | None = None,
    ) -> None:
        """`adapter_number` finds the number of a loaded adapter by its digest; None where there are none."""
        self._block_size = block_size
        self._adapter_number = adapter_number
        max_blocks = -(-max_model_len // block_size)
        # The last token of a full context is sampled but never computed: one more place for it.
        self._token_ids = torch.empty((max_num_seqs, max_model_len + 1), dtype=torch.int32)
        self._block_tables = torch.zeros((max_num_seqs, max_blocks), dtype=torch.int32)
        self._slots: dict[int, _Slot] = {}

    def apply(self, plan: StepPlan) -> None:
        """Frees slots, starts requests and appends blocks, as the plan says."""
        for slot in plan.freed_slots:
            self.free(slot)
        for start in plan.starts:
            self.start(start)
        for slot, block_ids in plan.new_blocks:
            self.add_blocks(slot, block_ids)

    def log_fields(self, slot: int) -> dict[str, str]:
        """Extra fields of a log line about a slot's request."""
        state = self._slots.get(slot)
        return {"request_id": "-" if state is None else state.request_id}

    def start(self, start: SlotStart) -> None:
        """Puts a request into a slot."""
        if start.slot in self._slots:
            raise ValueError(f"Slot {start.slot} is started while it is in use.")
        if not 0 <= start.slot < self._token_ids.shape[0]:
            raise ValueError(f"Slot {start.slot} does not exist.")
        num_tokens = len(start.token_ids)
        if num_tokens >= self._token_ids.shape[1]:
            raise ValueError(f"Slot {start.slot} is started with {num_tokens} tokens, too many.")
        self._token_ids[start.slot, :num_tokens] = torch.tensor(start.token_ids, dtype=torch.int32)
        adapter = self._adapter_of(start)
        self._slots[start.slot] = _Slot(
            num_tokens, start.num_computed_tokens, 0, start.request_id, adapter
        )
        self.add_blocks(start.slot, start.block_ids)

    def _adapter_of(self, start: SlotStart) -> int:
        if not start.adapter:
            return _NO_ADAPTER
        if self._adapter_number is None:
            raise ValueError(f"Slot {start.slot} is started with an adapter, but there are none.")
        return self._adapter_number(start.adapter)

    def add_blocks(self, slot: int, block_ids: list[int]) -> None:
        """Appends to a slot's block table."""
        state = self._state(slot)
        end = state.num_blocks + len(block_ids)
        if end > self._block_tables.shape[1]:
            raise ValueError(f"Slot {slot} is given {end} blocks, too many.")
        new_ids = torch.tensor(block_ids, dtype=torch.int32)
        self._block_tables[slot, state.num_blocks : end] = new_ids
        state.num_blocks = end

    def free(self, slot: int) -> None:
        """Raises ValueError when the slot is not in use."""
        self._state(slot)
        del self._slots[slot]

    def prepare(self, slots: list[int], num_tokens: list[int]) -> TokenBatch:
        """The next `num_tokens[i]` tokens of each slot."""
        computed = [self._checked(s, n) for s, n in zip(slots, num_tokens, strict=True)]
        # In Python: a step of a few tokens would take longer in calls of torch than in these loops.
        parts = list(zip(slots, computed, num_tokens, strict=True))
        positions = torch.tensor([i for _, start, n in parts for i in range(start, start + n)])
        rows = torch.tensor([slot for slot, _, n in parts for _ in range(n)])
        context_lens = [start + n for _, start, n in parts]
        max_blocks = -(-max(context_lens) // self._block_size)
        return TokenBatch(
            token_ids=self._token_ids[rows, positions].long(),
            positions=positions,
            sequence_ids=torch.tensor([i for i, n in enumerate(num_tokens) for _ in range(n)]),
            query_lens=torch.tensor(num_tokens),
            context_lens=torch.tensor(context_lens),
            block_tables=self._block_tables[slots, :max_blocks].long(),
            adapters=self._adapters(slots, num_tokens),
        )

    def _adapters(self, slots: list[int], num_tokens: list[int]) -> torch.Tensor | None:
        """Number of each token's adapter; None if no token has one."""
        numbers = [self._slots[slot].adapter for slot in slots]
        if max(numbers) == _NO_ADAPTER:
            return None
        return torch.tensor([a for a, n in zip(numbers, num_tokens, strict=True) for _ in range(n)])

    def will_sample(self, slot: int, num_tokens: int) -> bool:
        """True if computing `num_tokens` more leaves nothing to compute."""
        state = self._state(slot)
        return state.num_computed_tokens + num_tokens == state.num_tokens

    def num_computed_tokens(self, slots: list[int]) -> int:
        return sum(self._state(slot).num_computed_tokens for slot in slots)

    def advance(self, slot: int, num_tokens: int) -> None:
        """`num_tokens` more have been computed."""
        self._state(slot).num_computed_tokens += num_tokens

    def append_forced(self, plan: StepPlan) -> None:
        """Appends the tokens that grammars force."""
        for slot, token_ids in plan.forced_tokens:
            for token_id in token_ids:
                self.append(slot, token_id)

    def append(self, slot: int, token_id: int) -> None:
        state = self._state(slot)
        self._token_ids[slot, state.num_tokens] = token_id
        state.num_tokens += 1

    def _state(self, slot: int) -> _Slot:
        try:
            return self._slots[slot]
        except KeyError:
            raise ValueError(f"Slot {slot} is not in use.") from None

    def _checked(self, slot: int, num_tokens: int) -> int:
        """The slot's computed tokens, if `num_tokens` more can be computed."""
        state = self._state(slot)
        end = state.num_computed_tokens + num_tokens
        if num_tokens < 1 or end > state.num_tokens:
            raise ValueError(
                f"Slot {slot} is to compute {num_tokens} tokens and has "
                f"{state.num_tokens - state.num_computed_tokens}."
            )
        if end > state.num_blocks * self._block_size:
            raise ValueError(
                f"Slot {slot} is to hold {end} tokens in {state.num_blocks} blocks of "
                f"{self._block_size}."
            )
        return state.num_computed_tokens
