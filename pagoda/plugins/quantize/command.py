# SPDX-License-Identifier: Apache-2.0
"""`pagoda quantize`: a model directory with quantized weights, made once and read by Pagoda and others."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

from cyclopts import Parameter

from pagoda.checkpoints.resolve import resolve_model
from pagoda.cli import output
from pagoda.cli.options import Count, GeneralOptions
from pagoda.cli.progress import job_progress
from pagoda.devices import check_backend
from pagoda.errors import ConfigError
from pagoda.executor.jobs import run_job
from pagoda.ipc.amounts import parse_bytes
from pagoda.ipc.machine import format_bytes
from pagoda.llm.engine_options import GroupSize
from pagoda.messages.jobs import QuantizeConfig, QuantizeFormat, QuantizeResult
from pagoda.text.text_files import calibration_windows

_JOB = "pagoda.plugins.quantize.job"
_DEFAULT_GROUP_SIZE = 32


def quantize(
    model: str,
    out: Path,
    *,
    format: QuantizeFormat,  # noqa: A002 - the name of the flag
    group_size: GroupSize | None = None,
    max_shard_size: Annotated[str, Parameter(metavar="SIZE")] = "2GiB",
    backend: str = "auto",
    threads: Count | None = None,
    quantization_calibration: Annotated[Path | None, Parameter(metavar="FILE")] = None,
    general: GeneralOptions = GeneralOptions(),
) -> int:
    """Write a model with quantized weights as a directory that Pagoda, vLLM and transformers read.

    Args:
        model: A model directory with dense weights or a hub id.
        out: The directory to write, which must not exist.
        format: w8a8 rounds weights (a scale per output) and activations to 8 bits, w8a16 weights to 8 bits in
            groups, w4a16 weights to 4 bits in groups with zero points.
        group_size: Inputs that share a scale in w8a16 and w4a16, 32 by default.
        max_shard_size: The most that one file of weights takes, such as 2GiB.
        backend: The backend whose rounding w8a8 takes; auto takes cpu where it is available.
        threads: Layers that are rounded at a time; by default the cores that this process may use.
        quantization_calibration: A text by whose inputs weights are rounded: closer to the model, but it takes a
            minute or two for each billion weights.
    """
    general.apply()
    if group_size is not None and format == "w8a8":
        raise ConfigError(
            "--group-size needs --format w8a16 or w4a16; w8a8 has a scale per output."
        )
    try:
        max_shard_bytes = parse_bytes(max_shard_size)
    except ValueError as error:
        raise ConfigError(f"--max-shard-size {error}, got {max_shard_size!r}.") from None
    check_backend(backend, ())
    files = resolve_model(model)
    windows: list[list[int]] = []
    if quantization_calibration is not None:
        windows = calibration_windows(quantization_calibration, files, "--quantization-calibration")
    began = time.perf_counter()
    with _appearing(out) as directory:
        config = QuantizeConfig(
            model=files.model,
            directory=str(directory),
            format=format,
            group_size=group_size or _DEFAULT_GROUP_SIZE,
            max_shard_bytes=max_shard_bytes,
            backend=backend,
            num_threads=threads,
            calibration_windows=windows,
        )
        with job_progress("tensors") as on_progress:
            result = run_job(_JOB, config, QuantizeResult, on_progress)
    seconds = time.perf_counter() - began
    output.stdout().print(output.facts(_rows(files.served_name, out, config, result, seconds)))
    return 0


def _rows(
    model: str, out: Path, config: QuantizeConfig, result: QuantizeResult, seconds: float
) -> Iterator[tuple[str, str]]:
    groups = "" if config.format == "w8a8" else f" in groups of {config.group_size}"
    before, after = result.source_bytes, result.weight_bytes
    bits = 8 * after / result.num_weights
    files = f"{result.num_files} file{'s' if result.num_files > 1 else ''}"
    yield "model", model
    yield "format", f"compressed-tensors, {config.format}{groups}"
    yield (
        "weights",
        f"{format_bytes(before)} before, {format_bytes(after)} now in {files}: {bits:.2f} bits a weight in all",
    )
    if config.calibration_windows:
        tokens = sum(map(len, config.calibration_windows))
        yield "rounded by", f"{tokens:,} tokens of a calibration text"
    yield "time", f"{seconds:.1f} s"
    yield "serve it", f"pagoda serve {out}"


@contextlib.contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A new directory beside `out` that becomes `out` at the end, or vanishes if anything goes wrong.

    Raises ConfigError: `out` exists, or its parent cannot be written to.
    """
    if os.path.lexists(out):
        raise ConfigError(f"OUT {str(out)!r} exists already; name a directory that does not.")
    parent = Path(os.path.abspath(out)).parent
    with _sigterm_as_interrupt(), contextlib.ExitStack() as made:
        with _refusals_of_the_system(out):
            beside = tempfile.TemporaryDirectory(
                dir=parent, prefix=f".{out.name}.", suffix=".partial", ignore_cleanup_errors=True
            )
            directory = Path(made.enter_context(beside)) / out.name
            directory.mkdir()
        yield directory
        with _refusals_of_the_system(out):
            _set_modes(directory)
            directory.rename(out)


@contextlib.contextmanager
def _refusals_of_the_system(out: Path) -> Iterator[None]:
    """Raises ConfigError where the system raises an error of its own."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"OUT {str(out)!r} cannot be made: {error.strerror}.") from error


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the work like Ctrl-C, so that what is half done is removed."""

    def interrupt(_: int, __: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _set_modes(directory: Path) -> None:
    """Gives the directory and its files the modes that new ones have."""
    mask = os.umask(0)
    os.umask(mask)
    for path in directory.iterdir():
        path.chmod(0o666 & ~mask)
    directory.chmod(0o777 & ~mask)
