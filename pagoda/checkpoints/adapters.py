# SPDX-License-Identifier: Apache-2.0
"""Adapters as PEFT stores them: a directory with adapter_config.json and adapter_model.safetensors (LoRA).

Everything is checked by the configuration and by the header of the weights, before any weight is read: what an
adapter asks for is done or refused by name. No torch is needed: a server refuses a bad adapter before it starts.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import MlpSpec
from pagoda.checkpoints.linears import LinearSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.safetensors_header import read_header
from pagoda.errors import ConfigError
from pagoda.files import open_regular, read_object

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_RANK = 512
"""The highest bound of ranks that an operator may set."""

_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")
_DTYPES = ("F32", "BF16", "F16")
_NEUTRAL = {
    "use_dora": False,
    "lora_bias": False,
    "fan_in_fan_out": False,
    "use_qalora": False,
    "bias": "none",
}
"""Fields that change the arithmetic, at the only values that are computed."""
_EMPTY = (
    *("modules_to_save", "rank_pattern", "alpha_pattern", "layer_replication", "megatron_config"),
    *("trainable_token_indices", "target_parameters", "alora_invocation_tokens", "arrow_config"),
)
"""Fields that must be absent or empty."""
_BY_HEADS = (
    "adapters of maps whose rows take turns by heads or hold gates, whose heads are filled up to the size or "
    "number of other layers', and of latent vectors of queries, are not supported"
)
_INITIAL = (True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the weights of the model as they are."""


@dataclass(frozen=True)
class AdaptedLinear:
    """An adapter's two tensors for one linear layer of the model."""

    down: str
    """Tensor [rank, inputs]."""
    up: str
    """Tensor [rows, rank]."""
    rank: int
    first: int
    """Row of `up` that the layer's outputs begin with: layers of one tensor are adapted together."""
    head_order: tuple[int, ...] | None = None
    """Rows of each head in `up` in the order in which they are computed; None if that is their own."""


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter that fits a model."""

    directory: Path
    linears: Mapping[str, AdaptedLinear]
    """Tensors by `LinearSpec.name` of the model's layers."""
    rank: int
    """Highest rank of all layers."""
    scale: float
    digest: str

    @property
    def weights(self) -> Path:
        return self.directory / WEIGHTS_FILE


def read_adapter(directory: Path, config: ModelSpec, *, max_rank: int) -> AdapterFiles:
    """The adapter in a directory, if it fits the model of `config`.

    Raises ConfigError: a file is missing or damaged, the adapter is for another model, its rank is above
    `max_rank`, or it needs what Pagoda does not compute.
    """
    fields = _read_config(directory)
    rank = fields.positive("r")
    if rank > max_rank:
        fields.refuse("r", f"is above the highest rank, {max_rank}; raise --max-lora-rank")
    alpha = fields.number("lora_alpha", float(rank))
    scale = alpha / (math.sqrt(rank) if fields.flag("use_rslora", False) else rank)
    shapes = _read_header(directory / WEIGHTS_FILE)
    known = _known_linears(config)
    _check_targets(fields, config, known)
    found: dict[str, dict[str, str]] = {}
    for name in shapes:
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise ConfigError(
                f"{directory / WEIGHTS_FILE}: tensor {name} is none of a LoRA adapter's that Pagoda computes; "
                "tensors are called <module>.lora_A.weight and <module>.lora_B.weight."
            )
        found.setdefault(match["module"], {})[match["matrix"]] = name
    if not found:
        raise ConfigError(f"{directory / WEIGHTS_FILE} holds no tensors.")
    linears = {}
    for module, names in found.items():
        together = known.get(module.removeprefix(_PREFIX))
        if together is None:
            raise ConfigError(_unknown_module(directory, module, config))
        for linear in together:
            linears[linear.name] = _adapted(directory, module, linear, names, shapes, rank)
    _check_complete(fields, directory, known, linears)
    return AdapterFiles(directory, linears, rank, scale, adapter_digest(directory))


def adapter_digest(directory: Path) -> str:
    """SHA-256 of the adapter's two files, in hex. Raises ConfigError: one cannot be read."""
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        path = directory / name
        try:
            with open(path, "rb", opener=open_regular) as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror}).") from None
    return digest.hexdigest()


def _read_config(directory: Path) -> Fields:
    path = directory / CONFIG_FILE
    if not directory.is_dir():
        raise ConfigError(f"there is no adapter directory {directory}.")
    try:
        values = read_object(path)
    except OSError as error:
        raise ConfigError(
            f"{directory} is no LoRA adapter: {CONFIG_FILE} cannot be read ({error.strerror})."
        ) from None
    fields = Fields(values, str(path))
    if fields.text("peft_type") != "LORA":
        fields.refuse("peft_type", 'must be "LORA"')
    for name, neutral in _NEUTRAL.items():
        fields.require(name, neutral)
    for name in _EMPTY:
        if values.get(name):
            fields.refuse(name, "is not supported; it must be absent or empty")
    initial = values.get("init_lora_weights")
    if initial is not None and initial not in _INITIAL:
        fields.refuse(
            "init_lora_weights", "changes the weights of the model itself, so it must be true"
        )
    return fields


