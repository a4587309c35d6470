# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import dataclasses
import gc
import threading
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_endpoint import TEXT, ScriptedEndpoint

from pagoda.concurrency.async_utils import LongWork
from pagoda.messages.frontend import FinishReason, GenerateRequest, TokenChunk, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.telemetry.request_tracker import ClientRequest, RequestTracker
from pagoda.text.draft import Draft
from pagoda.text.stop import StopStrings
from pagoda.text.templates.conversation import Message
from pagoda.text.text_generator import (
    PromptTooLongError,
    TextAssembler,
    TextDelta,
    TextGenerator,
    TextRequest,
    derive_seed,
)
from pagoda.text.tokenizers.tokenizer import Tokenizer

CLIENT_REQUEST = ClientRequest(id="test", arrived_ns=0)


def generator(answer: str = "ok") -> tuple[TextGenerator, ScriptedEndpoint]:
    endpoint = ScriptedEndpoint(answer)
    return TextGenerator(endpoint, TEXT, RequestTracker()), endpoint


async def answer_of(texts: TextGenerator, **params: object) -> tuple[str, TextDelta]:
    sampling = texts.check_sampling(SamplingParams(**params))  # type: ignore[arg-type]
    [request] = await texts.prepare("hi", sampling)
    deltas = [delta async for delta in texts.stream(request)]
    return "".join(delta.text for delta in deltas), deltas[-1]


STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
END = {"max_tokens": 50, "stop": ["END"]}


@pytest.mark.parametrize(
    ("answer", "params", "text", "reason", "stop_reason"),
    [
        pytest.param(
            "héllo", {"max_tokens": 20}, "héllo", STOP, None, id="no text of the end token"
        ),
        pytest.param("é", {"max_tokens": 1}, TEXT.tokenizer.decode([0xC3]), LENGTH, None, id="cut"),
        ("one END two", END, "one ", STOP, "END"),
        ("one END two", END | {"include_stop_str_in_output": True}, "one END", STOP, "END"),
        pytest.param("one EN", END, "one EN", STOP, None, id="what was held back"),
        ("one!two", {"max_tokens": 50, "stop_token_ids": [ord("!")]}, "one", STOP, ord("!")),
        pytest.param(
            "ababab",
            {"max_tokens": 50, "min_tokens": 3, "stop": ["ab"]},
            "ab",
            STOP,
            "ab",
            id="no stop string ends before min_tokens",
        ),
    ],
)
async def test_where_an_answer_ends(
    answer: str,
    params: dict[str, Any],
    text: str,
    reason: FinishReason,
    stop_reason: str | int | None,
) -> None:
    texts, endpoint = generator(answer)
    found, last = await answer_of(texts, **params)
    assert (found, last.finish_reason, last.stop_reason) == (text, reason, stop_reason)
    assert endpoint.requests[0].work.sampling.stop == ()
    is_cut = isinstance(stop_reason, str)
    assert endpoint.aborted == [endpoint.requests[0].request_id] * is_cut
    assert is_cut or reason is LENGTH or len(last.token_ids) == 1


async def test_seeds_are_derived_from_the_seed_and_the_index() -> None:
    texts, _ = generator()
    first = await texts.prepare("hi", SamplingParams(seed=7, n=3))
    second = await texts.prepare("hi", SamplingParams(seed=7, n=3))
    seeds = [request.request.work.sampling.seed for request in first]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3
    assert seeds == [request.request.work.sampling.seed for request in second]
    assert {request.request.work.sampling.n for request in first} == {1}
    assert len({request.request.request_id for request in first}) == 3


async def test_an_absent_seed_is_drawn() -> None:
    texts, _ = generator()
    requests = [(await texts.prepare("hi", SamplingParams()))[0].request for _ in range(2)]
    assert len({request.work.sampling.seed for request in requests} - {None}) == 2


@given(st.integers(-(2**63), 2**64 - 1), st.integers(1, 127))
def test_derived_seeds_fit_the_wire(seed: int, index: int) -> None:
    assert 0 <= derive_seed(seed, index) < 2**64
    SamplingParams(seed=derive_seed(seed, index))


async def test_max_tokens_is_resolved_against_the_context() -> None:
    texts, _ = generator()
    with pytest.raises(PromptTooLongError, match="max_tokens is 255, but only 254"):
        await texts.prepare("hi", SamplingParams(max_tokens=255))
    for max_tokens, clamps in ((None, False), (255, True)):
        params = SamplingParams(max_tokens=max_tokens)
        [text] = await texts.prepare("hi", params, Draft(clamp_max_tokens=clamps))
        assert text.request.work.sampling.max_tokens == 254


@given(
    answer=st.text(max_size=12),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=20),
    stop=st.lists(st.text(min_size=1, max_size=2), max_size=2),
)
def test_text_does_not_depend_on_how_tokens_are_chunked(
    answer: str, sizes: list[int], stop: list[str]
) -> None:
    ids = list(answer.encode())
    params = SamplingParams(stop=tuple(stop))

    def run(cut: list[list[int]]) -> tuple[str, object, int]:
        request = TextRequest(
            request=_wire(params),
            sampling=params,
            prompt=None,
            client_request=CLIENT_REQUEST,
            stops=StopStrings(params.stop) if params.stop else None,
        )
        assembler = TextAssembler(TEXT.tokenizer, request)
        text, count = "", 0
        for i, part in enumerate(cut):
            reason = FinishReason.LENGTH if i == len(cut) - 1 else None
            delta = assembler.push(TokenChunk("r", part, reason))
            text, count = text + delta.text, count + len(delta.token_ids)
            if delta.finish_reason is not None:
                return text, delta.stop_reason, count
        raise AssertionError("no chunk ended the answer")

    cut, rest = [], ids
    for size in sizes:
        cut.append(rest[:size])
        rest = rest[size:]
    assert run([*cut, rest]) == run([[i] for i in ids] + [[]])


