# SPDX-License-Identifier: Apache-2.0
"""One host for prompts and two for answers against three that do both, in processes of this machine."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.engines_here import Load, Server, configs
from pagoda.cli import output
from pagoda.concurrency import event_loop
from pagoda.llm.engine_options import EngineOptions
from pagoda.messages.worker_config import Role
from pagoda.plugins.simulate.records import Slo

_FLEETS = {
    "1 prefill, 2 decode": (Role.PREFILL, Role.DECODE, Role.DECODE),
    "3 both": (Role.BOTH, Role.BOTH, Role.BOTH),
}
_SHARE = 0.95
_HALVINGS = 4


def apart(
    model: str | None = None,
    *,
    prompt: int = 120,
    answer: int = 60,
    ttft_ms: float = 1000.0,
    tpot_ms: float = 10.0,
    seconds: float = 8.0,
    rate: float = 8.0,
    seqs: int = 32,
    blocks: int = 2048,
) -> None:
    """The most requests a second of which 95 % keep the limits: at first token, and for each other on average.

    Args:
        model: The model to load; by default the embedded one.
        prompt: Tokens of a prompt, on average.
        answer: Tokens of an answer, on average.
        ttft_ms: The most milliseconds to the first token.
        tpot_ms: The most milliseconds for each token behind it.
        seconds: Time for which requests come, at each rate.
        rate: Requests a second that are tried first.
        seqs: The most sequences of a host.
        blocks: KV blocks of a host.
    """
    engine = EngineOptions(threads=1, max_num_seqs=seqs, num_kv_blocks=blocks)
    limits, load = Slo(ttft_ms / 1000, tpot_ms / 1000), Load(prompt, answer)
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        config_of, name = configs(engine, model, Path(folder))
        for fleet, roles in _FLEETS.items():
            server = Server(config_of, roles)
            most, tokens_per_s = event_loop.run(_most(server, load, limits, rate, seconds))
            rows.append((fleet, f"{most:.1f}", f"{tokens_per_s:,.0f}"))
    title = f"{name}, {prompt} / {answer} tokens, {ttft_ms:g} ms and {tpot_ms:g} ms a token"
    output.stdout().print(output.table(title, ("", "requests/s", "tokens/s"), rows))


async def _most(
    server: Server, load: Load, limits: Slo, rate: float, seconds: float
) -> tuple[float, float]:
    """The highest rate that keeps the limits, and tokens a second at it; within a sixteenth."""
    try:
        await server.start()
        await server.ask(load.drawn(rate, 1.0, 7))  # warm

        async def tokens_per_s(rate: float) -> float | None:
            """Tokens a second; None where the limits are missed."""
            records = await server.ask(load.drawn(rate, seconds, 1))
            met = sum(limits.is_met(it) for it in records.requests)
            if met < _SHARE * len(records.requests):
                return None
            return sum(it.num_output_tokens for it in records.requests) / records.ended_at

        low, high, best = 0.0, rate, 0.0
        while (found := await tokens_per_s(high)) is not None:
            low, high, best = high, 2 * high, found
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            found = await tokens_per_s(middle)
            low, high, best = (low, middle, best) if found is None else (middle, high, found)
        return low, best
    finally:
        await server.close()
