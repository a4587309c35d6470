# SPDX-License-Identifier: Apache-2.0
"""Arrivals that a router recorded, from its clients to a simulation of them."""

import asyncio
import json
from pathlib import Path

import openai
import pytest
from ports import free_ports
from sim_hosts import router_process, start_host, write_key

from pagoda.cli.main import main

POOLS = "pools:\n  chat: {model: pagoda-tiny}\n  small: {model: pagoda-tiny}\n"
FLEET = "model: llama-3.1-8b\nroot: pool\nrouters: {pool: {children: {h: 2}}}\nhosts: {h: {device: l40s}}\n"
NUM_TURNS = 4


async def converse(base_url: str) -> list[int]:
    """Two sessions, whose turns begin with those before; returns the numbers of tokens of their answers."""
    client = openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="-", max_retries=0)

    async def session(name: str, first: int) -> list[int]:
        prompt, lengths = [first] * 40, []
        for turn in range(NUM_TURNS):
            answered = await client.completions.create(
                model="chat",
                prompt=prompt,
                max_tokens=16 + turn,
                extra_headers={"X-Session-ID": name},
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            tokens = answered.choices[0].token_ids  # type: ignore[attr-defined]
            prompt += tokens
            lengths.append(len(tokens))
        return lengths

    async with client:
        ignoring = {"ignore_eos": True}
        await client.completions.create(
            model="small", prompt=[7] * 5, max_tokens=3, extra_body=ignoring
        )
        answered = await asyncio.gather(session("a", 1), session("b", 2))
        return [length for lengths in answered for length in lengths]


def test_a_simulation_has_the_requests_that_a_router_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    key_file, [port] = write_key(tmp_path), free_ports(1)
    Path("pools.yaml").write_text(POOLS)
    Path("fleet.yaml").write_text(FLEET)

    async def serve() -> list[int]:
        flags = ["--cluster-key-file", str(key_file), "--pools", str(tmp_path / "pools.yaml")]
        flags += ["--record", str(tmp_path / "trace.jsonl"), "--record-block-size", "16"]
        hosts = [
            await start_host(f"127.0.0.1:{port}", key_file, name=name) for name in ("chat", "small")
        ]
        try:
            async with router_process(*flags, "--join-listen", f"127.0.0.1:{port}") as router:
                client = openai.AsyncOpenAI(base_url=f"{router.base_url}/v1", api_key="-")
                async with client:
                    while {m.id for m in (await client.models.list()).data if m.max_model_len} != {  # type: ignore[attr-defined]
                        "chat",
                        "small",
                    }:
                        await asyncio.sleep(0.05)
                return await converse(router.base_url)
        finally:
            for host in hosts:
                await host.close()

    lengths = asyncio.run(serve())
    recorded = [json.loads(line) for line in Path("trace.jsonl").read_text().splitlines()]
    chat = [it for it in recorded if it["model"] == "chat"]
    assert len(recorded) == len(chat) + 1 == 2 * NUM_TURNS + 1
    assert sorted(it["output_length"] for it in chat) == sorted(lengths)
    assert len({it["session"] for it in chat}) == 2
    words = ["simulate", "fleet.yaml", "--workload", "trace.jsonl", "--model", "chat"]
    assert main([*words, "--output", "report.json"]) == 0
    report = json.loads(Path("report.json").read_text())["all"]
    assert report["completed"] == len(chat)
    assert report["hit_rate"] > 0.3
    assert main([*words[:-1], "nobody"]) == 2
    assert "trace.jsonl has no request of 'nobody'" in capsys.readouterr().err