def _wire(params: SamplingParams) -> GenerateRequest:
    return GenerateRequest(request_id="r", prompt_token_ids=[1], work=Work(params))


class BlockingTokenizer:
    """Delegates to a tokenizer, but `encode` waits for `go_on` and counts the threads in it."""

    def __init__(self, inner: Tokenizer) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self.go_on = threading.Event()
        self.num_begun = self.num_inside = self.most_inside = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        with self._lock:
            self.num_begun += 1
            self.num_inside += 1
            self.most_inside = max(self.most_inside, self.num_inside)
        self.go_on.wait(30)
        with self._lock:
            self.num_inside -= 1
        return self._inner.encode(text, add_special_tokens=add_special_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


async def test_a_client_that_hangs_up_keeps_its_place_until_the_thread_is_done() -> None:
    tokenizer = BlockingTokenizer(TEXT.tokenizer)
    text = dataclasses.replace(TEXT, tokenizer=tokenizer)  # type: ignore[arg-type]
    texts = TextGenerator(ScriptedEndpoint(max_model_len=30_000), text, RequestTracker())
    try:
        for _ in range(20):
            encoding = asyncio.create_task(texts.encode("x" * 20_000, add_special_tokens=True))
            for _ in range(5):
                await asyncio.sleep(0)
            encoding.cancel()
            await asyncio.wait([encoding])
        waiting = asyncio.create_task(texts.encode("x" * 20_000, add_special_tokens=True))
        async with asyncio.timeout(30):
            assert await asyncio.to_thread(lambda: "free") == "free", "other threads are free"
        assert tokenizer.num_begun <= 2
    finally:
        tokenizer.go_on.set()
    assert len(await waiting) == 20_000
    assert tokenizer.most_inside <= 2


class WatchedTemplate:
    """Notes the thread of each rendering."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def render(self, _messages: object, **_options: object) -> str:
        self.threads.append(threading.current_thread())
        return "prompt"


async def test_many_short_messages_are_rendered_beside_the_loop() -> None:
    template = WatchedTemplate()
    text = dataclasses.replace(TEXT, chat_template=template)  # type: ignore[arg-type]
    texts = TextGenerator(ScriptedEndpoint(), text, RequestTracker())
    for num_messages in (1, 490):
        assert await texts.render([Message("user", "x")] * num_messages) == "prompt"
    here = threading.current_thread()
    assert [thread is here for thread in template.threads] == [True, False]


async def test_long_work_is_done_in_the_order_of_its_coming() -> None:
    work, order = LongWork(1), list[int]()
    await asyncio.gather(*(work.run(partial(order.append, i)) for i in range(20)))
    assert order == list(range(20))


async def test_long_work_of_tenants_is_done_in_turn() -> None:
    work, order, begun, go_on = LongWork(1), list[str](), threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        go_on.wait(30)

    running = [asyncio.create_task(work.run(block, "heavy"))]
    await asyncio.to_thread(begun.wait, 30)
    for name in ("h1", "h2", "gone", "h3", "l1", "l2"):
        tenant = "light" if name[0] == "l" else "heavy"
        running.append(asyncio.create_task(work.run(partial(order.append, name), tenant)))
        await asyncio.sleep(0)
    gone = running.pop(3)
    gone.cancel()
    await asyncio.wait([gone])
    go_on.set()
    await asyncio.gather(*running)
    assert order == ["l1", "h1", "l2", "h2", "h3"]


async def test_a_place_is_not_lost_with_a_caller_that_is_cancelled_as_it_gets_it() -> None:
    work, begun, go_on = LongWork(1), threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        go_on.wait(30)

    running = asyncio.create_task(work.run(block))
    await asyncio.to_thread(begun.wait, 30)
    waiting = asyncio.create_task(work.run(lambda: 1))
    await asyncio.sleep(0)
    running.add_done_callback(lambda _: waiting.cancel())
    go_on.set()
    await asyncio.wait([running, waiting])
    assert await asyncio.wait_for(work.run(lambda: 2), 30) == 2


async def test_a_failure_that_nobody_waits_for_is_not_logged(caplog) -> None:
    work, begun, go_on = LongWork(1), threading.Event(), threading.Event()

    def fail() -> None:
        begun.set()
        go_on.wait(30)
        raise ValueError("nobody hears this")

    running = asyncio.create_task(work.run(fail))
    await asyncio.to_thread(begun.wait, 30)
    running.cancel()
    await asyncio.wait([running])
    go_on.set()
    assert await work.run(lambda: 1) == 1
    gc.collect()
    assert not caplog.records


async def test_what_all_answers_to_a_body_share() -> None:
    texts, _ = generator()
    sampling = texts.check_sampling(SamplingParams(stop=("abc",), n=2))
    prompt = [1, 2, 3]
    requests = [r for _ in range(3) for r in await texts.prepare(prompt, sampling)]
    assert len({id(request.stops) for request in requests}) == 1
    assert all(request.request.prompt_token_ids is prompt for request in requests)
