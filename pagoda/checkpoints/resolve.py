"""Finding of the files of a model that a user names, and of its shape."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from pathlib import Path

from pagoda.checkpoints.config_json import parse_model_config, read_model_config
from pagoda.checkpoints.gguf.config import gguf_model_config
from pagoda.checkpoints.gguf.reader import SUFFIX, is_gguf, model_name, read_gguf
from pagoda.checkpoints.model_config import ModelConfig
from pagoda.checkpoints.presets import PRESETS
from pagoda.errors import ConfigError

EMBEDDED_MODEL = "pagoda-tiny"
"""The name of the model that is shipped as package data and used when no model is named."""

DEFAULT_PRESET = "qwen3-0.6b"
LOAD_FORMATS = ("auto", "dummy")

_EMBEDDED_DIRECTORY = Path(__file__).parent / "pagoda_tiny"
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


@dataclass(frozen=True)
class ModelFiles:
    model: str
    """Value of `WorkerConfig.model`: a directory, a GGUF file, or the name of a shape preset."""
    directory: Path | None
    """Holds config, weights and tokenizer; None for a GGUF file and for a shape preset, which has no files."""
    served_name: str
    """Name of the model in the API unless the operator says otherwise."""
    gguf: Path | None = None
    """The file that holds config, weights and tokenizer instead of a directory."""


def resolve_model(name: str | None, *, load_format: str = "auto") -> ModelFiles:
    """Finds the files of the model `name`.

    With `load_format` `auto`, `name` is a Hugging Face model directory, a GGUF file, the id of a model on the hub,
    or None or `pagoda-tiny` for the embedded model. With `dummy` it is a shape preset or a directory with a
    config.json.
    Raises ConfigError: there is no such model, or its directory is not a model directory."""
    if load_format not in LOAD_FORMATS:
        formats = ", ".join(LOAD_FORMATS)
        raise ConfigError(f"--load-format must be one of {formats}, got {load_format!r}.")
    if load_format == "dummy":
        return _resolve_dummy(name or DEFAULT_PRESET)
    if name is None or name == EMBEDDED_MODEL:
        return _local(_EMBEDDED_DIRECTORY, served_name=EMBEDDED_MODEL)
    path = Path(name).expanduser()
    if path.exists():
        return _local(path, served_name=name)
    if name in PRESETS:
        raise ConfigError(
            f"{name!r} is a shape preset without weights; add --load-format dummy to serve it."
        )
    if path.suffix == SUFFIX:
        raise ConfigError(f"there is no GGUF file {name!r}.")
    if not _looks_like_hub_id(name):
        raise ConfigError(
            f"there is no model directory {name!r}; give a directory with a config.json, "
            "a GGUF file, or a hub id such as Qwen/Qwen3-0.6B."
        )
    return _local(_from_hub(name), served_name=name)


def _resolve_dummy(name: str) -> ModelFiles:
    if name in PRESETS:
        return ModelFiles(model=name, directory=None, served_name=name)
    path = Path(name).expanduser()
    if (path / "config.json").is_file():
        return ModelFiles(model=str(path), directory=path, served_name=name)
    presets = ", ".join(sorted(PRESETS))
    raise ConfigError(
        f"{name!r} is neither a shape preset for --load-format dummy nor a directory with a "
        f"config.json; presets are: {presets}."
    )


def _local(path: Path, *, served_name: str) -> ModelFiles:
    if is_gguf(path):
        return ModelFiles(model=str(path), directory=None, served_name=model_name(path), gguf=path)
    if not path.is_dir():
        raise ConfigError(
            f"{str(path)!r} is not a directory; a model is a directory with a config.json, or a GGUF file."
        )
    if not (path / "config.json").is_file():
        found = sorted(path.glob(f"*{SUFFIX}"))
        raise ConfigError(
            f"{str(path)!r} has no config.json, so it is not a Hugging Face model directory"
            + (f"; name the GGUF file itself, {str(found[0])!r}." if found else ".")
        )
    return ModelFiles(model=str(path), directory=path, served_name=served_name)


def _looks_like_hub_id(name: str) -> bool:
    parts = name.split("/")
    return len(parts) == 2 and all(part and part[0].isalnum() for part in parts)


def _from_hub(name: str) -> Path:
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        raise ConfigError(
            f"there is no directory {name!r}, and fetching it from the hub needs an extra: "
            "pip install 'pagoda-llm[hub]'."
        ) from None
    try:
        return Path(hub.snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
            raise ConfigError(
                f"{name!r} is neither a directory nor in the local hub cache, and HF_HUB_OFFLINE is set."
            ) from error
        raise ConfigError(
            f"{name!r} is not a directory, and the hub did not give it: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def load_model_config(model: str, load_format: str) -> ModelConfig:
    """The config of a model directory or a GGUF file, or of a preset where weights are `dummy`.
    Raises ConfigError: there is no such model, or Pagoda does not run it."""
    if load_format == "dummy" and model in PRESETS:
        return parse_model_config(PRESETS[model], source=f"preset {model}")
    path = Path(model)
    if is_gguf(path):
        return gguf_model_config(read_gguf(path))
    if not path.is_dir():
        hint = f" or a preset ({', '.join(PRESETS)})" if load_format == "dummy" else ""
        raise ConfigError(f"there is no model directory {model}{hint}.")
    return read_model_config(path)
