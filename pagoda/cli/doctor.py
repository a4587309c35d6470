# SPDX-License-Identifier: Apache-2.0
"""`pagoda doctor`: what this machine has, what will be used, and how fast decoding can be at best."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

from pagoda.checkpoints.presets import PRESETS
from pagoda.checkpoints.resolve import load_model_config, resolve_model
from pagoda.cli import machine_facts, output
from pagoda.cli.machine_facts import Bandwidth, measure_read_bandwidth
from pagoda.cli.model_report import (
    CONTEXT_COLUMNS,
    check_memory,
    check_tensors,
    context_rows,
    location,
    model_facts,
)
from pagoda.cli.options import Count, GeneralOptions
from pagoda.cli.weight_traffic import WeightTraffic, held_bytes, weight_traffic
from pagoda.errors import PagodaError
from pagoda.ipc.machine import available_memory_bytes, format_bytes
from pagoda.llm.engine_options import Dtype, QuantizationName
from pagoda.text.model_text import load_text
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

    Of MODEL it says whether it can be served and what it takes, or why it cannot; then the exit status is 1.

    Args:
        model: A model directory, a GGUF file or a preset; by default the embedded model and all presets.
        dtype: Number format of the weights; auto takes the model's own.
        quantization: Weights that are rounded as they are loaded, int4 in groups of 32.
        threads: Threads that measure memory bandwidth; by default those of a worker.
    """
    general.apply()
    backends = _backends() if model is None else _examine(model, dtype, quantization)
    if isinstance(backends, str):
        output.stdout().print(f"{model} cannot be served: {backends}", soft_wrap=True)
        return 1
    models = dict(_models(model, dtype, quantization))
    bandwidth = measure_read_bandwidth(threads or machine_facts.worker_threads()[0])
    console = output.stdout()
    console.print(output.facts(_facts(bandwidth, backends)))
    if not models:
        return 0
    console.print()
    console.print(
        output.table(
            "Decode limit: bandwidth / weights read a step",
            ("model", "weights", "read a step", "at most, one request"),
            (_limit_row(name, traffic, bandwidth) for name, traffic in models.items()),
        )
    )
    rows = [] if model is None else list(_context_rows(model, dtype, quantization, bandwidth))
    if rows:
        console.print()
        title = (
            "Longest context of one replica, with --kv-host-bytes and --kv-disk-path; "
            "twice as long in int8"
        )
        console.print(output.table(title, CONTEXT_COLUMNS, rows))
    return 0


def _context_rows(
    model: str, dtype: str, quantization: str, bandwidth: Bandwidth
) -> Iterable[tuple[str, ...]]:
    load_format = "dummy" if model in PRESETS else "auto"
    files = resolve_model(model, load_format=load_format)
    spec = load_model_config(files.model, load_format)
    held = held_bytes(spec, dtype, quantization)
    disk = shutil.disk_usage(Path.cwd()).free
    return context_rows(spec, held, available_memory_bytes(), disk, bandwidth.bytes_per_s)


class _Backends(NamedTuple):
    """Backends that a worker has here."""

    chosen: str
    """The one that it would use, as it describes it."""
    fault: str | None
    """Reason why there is none, if so."""
    installed: list[str]
    """A line on each."""


def _examine(model: str, dtype: str, quantization: str) -> _Backends | str:
    """Prints what a model is and takes; returns the backends, or why it cannot be served."""
    load_format = "dummy" if model in PRESETS else "auto"
    console = output.stdout()
    try:
        files = resolve_model(model, load_format=load_format)
        spec = load_model_config(files.model, load_format)
        check_tensors(files, spec)
        text = load_text(files, simulated=False, chat_template=None)
        rows = [("model", files.served_name), ("files", location(files)), *model_facts(spec, dtype)]
        if text.pooling.generates:
            rows.append(("chat template", text.template_traits))
        console.print(output.facts(rows))
        console.print()
        check_memory(spec, dtype, quantization, available_memory_bytes())
    except PagodaError as error:
        return str(error)
    backends = _backends(files.model, load_format, dtype, quantization)
    if backends.fault is not None:
        return f"a worker cannot start: {backends.fault}"
    console.print(f"{model} can be served with {backends.chosen}.", soft_wrap=True)
    console.print()
    return backends


def _facts(bandwidth: Bandwidth, backends: _Backends) -> Iterable[tuple[str, str]]:
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    found = machine_facts.accelerators()
    free = format_bytes(available_memory_bytes())
    total = format_bytes(psutil.virtual_memory().total)
    yield "pagoda", __version__
    yield "processor", machine_facts.cpu_name(cpuinfo)
    yield "cores", machine_facts.cores()
    yield "threads", machine_facts.worker_threads()[1]
    yield "memory nodes", machine_facts.nodes()
    yield "instruction sets", " ".join(machine_facts.instruction_sets(cpuinfo)) or "none of note"
    yield "memory", f"{free} free of {total}"
    yield "accelerators", "; ".join(found) or "none found"
    fault = backends.fault
    said = backends.chosen if fault is None else f"none, a worker cannot start: {fault}"
    yield "backend", said + ("; accelerators are not used" if found else "")
    yield "backends", "; ".join(backends.installed)
    yield (
        "memory bandwidth",
        f"{bandwidth.bytes_per_s / 1e9:.1f} GB/s read (best {bandwidth.best_bytes_per_s / 1e9:.1f}): "
        f"{bandwidth.threads} threads scan {format_bytes(bandwidth.buffer_bytes)} each, "
        f"median of {bandwidth.passes} passes",
    )


def _backends(*model: str) -> _Backends:
    """Asks a worker, which must have room for the model where one is named, with its formats."""
    command = [sys.executable, "-m", "pagoda.worker.backends", *model]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    said = lines[-1] if lines else f"it ended with code {done.returncode}"
    return (
        _Backends(said, None, lines[:-1]) if done.returncode == 0 else _Backends("none", said, [])
    )


def _models(
    model: str | None, dtype: str, quantization: str
) -> Iterable[tuple[str, WeightTraffic]]:
    if model is not None and model in PRESETS:
        yield model, weight_traffic(load_model_config(model, "dummy"), dtype, quantization)
        return
    files = resolve_model(model)
    spec = load_model_config(files.model, "auto")
    if not spec.gives_logits:  # it decodes nothing
        return
    yield files.served_name, weight_traffic(spec, dtype, quantization)
    if model is None:
        for name in PRESETS:
            yield name, weight_traffic(load_model_config(name, "dummy"), dtype, quantization)


def _limit_row(name: str, traffic: WeightTraffic, bandwidth: Bandwidth) -> tuple[str, ...]:
    rate = bandwidth.bytes_per_s / traffic.num_bytes
    fits_cache = traffic.num_bytes < machine_facts.last_level_cache_bytes()
    limit = "fits the cache" if fits_cache else f"{rate:,.1f} tokens/s"
    return name, traffic.dtype, format_bytes(traffic.num_bytes), limit
