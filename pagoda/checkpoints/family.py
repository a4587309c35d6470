# SPDX-License-Identifier: Apache-2.0
"""A family of models: how it reads config.json, and the names of its tensors in files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import Activation
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.pooling_spec import ClassifierSpec
from pagoda.checkpoints.tensor_names import GGUF_NAMES, HF_NAMES, TensorNames


@dataclass(frozen=True)
class GgufFormat:
    """A family in GGUF files."""

    architecture: str
    """Value of `general.architecture`."""
    names: TensorNames = GGUF_NAMES
    keys: Mapping[str, str] = field(default_factory=dict)
    """Metadata that other families must not have, with the keys of config.json that say the same."""
    values: Callable[[Fields], Mapping[str, object]] = lambda _: {}
    """Keys of config.json that metadata tell in another way, or not at all."""
    shown: Callable[[Collection[str]], Mapping[str, object]] = lambda _: {}
    """Keys of config.json that follow from the names of the file's tensors alone."""
    usual: Mapping[str, object] = field(default_factory=dict)
    """Metadata where files are silent, or say 0."""
    read: frozenset[str] = frozenset()
    """Metadata that other families must not have, and that `values` reads, or that say nothing."""
    scales_yarn: bool = False
    """`values` take `rope.scaling.yarn_log_multiplier` into account."""
    required: frozenset[str] = frozenset()
    """Keys of `keys` without which a file is of another family of the same architecture."""
    tensor: str | None = None
    """Tensor without which it is so; other families of the architecture do not have it."""
    causal: bool = True
    """Value of `attention.causal`, which encoders deny."""


@dataclass(frozen=True)
class Family:
    architecture: str
    """Name in `architectures` of config.json."""
    models: str
    """Models of the family, as their makers call them."""
    adapt: Callable[[ModelSpec, Fields], ModelSpec]
    """Sets what the family does its own way in a spec that has all that families share."""
    names: TensorNames = HF_NAMES
    gguf: GgufFormat | None = None
    other_gguf: tuple[GgufFormat, ...] = ()
    """The family in GGUF files of other architectures."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Keys of config.json that go before those by which other families call the same."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values of config.json where the file is silent, other than usual."""
    values: Callable[[Fields], Mapping[str, object]] = lambda _: {}
    """Values of config.json that follow from others, or that files of the family tell in another way."""
    activation: Activation = "silu"
    """Activation of MLPs where config.json is silent."""
    other_activations: frozenset[Activation] = frozenset()
    """Activations that some models of the family have."""
    gated: bool = True
    """False of a family whose MLPs have no gates."""
    partial_rotary: float | None = None
    """Part of a head that is rotated where config.json is silent; None where all of it is in every model."""
    model_types: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Values of `model_type` in the `text_config` of models that see or hear, of which this is the text part, with
    the values where it is silent: transformers leaves those of its classes out there."""
    aliases: frozenset[str] = frozenset()
    """Other names in `architectures`, of models with the same text part and no `text_config`."""
    joins_experts: bool = False
    """Some files have the experts of a layer in one tensor, in either order, others one by one."""
    heads: Mapping[str, Callable[[Fields], ClassifierSpec]] = field(default_factory=dict)
    """Heads that score texts or tokens, by what stands for `Model` in the architecture's name then."""
    masked_head: tuple[str, str, str] | None = None
    """Names of the layer, of the norm and, in full, of the numbers added to logits of the head of masked language
    modelling."""
    own_keys: frozenset[str] = frozenset()
    """Keys of config.json that `adapt` handles although other families must not have them."""

    @property
    def gguf_formats(self) -> tuple[GgufFormat, ...]:
        """The forms of GGUF files that the family is read from."""
        return () if self.gguf is None else (self.gguf, *self.other_gguf)
