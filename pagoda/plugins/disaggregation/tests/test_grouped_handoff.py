# SPDX-License-Identifier: Apache-2.0
"""Handoff of models with several KV groups: what the end of a prompt needs goes over, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from group_models import grouped
from harness import make_request
from pair import PROMPT, Message, Pair, resampled

from pagoda.ipc.clock import VirtualClock
from pagoda.kv.block_keys import group_key, prefix_keys
from pagoda.kv.layout import KVLayout
from pagoda.messages.transfers import RemoteBlocks, Transfer
from pagoda.messages.worker import StepPlan
from pagoda.plugins.disaggregation.messages import KVBlocks, KVPrefilled
from pagoda.plugins.sim.executor import SimExecutor, TransferFate

GROUPED = ("window", "mixed", "chunk", "state", "all", "several")
EXACT = PROMPT[:40]
"""A prompt that fills its blocks."""


class Grouped(Pair):
    """Two engines of a model with these groups, and what the decode engine reads."""

    def __init__(self, name: str, **prefill: object) -> None:
        self.read: dict[int, list[int]] = {}
        groups = grouped(name, 4)
        self.layout = KVLayout(4, groups)
        super().__init__(
            prefill={"kv_groups": groups, "max_num_batched_tokens": 64, **prefill},
            decode={"kv_groups": groups, "transfer_fate": self._note, "wrap": self._wrap},
        )

    def _wrap(self, executor: SimExecutor, _clock: VirtualClock) -> SimExecutor:
        """Counts tokens that the decode engine computes."""
        self.num_computed, submit = 0, executor.submit

        def count(plan: StepPlan) -> None:
            self.num_computed += sum(plan.num_tokens)
            submit(plan)

        executor.submit = count  # type: ignore[method-assign]
        return executor

    def _note(self, transfer: Transfer) -> TransferFate:
        source = transfer.source
        if isinstance(source, RemoteBlocks):
            self.read.setdefault(source.group, []).extend(source.block_ids)
        return TransferFate()

    def end(self, prompt: list[int]) -> int:
        """Blocks of the prefix that is handed over."""
        return self.layout.usable((len(prompt) - 1) // 4)

    def needed(self, prompt: list[int]) -> list[int]:
        """Blocks that the end of the prefix needs, by group."""
        groups = range(len(self.layout.groups))
        return [len(self.layout.needed(group, self.end(prompt))) for group in groups]

    def num_read(self) -> list[int]:
        return [len(self.read.get(group, ())) for group in range(len(self.layout.groups))]


@pytest.mark.parametrize("prompt", [PROMPT, EXACT, EXACT[:9], EXACT[:3]], ids=len)
@pytest.mark.parametrize("name", GROUPED)
def test_what_the_end_of_the_prompt_needs_is_read(name: str, prompt: list[int]) -> None:
    pair = Grouped(name)
    request = make_request("r", prompt)
    source = pair.submit(request)
    pair.run_until(lambda: "r" in pair.prefill.finished)
    last = pair.prefill.finished["r"].kv_source
    assert last is not None
    pair.finish(request)
    assert pair.num_read() == pair.needed(prompt)
    assert len(last.block_ids) == pair.num_loaded == sum(pair.num_read())
    assert last.transfer_id == source.transfer_id
    num_told = len(pair.decode.tokens["r"]) - 1  # the first came, and the last is not computed
    assert pair.num_computed == len(prompt) - 4 * pair.end(prompt) + num_told
    assert len(pair.told(KVPrefilled)) == 1


@pytest.mark.parametrize("name", GROUPED)
def test_a_first_token_that_is_not_taken_is_sampled_anew(name: str) -> None:
    """Windows end in front of the last token, which is computed again."""
    pair = Grouped(name)
    request = make_request("r", EXACT)
    pair.fetch(request, pair.hold(resampled(request, temperature=0.5)))
    pair.finish(request)
    assert pair.num_read() == pair.needed(EXACT)
    assert pair.num_computed < 10 + len(EXACT) - 4 * pair.end(EXACT)


def test_windows_are_fetched_where_the_device_has_the_rest() -> None:
    pair = Grouped("mixed")
    before, request = make_request("before", PROMPT), make_request("r", PROMPT)
    pair.submit(before)
    pair.finish(before)
    pool = pair.decode.scheduler.kv.pool
    for key in prefix_keys(PROMPT, 4, None, 100):
        for group in (1, 2):
            pool.discard(group_key(key, group))
    pair.read.clear()
    pair.submit(request)
    pair.finish(request)
    assert pair.num_read() == [0, *pair.needed(PROMPT)[1:]]


def test_a_cached_prefix_is_not_read_again() -> None:
    pair = Grouped("mixed")
    first = make_request("first", PROMPT)
    pair.submit(first)
    pair.finish(first)
    pair.read.clear()
    longer = make_request("longer", [*PROMPT[:40], 7, 8, 9, 10, 11, 12, 13])
    pair.submit(longer)
    pair.finish(longer)
    assert pair.num_read() == [1, 1, 1]


def test_a_prompt_whose_window_cannot_be_handed_over_is_computed() -> None:
    """A request that wants the log-probabilities of its prompt reuses less than is held for it."""
    pair = Grouped("mixed")
    request = make_request("r", PROMPT)
    scored = msgspec.structs.replace(request.work.sampling, prompt_logprobs=0)
    work = msgspec.structs.replace(request.work, sampling=scored)
    pair.fetch(msgspec.structs.replace(request, work=work), pair.hold(request))
    pair.finish(request)
    assert pair.read == {}


def test_blocks_of_another_layout_end_the_fetch() -> None:
    """The other engine names a window's blocks where the prompt's end does not need them."""

    class Wrong(Grouped):
        def _remember(self, message: Message) -> Sequence[float]:
            if isinstance(message, KVBlocks):
                message.block_ids[1].append(0)
            return super()._remember(message)

    pair = Wrong("mixed")
    request = make_request("r", PROMPT)
    pair.submit(request)
    pair.finish(request)
    assert pair.read == {}
    reasons = {reason for _, reason in pair.decode.remote.complaints}
    assert reasons == {"it named other blocks than the prompt has"}


def test_news_come_while_only_windows_are_computed() -> None:
    """No block is held before the last ones, yet the other engine is told how far the prompt is."""
    pair = Grouped("window", max_num_batched_tokens=8)
    request = make_request("r", PROMPT)
    pair.submit(request)
    pair.finish(request)
    news = pair.told(KVBlocks)
    ends = [message.end for message in news]
    assert ends == sorted(set(ends))
    assert len(ends) > 4
    needed = pair.layout.needed(0, pair.end(PROMPT))
    assert [len(message.block_ids[0]) for message in news] == [
        len(range(max(first, needed.start), end))
        for first, end in zip([0, *ends[:-1]], ends, strict=True)
    ]
