# SPDX-License-Identifier: Apache-2.0
"""Choice of number formats: of activations, of weights and of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from pagoda.checkpoints.checkpoint_quantization import CheckpointQuantization, is_dense_once_loaded
from pagoda.checkpoints.config_json import DTYPES
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.weight_formats import Quantization
from pagoda.errors import ConfigError
from pagoda.messages.kv_formats import KV_FORMATS, OTHER_NAMES
from pagoda.messages.worker import Capabilities
from pagoda.messages.worker_config import WorkerConfig
from pagoda.model.quantization import QUANTIZATIONS, quantization_on_load


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a number format by the name that capabilities have for it."""
    dtype: torch.dtype = getattr(torch, KV_FORMATS[name].dtype)
    return dtype


def choose_dtype(wanted: str, stored: str, capabilities: Capabilities) -> str:
    """Number format of dense weights and activations. Raises ConfigError: the backend does not compute in it."""
    _check_choice("--dtype", wanted, ("auto", *DTYPES))
    dtype = stored if wanted == "auto" else wanted
    if dtype not in capabilities.weight_formats:
        known = ", ".join(known for known in DTYPES if known in capabilities.weight_formats)
        raise ConfigError(f"this backend does not compute in {dtype}; --dtype may be {known}.")
    return dtype


def choose_quantization(
    config: WorkerConfig, shape: ModelSpec, capabilities: Capabilities
) -> Quantization | None:
    """The checkpoint's own quantization, or the one that is asked for.

    Raises ConfigError: there is no such one, or the backend or the checkpoint does not allow it.
    """
    wanted = config.quantization
    _check_choice("--quantization", wanted, QUANTIZATIONS)
    stored = shape.quantization
    if config.load_format == "dummy" and stored is not None:
        raise ConfigError(
            f"{config.model}/config.json: there are no dummy weights for its quantization_config; "
            "take that out and add --quantization int8 or int4."
        )
    is_dense = is_dense_once_loaded(stored)
    if is_dense or config.dequantizes:
        if wanted != "none" and wanted not in capabilities.weight_formats:
            raise ConfigError(f"this backend does not compute with {wanted} weights.")
        kept = _kept(config, stored, capabilities) if is_dense else None
        if wanted == "fp8" and isinstance(kept, CheckpointQuantization) and kept.is_held_in_fp8:
            return kept
        on_load = quantization_on_load(
            wanted, config.quantization_group_size, config.calibration_windows
        )
        return on_load or kept
    if stored is not None and wanted != "none":
        raise ConfigError(
            f"{config.model} is quantized already ({stored.summary}); leave out --quantization."
        )
    return _kept(config, stored, capabilities)


def choose_kv_dtype(wanted: str, dtype: str, capabilities: Capabilities) -> str:
    """Number format of K and V, `dtype` being that of activations. Raises ConfigError: the backend lacks it."""
    known = capabilities.kv_cache_dtypes
    wanted = OTHER_NAMES.get(wanted, wanted)
    _check_choice("--kv-cache-dtype", wanted, ("auto", *known), " on this backend")
    chosen = dtype if wanted == "auto" else wanted
    if chosen not in known:
        raise ConfigError(
            f"this backend has no KV cache of {chosen}; --kv-cache-dtype may be {', '.join(known)}."
        )
    return chosen


def _check_choice(flag: str, wanted: object, known: Sequence[object], where: str = "") -> None:
    if wanted not in known:
        listed = ", ".join(map(str, known))
        raise ConfigError(f"{flag} must be one of {listed}{where}, got {wanted!r}.")


def _kept(
    config: WorkerConfig, stored: Quantization | None, capabilities: Capabilities
) -> Quantization | None:
    """The checkpoint's quantization, with 8-bit floats that stay what they are if the backend has them."""
    if not isinstance(stored, CheckpointQuantization):
        return stored
    return replace(
        stored, keeps_fp8="fp8" in capabilities.weight_formats and not config.dequantizes
    )
