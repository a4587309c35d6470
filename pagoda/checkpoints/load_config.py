"""Loading of a model's shape by the model's name."""

from __future__ import annotations

from pathlib import Path

from pagoda.checkpoints.config_json import parse_model_config, read_model_config
from pagoda.checkpoints.gguf.config import gguf_model_config
from pagoda.checkpoints.gguf.reader import is_gguf, read_gguf
from pagoda.checkpoints.model_config import ModelConfig
from pagoda.checkpoints.presets import PRESETS
from pagoda.errors import ConfigError


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
