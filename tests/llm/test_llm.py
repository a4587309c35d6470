# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest

import pagoda
from pagoda import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from pagoda.errors import ConfigError, InvalidRequestError, PagodaError
from pagoda.plugins.trace.merge.chrome import read_chrome_trace
from pagoda.plugins.trace.report.reporting import report_of

OPTIONS = {"load_format": "dummy", "executor": "sim"}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, seed=1)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("qwen3-0.6b", max_num_seqs=4, max_num_waiting=4, **OPTIONS) as opened:
        yield opened


def test_results_are_spelled_as_in_vllm(llm: LLM) -> None:
    params = SamplingParams(n=2, max_tokens=5, logprobs=1, seed=3, ignore_eos=True)
    [output] = llm.generate("hi", params)
    assert (output.prompt, output.prompt_token_ids) == ("hi", [104, 105])
    assert output.finished
    first, second = output.outputs
    assert (first.index, second.index) == (0, 1)
    assert len(first.token_ids) == 5
    assert first.text == llm.get_tokenizer().decode(first.token_ids)
    assert (first.finish_reason, first.stop_reason, first.error) == ("length", None, None)
    assert first.logprobs is not None
    assert [next(iter(position)) for position in first.logprobs] == first.token_ids
    assert first.logprobs[0][first.token_ids[0]].rank == 1
    assert first.cumulative_logprob == pytest.approx(-5 * math.log(2))  # each is of probability 1/2
    assert first.token_ids != second.token_ids


@pytest.mark.parametrize(
    "prompts",
    ["ab", ["ab"], [97, 98], [[97, 98]], {"prompt": "ab"}, [{"prompt_token_ids": [97, 98]}]],
)
def test_the_kinds_of_prompts(llm: LLM, prompts: object) -> None:
    [output] = llm.generate(prompts, GREEDY)  # type: ignore[arg-type]
    assert output.prompt_token_ids == [97, 98]


def test_results_are_in_order_whatever_their_length(llm: LLM) -> None:
    params = [
        SamplingParams(max_tokens=1 + (7 * i) % 30, ignore_eos=True, seed=i) for i in range(60)
    ]
    outputs = llm.generate([[i] for i in range(60)], params)
    assert [output.prompt_token_ids for output in outputs] == [[i] for i in range(60)]
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == [param.max_tokens for param in params]


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    [one] = llm.chat(conversation, GREEDY, False)  # use_tqdm, at the place that it has in vLLM
    two = llm.chat([conversation, conversation], GREEDY)
    assert one.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert [output.outputs[0].token_ids for output in two] == [one.outputs[0].token_ids] * 2


def test_a_trace_of_some_answers(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^level must be one of e2e, kernel, verbose, got 'all'"):
        llm.start_profile("all", tmp_path)
    with pytest.raises(PagodaError, match=r"^Tracing is off\.$"):
        llm.stop_profile()
    llm.generate("before", GREEDY)
    for count in (1, 3):  # the second trace takes the place of the first
        llm.start_profile("verbose", tmp_path / "t")
        with pytest.raises(PagodaError, match=r"^Tracing is on already\.$"):
            llm.start_profile(directory=tmp_path)
        llm.generate(["hi"] * count, GREEDY)
        path = llm.stop_profile()
        assert path == tmp_path / "t" / "trace.json"
        trace = read_chrome_trace(path)
        assert [it.header.kind for it in trace.processes] == ["frontend", "engine"]
        assert len(report_of(trace).requests) == count
    llm.generate("behind", GREEDY)
    assert read_chrome_trace(path) == trace


def test_the_end_of_an_llm_ends_its_trace(tmp_path: Path) -> None:
    with LLM("qwen3-0.6b", **OPTIONS) as llm:
        llm.start_profile(directory=tmp_path)
        llm.generate("hi", GREEDY)
    assert len(report_of(read_chrome_trace(tmp_path / "trace.json")).requests) == 1


SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}, "s": {"type": "string", "maxLength": 4}},
    "required": ["n", "s"],
    "additionalProperties": False,
}
CONSTRAINTS: dict[str, Any] = {
    "json": SCHEMA,
    "regex": "(ab|cd){2,5}e",
    "choice": ["one", "two", "three"],
    "grammar": 'start: ("x" | "y") "!"',
}
PATTERNS = {"regex": CONSTRAINTS["regex"], "choice": "one|two|three", "grammar": "[xy]!"}


