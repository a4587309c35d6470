# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode apart where ranks of a side hold other blocks than each other, and the other side is cut in
another way."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from handoff_engines import engine_config, handed_over
from tiny_models import continuation, make_model

from pagoda.messages.engine_config import EngineConfig
from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams

SEGMENT = 128
SIDES = {
    "one": {},
    "tensor": {"tp": 2},
    "segments": {"cp": 2},
    "own requests": {"tp": 2, "own_requests": True},
}
_RNG = random.Random(0)
PROMPTS = [_RNG.choices(range(320), k=length) for length in range(235, 63, -29)]
COUNT = 8


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("segments", "one"),
        ("tensor", "segments"),
        ("own requests", "segments"),
        ("one", "own requests"),
    ],
)
async def test_all_blocks_come_and_tokens_are_those_of_transformers(
    prefill: str, decode: str, tmp_path: Path
) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path / "model")
    key = tmp_path / "key"
    key.write_bytes(os.urandom(16).hex().encode())

    def side(role: Literal["prefill", "decode"], name: str) -> EngineConfig:
        options = {"model": tmp_path / "model", "max_model_len": 256, "num_kv_blocks": 200}
        config = engine_config(key, role, **SIDES[name], **options)
        worker = msgspec.structs.replace(config.worker, segment_tokens=SEGMENT)
        return msgspec.structs.replace(config, worker=worker)

    asked = [
        GenerateRequest(
            request_id=str(index),
            prompt_token_ids=prompt,
            work=Work(SamplingParams(temperature=0, seed=0, max_tokens=COUNT)),
        )
        for index, prompt in enumerate(PROMPTS)
    ]
    answers = await handed_over(side("prefill", prefill), side("decode", decode), asked)
    assert answers == [continuation(model, prompt, COUNT) for prompt in PROMPTS]
