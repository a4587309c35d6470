# SPDX-License-Identifier: Apache-2.0
"""Directories with an EAGLE-3 head: its config.json, in the two layouts that there are; no torch.

Those of the makers and of SpecForge have the keys of a Llama of one layer. Those of speculators have them in
`transformer_layer_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pagoda.checkpoints.config_json import parse_model_config
from pagoda.checkpoints.contents import missing_tensor, tensor_names
from pagoda.checkpoints.draft_heads import DraftHeadSpec
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.errors import ConfigError
from pagoda.files import read_object

_LAYERS = "eagle_aux_hidden_state_layer_ids"
_EMBEDDING = "model.embed_tokens.weight"
_OFFSETS = "model.d2t"
_REFUSED = ("fc_norm", "norm_output")
"""Keys of EAGLE-3.1, which norm what the head is given and what it passes on."""


def read_eagle_config(
    directory: Path, model: ModelSpec, dtype: str
) -> tuple[ModelSpec, DraftHeadSpec]:
    """The head of a directory for a model, and its `draft_head`; `dtype` is that of weights if no file says.

    Raises ConfigError: a file is missing, corrupt or not of an EAGLE-3 head."""
    path = directory / "config.json"
    try:
        values = read_object(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    names = tensor_names(directory)
    if "model.fc.weight" not in names:
        raise ConfigError(f"{directory} is not an EAGLE-3 head: it has no tensor fc.weight.")
    fields = Fields(_flat(values), str(path))
    for key in _REFUSED:
        fields.require(key, False)
    usual: dict[str, object] = {"torch_dtype": dtype, "vocab_size": model.vocab_size}
    given = {key: value for key, value in fields.values.items() if value is not None}
    told = {**usual, **given, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    spec = parse_model_config({**told, "tie_word_embeddings": False}, source=str(path))
    draft = DraftHeadSpec(
        hidden_norm=spec.names.of_layer(0, "hidden_norm"),
        fused="model.fc",
        fused_layers=_layers(fields, model),
        model_hidden_size=fields.positive("target_hidden_size", model.hidden_size),
        adds_normed=fields.flag("norm_before_residual", False),
        token_offsets=_OFFSETS if _OFFSETS in names else "",
        num_outputs=fields.positive("draft_vocab_size", spec.vocab_size),
        has_embedding=_EMBEDDING in names,
        has_head=True,
    )
    if draft.num_outputs != spec.vocab_size and not draft.token_offsets:
        raise ConfigError(
            f"{directory} says {draft.num_outputs} of {spec.vocab_size} tokens, and lacks the tensor d2t that "
            "says which."
        )
    spec = replace(spec, draft_head=draft)
    missing = missing_tensor(spec, names)
    if missing is not None:
        raise ConfigError(f"{directory}: no file holds the tensor {missing} of an EAGLE-3 head.")
    return spec, draft


def _flat(values: Mapping[str, object]) -> dict[str, object]:
    layer = values.get("transformer_layer_config")
    return {**(layer if isinstance(layer, dict) else {}), **values}


def _layers(fields: Fields, model: ModelSpec) -> tuple[int, ...]:
    """The layers whose inputs the head takes; those in `eagle_config` are the ones whose outputs it takes."""
    if fields.values.get(_LAYERS) is not None:
        return tuple(fields.integers(_LAYERS))
    own = fields.table("eagle_config")
    if own is not None and own.values.get(_LAYERS) is not None:
        return tuple(layer + 1 for layer in own.integers(_LAYERS))
    return 2, model.num_layers // 2, model.num_layers - 3