@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_answers_are_held_to_constraints(llm: LLM, kind: str) -> None:
    constraint = StructuredOutputsParams(**{kind: CONSTRAINTS[kind]})
    params = SamplingParams(structured_outputs=constraint, n=2, seed=5, max_tokens=600)
    conversation = [{"role": "user", "content": "hi"}]
    free = SamplingParams(max_tokens=3, seed=5, ignore_eos=True)
    outputs = [*llm.generate(["a", "b"], [params, free]), *llm.chat(conversation, params)]
    assert len(outputs.pop(1).outputs[0].token_ids) == 3
    for answer in (answer for output in outputs for answer in output.outputs):
        assert answer.finish_reason == "stop"
        if kind == "json":
            jsonschema.validate(json.loads(answer.text), SCHEMA)
        else:
            assert re.fullmatch(PATTERNS[kind], answer.text)


def test_options_of_json(llm: LLM) -> None:
    schema = {"type": "array", "items": {"const": 1}, "minItems": 3, "maxItems": 3}
    tight = {"json": json.dumps(schema), "disable_any_whitespace": True}  # a dict does as well
    wide = StructuredOutputsParams(json=schema, whitespace_pattern=r" {2}")
    gap = "( {2})?"
    spaced = gap.join((r"\[", "1", ",", "1", ",", "1", r"\]"))
    for constraint, pattern in ((tight, r"\[1,1,1\]"), (wide, spaced)):
        params = SamplingParams(structured_outputs=constraint, max_tokens=100, seed=5)  # type: ignore[arg-type]
        [output] = llm.generate("hi", params)
        answer = output.outputs[0].text
        assert re.fullmatch(pattern, answer)
        assert ("  " in answer) == (constraint is wide)


@pytest.mark.parametrize(
    ("constraint", "sentence"),
    [
        ({"regex": "a", "choice": ["b"]}, "structured_outputs.choice and regex both constrain"),
        ({"json": "{"}, "structured_outputs.json must be a JSON schema, but it is not valid JSON"),
        ({"json": {"unevaluatedItems": False}}, "structured_outputs.* unevaluatedItems"),
        ({"regex": "("}, "structured_outputs.*the regular expression"),
        ({"grammar": "start: missing"}, "structured_outputs.*missing"),
        ({"choice": []}, "structured_outputs.choice must be a list of at least one string"),
    ],
)
def test_constraints_that_are_wrong(llm: LLM, constraint: dict[str, Any], sentence: str) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**constraint))
    with pytest.raises(InvalidRequestError, match=sentence):
        llm.generate("hi", params)


