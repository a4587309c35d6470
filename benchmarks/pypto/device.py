# SPDX-License-Identifier: Apache-2.0
"""The model of the device for processes that are started from here, and what it wrote down."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "tests" / "pypto_device"
_PATH, _SETTINGS = "PYTHONPATH", "PAGODA_PYPTO_DEVICE"

SHAPES: Mapping[str, Mapping[str, object]] = {
    "qwen3-14b-2l": {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "qwen3-small": {
        "hidden_size": 160,
        "intermediate_size": 544,
        "num_attention_heads": 10,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 960,
    },
}
"""Models of two layers that the device has programs for, by the contract's name: fields of config.json."""


@contextmanager
def installed(**settings: object) -> Iterator[None]:
    """Processes that start within find the device; `settings` are those of `pagoda_pypto_device.settings`."""
    before = {name: os.environ.get(name) for name in (_PATH, _SETTINGS)}
    paths = [str(PACKAGE), before[_PATH]]
    os.environ[_PATH] = os.pathsep.join(path for path in paths if path)
    os.environ[_SETTINGS] = json.dumps(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def model_directory(directory: Path, shape: str) -> Path:
    """A directory with the config.json of a shape, whose weights are made up."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "max_position_embeddings": 40960,
        "num_hidden_layers": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "torch_dtype": "bfloat16",
        **SHAPES[shape],
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def counted(log: Path) -> Counter[str]:
    """Calls by program, and other figures, in the directory that the device wrote to.

    They are `workers`, `failures`, `violations`, and `downloads`: rows of logits and pages copied from chips.
    """
    found: Counter[str] = Counter()
    for name in ("calls", "workers", "failures", "violations", "downloads"):
        path = log / name
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        found[name] = len(lines)
        if name == "calls":
            found.update(lines)
    return found


def violations(log: Path) -> list[str]:
    """Sentences about what was passed to the device against its contract."""
    path = log / "violations"
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []
