# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode engines whose KV lies on devices, in processes, give the tokens of the reference.

The device of `pagoda_toy.far` copies only what is awaited, and leaves NaN where a copy was not ordered.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from handoff_engines import BLOCK_SIZE, engine_config, handed_over, short_requests

from benchmarks.pypto.serving import serve
from pagoda.messages.frontend import GenerateRequest

TOY = Path(__file__).parent.parent / "toy_backend"
REQUESTS = short_requests(
    [[(7 * at + 31 * seed) % 900 for at in range(150 - 20 * seed)] for seed in range(3)]
)


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toys are on the path of this process and of those that it starts."""
    monkeypatch.syspath_prepend(TOY)
    monkeypatch.setenv("PYTHONPATH", str(TOY), prepend=os.pathsep)


async def _check_answers(
    directory: Path,
    requests: Sequence[GenerateRequest],
    there: str,
    here: str,
    transports: str,
    **few: Any,
) -> None:
    """Backends `there` and `here` give the tokens of the reference, with KV that goes over `transports`."""
    key = directory / "key"
    key.write_bytes(os.urandom(16).hex().encode())
    prefill = engine_config(key, "prefill", transports, backend=there, **few)
    decode = engine_config(key, "decode", transports, backend=here, **few)
    expected = await serve(
        requests, "reference", **few | {"dtype": "float32", "block_size": BLOCK_SIZE}
    )
    assert await handed_over(prefill, decode, requests) == expected.answers


@pytest.mark.parametrize(("there", "here"), [("far", "far"), ("toy", "far")])
async def test_answers_are_those_of_the_reference(tmp_path: Path, there: str, here: str) -> None:
    few = {"num_kv_blocks": 64, "max_model_len": 256, "max_num_seqs": 4}
    await _check_answers(
        tmp_path, REQUESTS, there, here, "shm,tcp", max_num_batched_tokens=64, **few
    )


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("nixl", "triton")),
    reason="NIXL or Triton is not installed: pip install 'pagoda-llm[nixl,cuda]'",
)
async def test_a_network_moves_kv_of_emulated_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of these is the host's, so that NIXL itself moves it; a prompt comes in several steps."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (request,) = short_requests([[(7 * at) % 900 for at in range(34)]])
    sampling = msgspec.structs.replace(request.work.sampling, max_tokens=2)
    request = msgspec.structs.replace(
        request, work=msgspec.structs.replace(request.work, sampling=sampling)
    )
    few = {"num_kv_blocks": 16, "max_model_len": 64, "max_num_seqs": 1}
    await _check_answers(
        tmp_path, [request], "cuda", "cuda", "nixl", max_num_batched_tokens=16, **few
    )
