# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.gpu [--model llama-3.1-8b]` measures what the backend of GPUs makes of the first one.

Weights are random. Each figure stands beside what was aimed at, as a share of what the card was measured to do.
Steps are measured twice: what `--no-batch-invariant` gains is what batch invariance costs.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time

from benchmarks.figure import Figure
from benchmarks.gpu.idle import GpuClock
from benchmarks.gpu.limits import Limits, measure_limits
from benchmarks.gpu.steps import Requests, attention_flops, load
from pagoda.cli import output
from pagoda.cli.options import GeneralOptions
from pagoda.cli.server_process import server_process
from pagoda.devices import BackendUnavailableError
from pagoda.errors import ConfigError
from pagoda.plugins.cuda.opening import check_device
from pagoda.worker.loading import LoadedWorker

_PROMPT, _ANSWER = 1024, 256
_LONG_PROMPT = 8192
_DTYPE_BYTES = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.1-8b", help="shape preset")
    model = parser.parse_args().model
    GeneralOptions().apply()
    try:
        check_device(0)
    except BackendUnavailableError as error:
        output.stderr().print(f"There is no GPU to measure: {error}.")
        return 2
    limits = measure_limits()
    output.stdout().print(str(limits))
    figures = [_start_up(model), *_steps(model, limits, batch_invariant=True)]
    gc.collect()  # the memory of the first model
    try:
        figures += _steps(model, limits, batch_invariant=False)
    except ConfigError as error:
        output.stderr().print(str(error))
    rows = [(f.what, f.measured, f.target, f.command) for f in figures]
    output.stdout().print(output.table("", ("what", "measured", "target", "command"), rows))
    return 0


def _figure(what: str, measured: str, target: str) -> Figure:
    return Figure(what, measured, target, "python -m benchmarks.gpu")


def _start_up(model: str) -> Figure:
    """Seconds from starting the process to its line `ready`."""
    options = [model, "--load-format", "dummy", "--backend", "cuda", "--dtype", "bfloat16"]
    began = time.perf_counter()
    with server_process(options):
        seconds = time.perf_counter() - began
    return _figure("pagoda serve to ready, dummy weights", f"{seconds:.1f} s", "≤ 15 s")


def _steps(model: str, limits: Limits, *, batch_invariant: bool) -> list[Figure]:
    """Raises ConfigError: this torch has no products that depend on the batch."""
    worker = load(
        model,
        "bfloat16",
        max_num_seqs=256,
        max_model_len=_LONG_PROMPT + _ANSWER,
        batch_invariant=batch_invariant,
    )
    requests, figures = Requests(worker, GpuClock()), []
    flag = "" if batch_invariant else ", --no-batch-invariant"
    for count in (1, 64, 256):
        requests.prefill(count, _PROMPT, 2 * _ANSWER)
        requests.decode(_ANSWER // 4)  # graphs are captured, and kernels compiled
        found = requests.decode(_ANSWER)
        share = _step_bytes(worker, count) / found.seconds / limits.bytes_per_s
        figures.append(
            _figure(
                f"decode, {count} streams of {_PROMPT} in and {_ANSWER} out{flag}",
                f"{found.tokens_per_s:.0f} tokens/s, {1e3 * found.seconds:.2f} ms a step, "
                f"{share:.0%} of bandwidth",
                "≥ 85 % of measured bandwidth" if count == 1 else "tokens/s, share of roofline",
            )
        )
        idle = "steps cannot be launched ahead" if found.idle is None else f"{found.idle:.1%}"
        figures.append(_figure(f"idle device, {count} streams{flag}", idle, "≤ 3 %"))
    requests.prefill(1, _LONG_PROMPT, _ANSWER)
    seconds = requests.prefill(1, _LONG_PROMPT, _ANSWER)
    flops = float(str(worker.description["model"]["flops_per_token"])) * _LONG_PROMPT
    flops += attention_flops(model, _LONG_PROMPT)
    figures.append(
        _figure(
            f"prompt of {_LONG_PROMPT} tokens{flag}",
            f"{_LONG_PROMPT / seconds:.0f} tokens/s, {flops / seconds / limits.flops:.0%} of bf16 products",
            "≥ 65 % of measured bf16 peak",
        )
    )
    return figures


def _step_bytes(worker: LoadedWorker, count: int) -> float:
    """Bytes that a decode step reads: weights, the head among them, and cached keys and values."""
    about = {name: float(str(number)) for name, number in worker.description["model"].items()}
    head = worker.runner.model.head
    head_bytes = 0 if head is None else head.inputs * head.outputs * _DTYPE_BYTES
    cached = count * (_PROMPT + _ANSWER) * about["kv_bytes_per_token"]
    return about["weight_bytes"] + head_bytes + cached


if __name__ == "__main__":
    sys.exit(main())