def test_lists_do_as_well_as_tuples(llm: LLM) -> None:
    params = SamplingParams(stop="x", stop_token_ids=[5], allowed_token_ids=[1, 2])  # type: ignore[arg-type]
    checked = params.checked()
    assert (checked.stop, checked.stop_token_ids) == (("x",), (5,))
    assert llm.generate("hi", params)[0].finished
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize(
    ("model", "options", "num_tokens"),
    [
        pytest.param("qwen3-0.6b", {"max_model_len": 32}, 30, id="too long for the context"),
        pytest.param("anything", {"sim_vocab_size": 300, "max_model_len": 8}, 6, id="no files"),
    ],
)
def test_an_answer_as_long_as_the_context(
    model: str, options: dict[str, int], num_tokens: int
) -> None:
    with LLM(model, executor="sim", load_format="dummy", **options) as short:  # type: ignore[arg-type]
        params = SamplingParams(max_tokens=1000, ignore_eos=True)
        [output] = short.generate("hi", params)
    assert len(output.outputs[0].token_ids) == num_tokens
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("", GREEDY, "prompt is empty"),
        ([["a"]], GREEDY, "list of token ids"),
        ([[1, True]], GREEDY, "list of token ids"),
        ({"text": "x"}, GREEDY, '"prompt" or "prompt_token_ids"'),
        ([[10**6]], GREEDY, "token ids from 0 to 511"),
        (["a", "b"], [GREEDY], "sampling_params has 1 entries for 2 prompts"),
        ("a", SamplingParams(skip_special_tokens="x"), "sampling parameter"),  # type: ignore[arg-type]
        ("a", SamplingParams(temperature="hot"), r"`float`, got `str` - at `\$\.temperature`"),  # type: ignore[arg-type]
    ],
)
def test_what_does_not_fit_is_refused(
    llm: LLM, prompts: object, params: object, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompts, params)  # type: ignore[arg-type]


@pytest.mark.parametrize("messages", [[], [{"role": "", "content": "x"}], [{"role": "user"}]])
def test_conversations_that_are_none(llm: LLM, messages: list[dict[str, str]]) -> None:
    with pytest.raises(InvalidRequestError, match="messages"):
        llm.chat([messages], GREEDY)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("no such model", {}, "there is no model directory"),
        ("qwen3-0.6b", {"load_format": "x"}, "--load-format"),
        (
            "qwen3-0.6b",
            {**OPTIONS, "max_num_seqs": "many"},
            "--max-num-seqs must be int, got 'many'",
        ),
        ("qwen3-0.6b", {"max_num_seqs": 0}, "--max-num-seqs must be int >= 1, got 0"),
        ("qwen3-0.6b", {"dtype": "int3"}, "--dtype must be one of auto, float32"),
        ("qwen3-0.6b", {"load_format": "dummy", "kv_cache_memory_bytes": "x"}, "such as 2GiB"),
        ("qwen3-0.6b", {"sim_base_ms": 1.0}, "--sim-base-ms needs --executor sim"),
        ("qwen3-0.6b", {"gpus": 2}, "LLM takes no argument 'gpus'; it takes: load_format"),
        ("qwen3-0.6b", {"trust_remote_code": True}, "trust_remote_code only as False"),
        ("qwen3-0.6b", {"tokenizer": "other"}, "tokenizer only as None, got 'other'"),
        (
            "qwen3-0.6b",
            {"memory_utilization": 0.9, "gpu_memory_utilization": 0.9},
            "memory_utilization under two names",
        ),
        ("qwen3-0.6b", {**OPTIONS, "chat_template": "none.jinja"}, "--chat-template"),
    ],
)
def test_arguments_that_are_not_right(model: str, options: dict, message: str) -> None:
    before = psutil.Process().children()
    with pytest.raises(ConfigError, match=message):
        LLM(model, **options)
    assert psutil.Process().children() == before


def engines() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [child for child in children if "pagoda.engine.main" in child.cmdline()]


def test_closing_ends_the_engine() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    llm = LLM("qwen3-0.6b", **OPTIONS)
    mine = {child.pid for child in psutil.Process().children(recursive=True)} - before
    assert mine
    llm.close()
    llm.close()
    assert not any(psutil.pid_exists(pid) for pid in mine)
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("hi", GREEDY)


LIGHT = "import sys, pagoda\nprint(sorted(m for m in sys.modules if m.startswith('pagoda')))"
PLAIN = """
from pagoda import LLM, SamplingParams
llm = LLM('qwen3-0.6b', load_format='dummy', executor='sim')
[output] = llm.generate('hi', SamplingParams(max_tokens=3, ignore_eos=True))
print(len(output.outputs[0].token_ids))
"""


