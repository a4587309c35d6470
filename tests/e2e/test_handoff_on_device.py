"""Prefill and decode engines whose KV lies on devices, in processes, give the tokens of the reference.

The device of `pagoda_toy.far` copies only what is awaited, and leaves NaN where a copy was not ordered.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from handoff_engines import Answer, ask_all, engine_config, fetched, pod_of, until_free

from pagoda.frontend.engine_client import EngineClient
from pagoda.messages.frontend import GenerateRequest
from pagoda.messages.sampling_params import SamplingParams

TOY = Path(__file__).parent.parent / "toy_backend"
PROMPTS = [[(7 * at + 31 * seed) % 900 for at in range(150 - 20 * seed)] for seed in range(3)]


def requests() -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=f"r{seed}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(
                temperature=[0.0, 1.0][seed % 2], seed=seed, max_tokens=8, ignore_eos=True
            ),
        )
        for seed, prompt in enumerate(PROMPTS)
    ]


def tokens(answers: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toys are on the path of this process and of those that it starts."""
    monkeypatch.syspath_prepend(TOY)
    monkeypatch.setenv("PYTHONPATH", str(TOY), prepend=os.pathsep)


@pytest.mark.parametrize(("there", "here"), [("far", "far"), ("toy", "far")])
async def test_answers_are_those_of_the_reference(tmp_path: Path, there: str, here: str) -> None:
    key = tmp_path / "key"
    key.write_bytes(os.urandom(16).hex().encode())
    few: dict[str, Any] = {
        "num_kv_blocks": 64,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
    }
    configs = [
        engine_config(key, "prefill", backend=there, **few),
        engine_config(key, "decode", backend=here, **few),
        engine_config(key, "decode", backend="reference", **few),
    ]
    prefill, decode, alone = engines = [EngineClient(config).replica for config in configs]
    try:
        for engine in engines:
            await engine.start()
        expected = await ask_all(alone, requests(), "alone")
        async with pod_of([prefill, decode]) as pod:
            assert tokens(await ask_all(pod.dispatcher, requests(), "handed over")) == tokens(
                expected
            )
        load = await fetched(decode)
        assert load.num_loaded == sum((len(prompt) - 1) // 16 for prompt in PROMPTS)
        assert load.num_failed == 0
        await until_free(engines)
    finally:
        await asyncio.gather(*(engine.close() for engine in engines))