def _read_header(path: Path) -> Mapping[str, tuple[int, ...]]:
    """Shapes of the tensors of a safetensors file, whose numbers must be of a format that Pagoda reads."""
    if not path.is_file():
        raise ConfigError(f"{path.parent} is no LoRA adapter: it has no file {path.name}.")
    tensors, offset = read_header(path)
    end = max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if path.stat().st_size != offset + end:
        raise ConfigError(f"{path} is not a complete safetensors file; fetch it again.")
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise ConfigError(
                f"{path}: tensor {name} is stored as {tensor.dtype}; Pagoda reads {', '.join(_DTYPES)}."
            )
    return {name: tensor.shape for name, tensor in tensors.items()}


def _known_linears(config: ModelSpec) -> dict[str, list[LinearSpec]]:
    """Linear layers that may be adapted, by the names of their tensors in Hugging Face checkpoints."""
    published = _published(config)
    linears: dict[str, list[LinearSpec]] = {}
    for layer in range(config.num_layers):
        of_gates = {it.stored.tensor for it in published.gate_linears(layer)}
        for spec, known in zip(
            _adaptable(config, layer), _adaptable(published, layer), strict=True
        ):
            # A GGUF file may hold apart what a checkpoint holds in one tensor.
            if known.stored.group or known.fill is not None or known.stored.tensor in of_gates:
                continue  # its rows take turns, lie beside those of gates, or are not as they are stored
            own = replace(spec, rows=known.stored, head_order=known.head_order)
            linears.setdefault(known.stored.tensor, []).append(own)
    return linears


def _published(config: ModelSpec) -> ModelSpec:
    """The model with the names of a Hugging Face checkpoint."""
    names = replace(config.family.names, numbers=config.names.numbers)
    return replace(config, names=names)


def _adaptable(config: ModelSpec, layer: int) -> list[LinearSpec]:
    """Linear layers of a layer that may be adapted."""
    attention = config.attention_linears(layer)
    linears = [*attention.into, *filter(None, (attention.out,))]
    if isinstance(config.layers[layer].mlp, MlpSpec):
        linears += config.mlp_linears(layer)
    return linears


def _unknown_module(directory: Path, module: str, config: ModelSpec) -> str:
    where = f"{directory / WEIGHTS_FILE} adapts {module.removeprefix(_PREFIX)}"
    names = config.family.names
    if module.removeprefix(_PREFIX) in _attention_tensors(config):
        return f"{where}; {_BY_HEADS}."
    if module.endswith(("embed_tokens", "lm_head", names.embedding, names.head)):
        return f"{where}; adapters of the embedding and of the head are not supported."
    experts = names.expert_up.partition("{")[0]
    if experts in module or (config.experts is not None and module.endswith(names.router)):
        return f"{where}; adapters of experts and of their router are not supported."
    return f"{where}, which the model lacks; the adapter is for another model."


def _attention_tensors(config: ModelSpec) -> set[str]:
    """Names in Hugging Face checkpoints of all linear layers of attention, adaptable or not."""
    published = _published(config)
    return {
        linear.stored.tensor
        for layer in range(config.num_layers)
        for linear in filter(None, published.attention_linears(layer))
    }


def _adapted(
    directory: Path,
    module: str,
    linear: LinearSpec,
    names: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    rank: int,
) -> AdaptedLinear:
    path = directory / WEIGHTS_FILE
    for matrix in "AB":
        if matrix not in names:
            raise ConfigError(f"{path} lacks the tensor {module}.lora_{matrix}.weight.")
    rows, inputs = linear.stored.shape
    for name, wanted in ((names["A"], (rank, inputs)), (names["B"], (rows, rank))):
        if shapes[name] != wanted:
            raise ConfigError(
                f"{path}: tensor {name} has shape {list(shapes[name])}, but the model and r call for "
                f"{list(wanted)}; the adapter is for another model."
            )
    return AdaptedLinear(names["A"], names["B"], rank, linear.stored.first, linear.head_order)


def _check_targets(
    fields: Fields, config: ModelSpec, known: Mapping[str, Sequence[LinearSpec]]
) -> None:
    """Raises ConfigError: target_modules names what the model lacks or Pagoda does not adapt."""
    for target in _targets(fields):
        if any(_is_target(name, target) for name in known):
            continue
        names = config.family.names
        what = "names no linear layer of the model"
        if target.rpartition(".")[2] in ("embed_tokens", "lm_head", names.head):
            what = "names the embedding or the head, whose adapters are not supported"
        elif any(_is_target(name, target) for name in _attention_tensors(config)):
            what = f"cannot all be adapted; {_BY_HEADS}"
        elif config.experts is not None:
            what = "names experts, whose adapters are not supported, or no linear layer"
        raise ConfigError(f"{fields.source}: target_modules {what}: {target[:80]!r}.")


def _targets(fields: Fields) -> Iterator[str]:
    """Names in target_modules; a pattern, or `all-linear`, names nothing that could be checked."""
    targets = fields.values.get("target_modules")
    if isinstance(targets, str) or targets is None:
        return
    yield from fields.texts("target_modules")


def _is_target(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _check_complete(
    fields: Fields,
    directory: Path,
    known: Mapping[str, Sequence[LinearSpec]],
    linears: Mapping[str, AdaptedLinear],
) -> None:
    """Raises ConfigError: a layer that target_modules names has no tensors, though all layers are adapted."""
    if fields.values.get("layers_to_transform") is not None:
        return
    if fields.values.get("exclude_modules") is not None:
        return
    targets = set(_targets(fields))
    for name, together in known.items():
        if together[0].name not in linears and any(_is_target(name, target) for target in targets):
            raise ConfigError(
                f"{directory / WEIGHTS_FILE} lacks the tensor {_PREFIX}{name}.lora_A.weight, which "
                f"target_modules in {CONFIG_FILE} calls for."
            )
