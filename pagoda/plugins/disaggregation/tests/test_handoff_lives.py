# SPDX-License-Identifier: Apache-2.0
"""Whole lives of a prefill and a decode engine, between which everything goes wrong; each from one seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import Any

import msgspec
import pytest
from group_models import NAMES, grouped
from harness import VOCAB_SIZE, expected_tokens
from mortal_executor import POISON, MortalExecutor, random_request
from pair import LEASE_S, NO_KEYS, Engine, Message, Pair

from pagoda.engine.request import RequestState
from pagoda.ipc.clock import VirtualClock
from pagoda.messages.engine_config import KVTiersConfig
from pagoda.messages.frontend import FinishReason, GenerateRequest, KVSource
from pagoda.messages.transfers import RemoteBlocks, Transfer
from pagoda.messages.worker_config import Role
from pagoda.plugins.disaggregation.connector import SILENCE_S
from pagoda.plugins.disaggregation.messages import KVCheck, KVCheckResult, KVRelease
from pagoda.plugins.disaggregation.transfer_tokens import TransferTokens
from pagoda.plugins.sim.executor import SimExecutor, TransferFate

_MERCY_S = 2.0


class FaultyNetwork:
    """Messages come late, twice, in another order, or not at all; now and then none comes for seconds."""

    def __init__(self, rng: random.Random, met: Counter[str]) -> None:
        self._rng = rng
        self.met = met
        self._dropped = rng.choice([0.0, 0.0, 0.05, 0.2])
        self._repeated = rng.choice([0.0, 0.0, 0.2])
        self._late = rng.choice([0.0, 0.0, 0.2])
        self.is_silent = False

    def fate(self, message: Message) -> Sequence[float]:
        rng, kind = self._rng, type(message).__name__
        if self.is_silent:
            self.met["lost in silence"] += 1
            return ()
        if rng.random() < self._dropped:
            self.met[f"{kind} dropped"] += 1
            return ()
        delays = [rng.choice([0.0, 0.001, 0.01])]
        if rng.random() < self._late:
            self.met[f"{kind} late"] += 1
            delays = [rng.choice([0.1, 1.0, _MERCY_S - 0.1])]
        if rng.random() < self._repeated:
            self.met[f"{kind} twice"] += 1
            delays.append(rng.choice([0.0, 0.05, 1.0]))
        return delays


class Life:
    """The lives that one seed makes, and the faults that they met."""

    def __init__(self, seed: int) -> None:
        self.met: Counter[str] = Counter()
        rng = self._rng = random.Random(seed)
        self._max_model_len = rng.choice([24, 48, 64])
        self._block_size = rng.choice([1, 4, 8])
        self._groups = grouped(rng.choice(["full", "full", *NAMES]), self._block_size)
        self._fails = rng.random() < 0.15
        self._slow = rng.choice([0.0, 0.0, 0.2])
        self._is_late = rng.random() < 0.5
        self._failing = rng.choice([0.0, 0.0, 0.2])
        self._cutting = rng.choice([0.0, 0.0, 0.1])
        self._dying = rng.choice([0.0, 0.0, 0.1])
        self._documents = [
            [rng.randrange(VOCAB_SIZE) for _ in range(self._max_model_len)] for _ in range(4)
        ]
        both = rng.random() < 0.3
        self._sources: list[tuple[GenerateRequest, KVSource]] = []
        self._aborted: set[str] = set()
        self._extra = count(1000)
        network = self._network = FaultyNetwork(rng, self.met)
        pair = self._pair = Pair(
            fate=network.fate,
            prefill=self._random_options(Role.PREFILL),
            decode=self._random_options(Role.DECODE),
            fails=self._fails,
            roles=(Role.BOTH, Role.BOTH) if both else (Role.PREFILL, Role.DECODE),
            lateness=self._lateness,
        )
        for index in range(rng.randint(3, 14)):
            self._add(index)
            for _ in range(rng.choice([0, 0, 1, 3, 10, 30])):
                pair.tick()
            self._check_books()
            self._break()
        self._end()

    # ---- what there is

    def _lateness(self) -> float:
        return self._rng.choice([0.0, 0.002, 0.02, 0.2]) if self._is_late else 0.0

    def _random_options(self, role: Role) -> dict[str, Any]:
        rng = self._rng
        most_tokens = rng.choice([7, 16, 64])
        needed = sum(it.most_blocks(0, self._max_model_len, most_tokens) for it in self._groups)
        death_rate = rng.choice([0.0, 0.0, 0.5])

        def wrap(inner: SimExecutor, clock: VirtualClock) -> MortalExecutor:
            return MortalExecutor(inner, clock, rng, death_rate)

        options: dict[str, Any] = {
            "num_blocks": needed + rng.choice([0, 1, needed // 2, 3 * needed]),
            "block_size": self._block_size,
            "max_model_len": self._max_model_len,
            "max_num_seqs": rng.choice([1, 2, 8]),
            "max_num_batched_tokens": most_tokens,
            "kv_groups": self._groups,
            "num_stages": rng.choice([1, 1, 1, 2]),
            "wrap": wrap,
        }
        if role is Role.DECODE:
            options["transfer_fate"] = self._fate_of_transfer
        if rng.random() < 0.3:
            options["kv_host_slots"] = rng.choice([2, needed])
            options["kv_tiers"] = KVTiersConfig(host_bytes=1)
        return options

    def _fate_of_transfer(self, transfer: Transfer) -> TransferFate:
        rng = self._rng
        if not isinstance(transfer.source, RemoteBlocks):
            return TransferFate()
        self.met["reads"] += 1
        delay_s, failed = 0.0, ()
        if rng.random() < self._slow:
            self.met["slow reads"] += 1
            delay_s = rng.choice([0.1, 2.0, LEASE_S + 1])
        if rng.random() < self._failing:
            self.met["failed reads"] += 1
            failed = (rng.randrange(len(transfer.source.block_ids)),)
        return TransferFate(delay_s, failed)

    def _check_books(self) -> None:
        for engine in self._pair.engines:
            engine.check_books()

    # ---- requests

    def _add(self, index: int) -> None:
        rng, pair = self._rng, self._pair
        request = self._random_request(index)
        pair.requests[request.request_id] = request
        chance = rng.random()
        if chance < 0.05:
            self.met["never fetched"] += 1
            pair.hold(request)
            del pair.requests[request.request_id]
        elif chance < 0.15:
            made_up = msgspec.structs.replace(_NOBODY, address=self._pair.prefill.address)
            useless = [_NOBODY, _NONSENSE, made_up]
            source = rng.choice([*self._sources_of_others(request)[-3:], *useless])
            self.met["with a source that is of no use"] += 1
            pair.fetch(request, source)
        else:
            source = pair.hold(request)
            self._sources.append((request, source))
            for _ in range(rng.choice([0, 0, 0, 2, 20])):
                pair.tick()
            pair.fetch(request, source)

    def _random_request(self, index: int) -> GenerateRequest:
        rng, most = self._rng, self._max_model_len
        request = random_request(rng, index, most)
        if POISON in request.prompt_token_ids or rng.random() < 0.2:
            return request
        document = rng.choice(self._documents)
        prompt = document[: rng.randint(most // 3, most - 1)]
        prompt += request.prompt_token_ids[: rng.choice([0, 1, 5])]
        return msgspec.structs.replace(request, prompt_token_ids=prompt[: most - 1])

    # ---- what goes wrong

    def _break(self) -> None:
        rng, pair = self._rng, self._pair
        if rng.random() < 0.5:
            self._abort_at_decode()
        if rng.random() < 0.15:
            self._abort_at_prefill()
        if rng.random() < self._cutting:
            self.met["cut"] += 1
            pair.network.cut(pair.prefill.address)
        if rng.random() < self._cutting:
            self._be_silent()
        if rng.random() < self._cutting:
            self._stand_still()
        if rng.random() < self._dying:
            self._replace_prefill()
        if rng.random() < self._dying:
            self._replace_decode()
        self._check_books()

    def _abort_at_decode(self) -> None:
        rng, engine = self._rng, self._pair.decode
        states = self._states()
        if not states:
            return
        state = rng.choice(sorted(set(states.values())))
        victim = rng.choice(sorted(it for it, its_state in states.items() if its_state == state))
        self.met[f"aborted at decode: {state}"] += 1
        self._pair.be_late()
        engine.core.abort(victim)
        self._aborted.add(victim)
        engine.step()

    def _states(self) -> dict[str, str]:
        """State of each request of the decode engine."""
        engine = self._pair.decode
        states = {}
        for request_id, request in engine.scheduler.requests.items():
            fetch = engine.remote.fetches.get(request_id)
            if request.slot is not None:
                state = "running"
            elif request.state is RequestState.AWAITING_KV:
                state = "unanswered"
            elif request.state is RequestState.LOADING:
                state = "checking" if fetch is not None and fetch.is_read else "loading"
            else:
                state = "in line" if fetch is None else "in line, asked for"
            states[request_id] = state
        return states

    def _abort_at_prefill(self) -> None:
        engine = self._pair.prefill
        requests = engine.scheduler.requests
        if requests:
            victim = self._rng.choice(sorted(requests))
            started = requests[victim].num_computed_tokens > 0
            self.met[f"aborted at prefill, {'computed in part' if started else 'queued'}"] += 1
            engine.core.abort(victim)
            engine.step()

    def _be_silent(self) -> None:
        """The way between the engines is closed for a while, without a word."""
        self.met["silence"] += 1
        pair, self._network.is_silent = self._pair, True
        until = pair.clock.now() + self._rng.choice([1.0, SILENCE_S + 2 * _MERCY_S])
        while (at := pair.next_event_at()) is not None and at <= until:
            pair.tick()
        self._network.is_silent = False

    def _stand_still(self) -> None:
        """The decode engine does nothing for so long that what is held for it is given to others."""
        self.met["decode engine stands still"] += 1
        pair = self._pair
        until = pair.clock.now() + LEASE_S + _MERCY_S
        for number in range(3):
            document = self._rng.choice(self._documents)
            request = self._random_request(next(self._extra))
            prompt = [(token + number + 1) % VOCAB_SIZE for token in document[:-1]]
            pair.hold(msgspec.structs.replace(request, prompt_token_ids=prompt))
        while (at := pair.prefill.next_event_at()) is not None and at <= until:
            pair.clock.advance_to(at)
            pair.prefill.step()
        pair.clock.advance_to(until)

    def _replace_prefill(self) -> None:
        self.met["prefill engine replaced"] += 1
        self._count_deaths(self._pair.prefill)
        self._pair.replace_prefill()

    def _replace_decode(self) -> None:
        self.met["decode engine replaced"] += 1
        self._note(self._pair.decode)
        self._pair.replace_decode(
            lambda request: self._rng.choice([None, *self._sources_of_others(request)])
        )

    def _sources_of_others(self, request: GenerateRequest) -> list[KVSource]:
        """All but those of the same prompt, at which another token may be behind it: seeds differ."""
        prompt = request.prompt_token_ids
        return [
            it
            for other, it in self._sources
            if other.prompt_token_ids != prompt or other.request_id == request.request_id
        ]

    # ---- the end

    def _end(self) -> None:
        pair = self._pair
        pair.run_until(self._is_answered)
        answered_at = pair.clock.now()
        while (at := pair.next_event_at()) is not None and at <= answered_at + LEASE_S + _MERCY_S:
            pair.tick()
        pair.check_nothing_left()
        pair.run()
        pair.check_nothing_left()
        self._check_answers()
        self._note(pair.decode)
        self._count_deaths(pair.prefill)
        self.met["expired"] += pair.prefill.core.load().num_leases_expired
        self.met["verdict: invalid"] += sum(not it.is_valid for it in pair.told(KVCheckResult))
        self.met["checks"] += len(pair.told(KVCheck))
        self.met["done"] += len(pair.told(KVRelease))
        self.met["preempted at prefill"] += pair.prefill.scheduler.counters.num_preemptions

    def _is_answered(self) -> bool:
        return not any(engine.scheduler.requests for engine in self._pair.engines)

    def _note(self, decode: Engine) -> None:
        load = decode.core.load()
        self.met["preempted at decode"] += decode.scheduler.counters.num_preemptions
        self.met["workers lost at decode"] += load.num_worker_restarts
        self.met["blocks fetched"] += decode.remote.load_report().num_loaded
        self.met["blocks not fetched"] += decode.remote.load_report().num_failed
        for _, reason in decode.remote.complaints:
            self.met[f"complaint: {reason}"] += 1

    def _count_deaths(self, prefill: Engine) -> None:
        deaths = prefill.core.load().num_worker_restarts
        self.met["workers lost at prefill"] += deaths

    def _check_answers(self) -> None:
        harness = self._pair.decode
        for request_id, request in self._pair.requests.items():
            whole = expected_tokens(request, self._max_model_len)
            so_far = harness.tokens[request_id]
            self.met["requests"] += 1
            assert so_far == whole[: len(so_far)], request_id
            if request_id in self._aborted:
                assert request_id not in harness.finished
                continue
            last = harness.finished[request_id]
            if last.finish_reason is not FinishReason.ERROR:
                assert so_far == whole, request_id
            elif "could not be" in (last.error or ""):
                assert self._fails
                self.met["failed for want of KV"] += 1
            else:
                assert "worker died" in (last.error or "")


_NOBODY = KVSource(
    address="tcp://nobody:1",
    engine_id="e",
    transfer_id=TransferTokens(NO_KEYS).new_id("tcp://nobody:1", "e"),
)
_NONSENSE = KVSource(address="http://p/../..", engine_id="", transfer_id="x" * 10_000)


NUM_SEEDS, SEEDS_PER_TEST = 300, 25


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_PER_TEST))
def test_seeds(first: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        try:
            Life(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__} {error}") from error


FAULTS = (
    "aborted at decode: checking",
    "aborted at decode: in line",
    "aborted at decode: in line, asked for",
    "aborted at decode: loading",
    "aborted at decode: running",
    "aborted at decode: unanswered",
    "aborted at prefill, computed in part",
    "aborted at prefill, queued",
    "complaint: another engine is there now",
    "complaint: another request fetches it already",
    "complaint: it could not be read (it was not to be)",
    "complaint: it does not answer",
    "complaint: it hung up",
    "complaint: it is not held, or not any more",
    "complaint: it is of other tokens than the request's",
    "complaint: no engine with the secret of this one has made it",
    "complaint: its lease has run out",
    "complaint: its request failed or was aborted",
    "complaint: its request was preempted",
    "complaint: nobody is there",
    "complaint: nothing more of it came for 30 s",
    "complaint: the workers that held it were lost",
    "cut",
    "decode engine replaced",
    "decode engine stands still",
    "expired",
    "failed for want of KV",
    "failed reads",
    "KVBlocks dropped",
    "KVCheck late",
    "KVRelease dropped",
    "KVRelease twice",
    "KVPrefilled twice",
    "KVCheckResult late",
    "KVWelcome late",
    "never fetched",
    "preempted at decode",
    "preempted at prefill",
    "prefill engine replaced",
    "silence",
    "slow reads",
    "verdict: invalid",
    "with a source that is of no use",
    "workers lost at decode",
    "workers lost at prefill",
)


def test_the_seeds_meet_every_fault_and_fetch_all_the_same() -> None:
    met: Counter[str] = Counter()
    for seed in range(1000, 1300):
        met += Life(seed).met
        missing = [fault for fault in FAULTS if met[fault] < 3]
        if not missing and met["blocks fetched"] > 2 * met["blocks not fetched"]:
            return
    pytest.fail(f"{missing} too seldom; {met}")
