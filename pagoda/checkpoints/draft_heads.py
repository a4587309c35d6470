# SPDX-License-Identifier: Apache-2.0
"""Heads that guess tokens further ahead, from hidden states of their model and the token behind each; no torch.

Row *j* of a head has the token at *j* + 1 and the hidden state at *j*, and guesses the token at *j* + 2. A map in
front of one decoder layer joins both (MTP, DeepSeek-AI 2024, part 2.2), or the layer's queries, keys and values
are of both, and the hidden state is made of three of the model's (EAGLE-3, Li et al. 2025).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pagoda.checkpoints.linears import LinearRole, LinearSpec
from pagoda.checkpoints.tensor_names import TensorNames

if TYPE_CHECKING:
    from pagoda.checkpoints.model_spec import ModelSpec


@dataclass(frozen=True)
class DraftHeadSpec:
    """Parts of a head besides a decoder layer, the norm behind it, and the map to logits."""

    hidden_norm: str
    """Name in full, as that of all tensors here."""
    layers: str = "model.layers"
    """Beginning of the names of its layer, whose number is `first_layer`."""
    first_layer: int = 0
    norm: str = "model.norm"
    """Norm behind the layer."""
    embedding_norm: str = ""
    """Empty where it is the norm in front of the layer's attention (EAGLE-3)."""
    joined: str = ""
    """Map [hidden, 2 hidden] of embedding and hidden state; empty where queries, keys and values are of both."""
    hidden_first: bool = False
    """The inputs of `joined` are the hidden state, then the embedding."""
    passes_normed: bool = False
    """The hidden state for the row behind is that in front of the map to logits, not that in front of its norm."""
    fused: str = ""
    """Map of several hidden states of the model to one; empty where the head takes the last one, normed."""
    fused_layers: tuple[int, ...] = ()
    """The layers of the model whose inputs `fused` takes."""
    model_hidden_size: int = 0
    """Elements of each of these."""
    adds_normed: bool = False
    """The layer adds to the normed hidden state (`norm_before_residual` of EAGLE-3)."""
    token_offsets: str = ""
    """Numbers [outputs] that make tokens of the model of those of the head; empty where they are the same."""
    num_outputs: int = 0
    """Tokens that the head knows; 0 for all."""
    has_embedding: bool = False
    """False where the model's table is the head's."""
    has_head: bool = False
    """False where the model's map to logits is the head's."""

    @property
    def joins_in_attention(self) -> bool:
        return not self.joined

    def linears(self, hidden_size: int) -> list[LinearSpec]:
        """Maps in front of the layer, each of which takes several vectors."""
        fused_size = len(self.fused_layers) * self.model_hidden_size
        sizes = [(self.joined, 2 * hidden_size), (self.fused, fused_size)]
        return [
            LinearSpec(name, hidden_size, inputs, LinearRole.WHOLE)
            for name, inputs in sizes
            if name
        ]

    @property
    def norms(self) -> list[str]:
        """Names of norms in front of the layer."""
        return [name for name in (self.embedding_norm, self.hidden_norm) if name]


def head_behind(
    names: TensorNames, num_layers: int, *, within: str = "", norm: str = "shared_head.norm"
) -> DraftHeadSpec:
    """The head behind a model's layers, in the first layer of those that guess more tokens (DeepSeek-AI 2024, part
    2.2), which share the model's embedding table and its map to logits. Names of what is not of the layer are
    `within` a part of it."""

    def named(name: str) -> str:
        return names.of_layer(num_layers, f"{within}{name}")

    return DraftHeadSpec(
        layers=names.layers,
        first_layer=num_layers,
        norm=named(norm),
        hidden_norm=named("hnorm"),
        embedding_norm=named("enorm"),
        joined=named("eh_proj"),
    )


def head_of_next_token(spec: ModelSpec) -> ModelSpec | None:
    """The head that comes with a model, whose layer is like the model's last one with attention."""
    head = spec.next_token
    if head is None:
        return None
    names = replace(spec.names, layers=head.layers, first_layer=head.first_layer, norm=head.norm)
    layers = [layer for layer in spec.layers if layer.state is None]
    return replace(spec, names=names, layers=tuple(layers[-1:]), next_token=None, draft_head=head)
