"""`pagoda doctor`: what this machine has, what will be used, and how fast decoding can be at best."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil

from pagoda.checkpoints.gguf.reader import read_gguf
from pagoda.checkpoints.presets import PRESETS
from pagoda.checkpoints.quantization_config import is_dense_once_loaded
from pagoda.checkpoints.resolve import load_model_config, resolve_model
from pagoda.cli import machine_facts, output
from pagoda.cli.machine_facts import Bandwidth, measure_read_bandwidth
from pagoda.cli.options import Count, GeneralOptions
from pagoda.cli.weight_traffic import WeightTraffic, gguf_traffic, stored_traffic, weight_traffic
from pagoda.frontend.engine_options import Dtype, QuantizationName
from pagoda.ipc.machine import available_cores, available_memory_bytes, format_bytes
from pagoda.version import __version__


def doctor(
    model: str | None = None,
    *,
    dtype: Dtype = "auto",
    quantization: QuantizationName = "none",
    threads: Count | None = None,
    general: GeneralOptions = GeneralOptions(),
) -> int:
    """Say what this machine has, what will be used, and the decode limit that follows.

    Args:
        model: A model directory, a GGUF file or a preset; by default the embedded model and all presets.
        dtype: Number format of the weights; auto takes the model's own.
        quantization: Weights that are rounded as they are loaded, int4 in groups of 32.
        threads: Threads that measure memory bandwidth; by default the cores that may be used.
    """
    general.apply()
    models = dict(_models(model, dtype, quantization))
    bandwidth = measure_read_bandwidth(threads or available_cores())
    console = output.stdout()
    console.print(output.facts(_facts(bandwidth)))
    console.print()
    console.print(
        output.table(
            "Decode limit: bandwidth / weights read a step",
            ("model", "weights", "read a step", "at most, one request"),
            (_limit_row(name, traffic, bandwidth) for name, traffic in models.items()),
        )
    )
    return 0


def _facts(bandwidth: Bandwidth) -> Iterable[tuple[str, str]]:
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    found = machine_facts.accelerators()
    free = format_bytes(available_memory_bytes())
    total = format_bytes(psutil.virtual_memory().total)
    yield "pagoda", __version__
    yield "processor", machine_facts.cpu_name(cpuinfo)
    yield "cores", machine_facts.cores()
    yield "threads", f"{available_cores()} for a worker; --threads chooses another number"
    yield "instruction sets", " ".join(machine_facts.instruction_sets(cpuinfo)) or "none of note"
    yield "memory", f"{free} free of {total}"
    yield "accelerators", "; ".join(found) or "none found"
    yield "backend", _backend() + ("; accelerators are not used" if found else "")
    yield (
        "memory bandwidth",
        f"{bandwidth.bytes_per_s / 1e9:.1f} GB/s read (best {bandwidth.best_bytes_per_s / 1e9:.1f}): "
        f"{bandwidth.threads} threads scan {format_bytes(bandwidth.buffer_bytes)} each, "
        f"median of {bandwidth.passes} passes",
    )


def _backend() -> str:
    """The backend that a worker would use, as the worker describes it."""
    command = [sys.executable, "-m", "pagoda.worker.backends"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    said = lines[-1] if lines else f"it ended with code {done.returncode}"
    return said if done.returncode == 0 else f"none, a worker cannot start: {said}"


def _models(
    model: str | None, dtype: str, quantization: str
) -> Iterable[tuple[str, WeightTraffic]]:
    if model is not None and model in PRESETS:
        yield model, weight_traffic(load_model_config(model, "dummy"), dtype, quantization)
        return
    files = resolve_model(model)
    config = load_model_config(files.model, "auto")
    if files.gguf is not None:
        yield files.served_name, gguf_traffic(read_gguf(files.gguf), dtype)
    elif not is_dense_once_loaded(config.quantization):
        yield files.served_name, stored_traffic(config, files.directory or Path(files.model))
    else:
        yield files.served_name, weight_traffic(config, dtype, quantization)
    if model is None:
        for name in PRESETS:
            yield name, weight_traffic(load_model_config(name, "dummy"), dtype, quantization)


def _limit_row(name: str, traffic: WeightTraffic, bandwidth: Bandwidth) -> tuple[str, ...]:
    rate = bandwidth.bytes_per_s / traffic.num_bytes
    fits_cache = traffic.num_bytes < machine_facts.last_level_cache_bytes()
    limit = "fits the cache" if fits_cache else f"{rate:,.1f} tokens/s"
    return name, traffic.dtype, format_bytes(traffic.num_bytes), limit
