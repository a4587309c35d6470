# SPDX-License-Identifier: Apache-2.0
"""Modules of sentence-transformers: the steps from a text to its vector or score, the first being the model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.pooling_spec import ScoreTokens, VectorActivation, VectorMap
from pagoda.errors import ConfigError
from pagoda.files import read_regular

FILE = "modules.json"
_LOGIT_SCORE = "LogitScore"


class SentenceModule(msgspec.Struct, frozen=True):
    type: str
    """Class in Python, with its module."""
    path: str = ""
    """Directory of its files, within that of the model."""

    @property
    def kind(self) -> str:
        """The class alone."""
        return self.type.rpartition(".")[2]


def read_modules(directory: Path) -> Sequence[SentenceModule]:
    """The modules that `modules.json` in a model directory lists; none where there is no such file.
    Raises ConfigError: the file is damaged."""
    path = directory / FILE
    if not path.is_file():
        return ()
    try:
        return msgspec.json.decode(read_regular(path), type=list[SentenceModule])
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}.") from None


@dataclass(frozen=True)
class DenseModule:
    map: VectorMap
    file: Path
    """File of its weights, whose names are `linear.weight` and `linear.bias`."""


_ACTIVATIONS: dict[str, VectorActivation] = {
    "Identity": "identity",
    "Tanh": "tanh",
    "GELU": "gelu",
    "ReLU": "relu",
    "SiLU": "silu",
}


def dense_modules(directory: Path, modules: Sequence[SentenceModule]) -> Iterator[DenseModule]:
    """The layers that vectors go through, in their order.
    Raises ConfigError: a file is missing or damaged, or asks for what Pagoda does not do."""
    for module in modules:
        if module.kind != "Dense":
            continue
        fields = _fields(directory / module.path / "config.json")
        fields.require("use_residual", False)
        name = fields.text("activation_function", "torch.nn.modules.activation.Tanh")
        activation = _ACTIVATIONS.get(name.rpartition(".")[2])
        if activation is None:
            fields.refuse("activation_function", f"must be one of {', '.join(_ACTIVATIONS)}")
        files = [directory / module.path / it for it in ("model.safetensors", "pytorch_model.bin")]
        yield DenseModule(
            VectorMap(
                f"{module.path}.linear",
                fields.positive("in_features"),
                fields.positive("out_features"),
                fields.flag("bias", True),
                activation,
            ),
            next((it for it in files if it.is_file()), files[0]),
        )


COLBERT_MAP, SPARSE_MAP = "colbert_linear", "sparse_linear"


def lexical_maps(directory: Path) -> list[str]:
    """Names of the maps of BGE-M3 that lie beside a model, in a file of torch's each, of which tensors are called
    `weight` and `bias`."""
    return [it for it in (COLBERT_MAP, SPARSE_MAP) if (directory / f"{it}.pt").is_file()]


def score_tokens(directory: Path, modules: Sequence[SentenceModule]) -> ScoreTokens | None:
    """The tokens whose logits are a pair's score, as the module `LogitScore` names them; None without that module.
    Raises ConfigError: its file is missing or damaged."""
    places = [module.path for module in modules if module.kind == _LOGIT_SCORE]
    if not places:
        return None
    fields, no = _fields(directory / places[0] / "config.json"), "false_token_id"
    return ScoreTokens(
        fields.count("true_token_id"), None if fields.values.get(no) is None else fields.count(no)
    )


def _fields(path: Path) -> Fields:
    """The values of a module's file."""
    try:
        values = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a JSON object.")
    return Fields(values, str(path))