@pytest.mark.parametrize(
    ("script", "printed"),
    [
        pytest.param(PLAIN, "3\n", id="no guard and no close"),
        pytest.param(LIGHT, "['pagoda', 'pagoda.version']\n", id="a light package"),
    ],
)
def test_a_plain_script(script: str, printed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == (printed, "")


def test_the_names_of_the_package() -> None:
    assert pagoda.__version__
    assert set(pagoda.__all__) <= set(dir(pagoda))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        pagoda.nothing  # noqa: B018


# ---- AsyncLLM


async def test_outputs_grow() -> None:
    async with AsyncLLM("qwen3-0.6b", **OPTIONS) as llm:
        outputs = [output async for output in llm.generate("hi", GREEDY, "mine")]
        assert [output.request_id for output in outputs] == ["mine"] * 6
        assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3, 4, 5, 6]
        assert [output.finished for output in outputs] == [False] * 5 + [True]
        messages = [{"role": "user", "content": "hi"}]
        last = [output async for output in llm.chat(messages, GREEDY)][-1]
        assert last.outputs[0].finish_reason == "length"
        assert last.prompt is not None
        assert last.prompt.startswith("<|im_start|>user\nhi")


async def test_leaving_early_and_aborting() -> None:
    long = SamplingParams(max_tokens=None, ignore_eos=True, n=2)
    async with AsyncLLM("qwen3-0.6b", **OPTIONS) as llm:
        async for _ in llm.generate("hi", long, "a"):
            break
        reasons: set[str | None] = set()
        async for output in llm.generate("hi", long, "b"):
            await llm.abort("b")
            reasons = {answer.finish_reason for answer in output.outputs}
        assert reasons == {"abort"}
        await llm.abort("unknown")
        while (await llm.generator.endpoint.load()).num_running:
            await asyncio.sleep(0.01)


async def test_the_id_of_a_running_request_is_refused_and_the_request_goes_on() -> None:
    long = SamplingParams(max_tokens=None, ignore_eos=True)
    async with AsyncLLM("qwen3-0.6b", **OPTIONS) as llm:
        first = llm.generate("hi", long, "mine")
        await anext(first)
        with pytest.raises(
            InvalidRequestError, match="'mine' is that of a request that still runs"
        ):
            await anext(llm.generate("ho", long, "mine"))
        assert not (await anext(first)).finished
        await llm.abort("mine")
        last = [output async for output in first][-1]
        assert last.outputs[0].finish_reason == "abort"
        outputs = [output async for output in llm.generate("hi", GREEDY, "mine")]
        assert outputs[-1].finished


async def test_not_started() -> None:
    llm = AsyncLLM("qwen3-0.6b", **OPTIONS)
    with pytest.raises(RuntimeError, match="not started"):
        llm.get_tokenizer()
    await llm.close()


# ---- several replicas


def test_two_replicas_answer_as_one_does(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=12, seed=i, ignore_eos=True) for i in range(40)]
    prompts = [f"prompt {i}" for i in range(40)]
    alone = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    num_before = len(engines())
    with LLM(
        "qwen3-0.6b", data_parallel_size=2, data_parallel_policy="round-robin", **OPTIONS
    ) as two:
        assert [o.outputs[0].token_ids for o in two.generate(prompts, params)] == alone
        assert len(engines()) == 2 + num_before
        with pytest.raises(InvalidRequestError, match="data_parallel_size=2 wait; give several"):
            two.generate("hi", GREEDY)
        with pytest.raises(InvalidRequestError, match="or take data_parallel_size=1"):
            two.chat([{"role": "user", "content": "hi"}], GREEDY)


async def test_one_at_a_time_is_fine_for_programs_with_an_event_loop() -> None:
    async with AsyncLLM("qwen3-0.6b", data_parallel_size=2, **OPTIONS) as llm:
        *_, last = [output async for output in llm.generate("hi", GREEDY)]
        assert len(last.outputs[0].token_ids) == 6
