# SPDX-License-Identifier: Apache-2.0
"""Parts of the specification of models that give vectors or scores of texts; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from pagoda.checkpoints.linears import LinearRole, LinearSpec

Task = Literal["generate", "embed", "score", "classify", "token_classify"]
"""Purpose of a model: text, vectors of texts, scores of pairs of texts, or labels of texts or of tokens."""


@dataclass(frozen=True)
class PositionTable:
    """Learned positions (Gehring et al. 2017)."""

    num_positions: int
    """Rows of the table."""
    first_position: int = 0
    """Row of the first token's position."""
    sinusoidal: bool = False
    """Rows are sines and cosines, which are in no file (Vaswani et al. 2017)."""


@dataclass(frozen=True)
class EncoderSpec:
    """Tables and norms around the layers of an encoder, whose tokens see all of a text (Devlin et al. 2018)."""

    num_positions: int = 0
    """Rows of the table of positions, which are added to embeddings; 0 where there is none."""
    first_position: int = 0
    """Row of the first token's position."""
    num_token_types: int = 0
    """Rows of the table of token types, which are added too; the second of two texts has type 1, others 0."""
    norms_embeddings: bool = True
    """The sum of embeddings is normed."""
    embedding_size: int | None = None
    """Elements of embeddings that a map makes hidden states (ELECTRA); None where they are hidden states."""
    norms_output: bool = False
    """Hidden states behind the last layer are normed."""
    sinusoidal: bool = False
    """Positions are sines and cosines, as those of `PositionTable` may be."""


class ScoreTokens(NamedTuple):
    """Answers of a decoder that is asked whether two texts go together; its score is the difference of logits."""

    yes: int
    no: int | None
    """None where the logit of `yes` alone is the score."""


HeadPooling = Literal["first", "last", "mean", "late", "all"]
"""Hidden states that a head scores: of one token, the mean, or each, of whose scores the mean is taken (`late`) or
all are given."""
ScoreKind = Literal["sigmoid", "softmax", "identity"]
"""Meanings of scores: shares of one each, shares of one together, or numbers as they are."""
VectorActivation = Literal["identity", "tanh", "gelu", "gelu_tanh", "relu", "silu"]
"""Activations behind maps of pooled hidden states."""


@dataclass(frozen=True)
class VectorMap:
    """A layer behind pooled hidden states, or behind those of tokens."""

    name: str
    """Name of its weight, without `.weight`."""
    inputs: int
    outputs: int
    bias: bool = False
    activation: VectorActivation = "identity"
    norm: str | None = None
    """Name of the norm behind the activation."""

    @property
    def linear(self) -> LinearSpec:
        return LinearSpec(self.name, self.outputs, self.inputs, LinearRole.WHOLE)


VectorKind = Literal["scores", "vectors", "token_vectors", "token_weights", "masked"]
"""Purposes of layers behind hidden states: scores of labels; vectors of texts; those of tokens (ColBERT, Khattab
and Zaharia 2020); a weight of each token in its text (BGE-M3, Chen et al. 2024); and hidden states whose products
with embeddings weigh the vocabulary (SPLADE, Formal et al. 2021)."""


@dataclass(frozen=True)
class ClassifierSpec:
    """Head that scores a text, or a pair of them, or each token; without `labels` it gives one score."""

    out: str = "classifier"
    """Name of the layer that gives the scores."""
    dense: str | None = None
    """Name of the layer in front of it."""
    activation: VectorActivation = "tanh"
    """Activation behind that layer."""
    norm: str | None = None
    """Name of the norm behind that."""
    bias: bool = True
    dense_bias: bool = True
    pooling: HeadPooling = "first"
    labels: tuple[str, ...] = ("LABEL_0",)
    scores: ScoreKind = "sigmoid"

    @property
    def sees_all(self) -> bool:
        """Hidden states of all tokens count, or of each."""
        return self.pooling not in ("first", "last")

    @property
    def task(self) -> Task:
        if self.pooling == "all":
            return "token_classify"
        return "score" if len(self.labels) == 1 else "classify"

    def layers(self, hidden_size: int) -> tuple[VectorMap, ...]:
        """The layers that hidden states go through."""
        out = VectorMap(self.out, hidden_size, len(self.labels), self.bias)
        if self.dense is None:
            return (out,)
        sizes = (hidden_size, hidden_size, self.dense_bias)
        return VectorMap(self.dense, *sizes, self.activation, self.norm), out
