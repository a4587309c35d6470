# SPDX-License-Identifier: Apache-2.0
"""Files of sentence-transformers beside a model: how its hidden states become the vector of a text, or a score."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from pagoda.checkpoints.config_json import read_model_config
from pagoda.checkpoints.gguf.config import gguf_model_config
from pagoda.checkpoints.gguf.reader import GgufFile
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.pooling_spec import ScoreKind, Task
from pagoda.checkpoints.sentence_modules import FILE, read_modules
from pagoda.errors import ConfigError
from pagoda.files import read_regular
from pagoda.messages.frontend import Pooling

_MODULE_KINDS = (
    *("Transformer", "Pooling", "Dense", "Normalize", "LogitScore", "MLMTransformer"),
    "SpladePooling",
)
_MODES = {
    "pooling_mode_lasttoken": Pooling.LAST,
    "lasttoken": Pooling.LAST,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "mean": Pooling.MEAN,
    "pooling_mode_cls_token": Pooling.FIRST,
    "cls": Pooling.FIRST,
}
"""Keys of older and values of newer files."""
_GGUF_POOLING = "pooling_type"
_GGUF_MODES = {1: Pooling.MEAN, 2: Pooling.FIRST, 3: Pooling.LAST}
"""Numbers of llama.cpp; 0 is for none, 4 for scores."""
_FIRST_OF_DECODER = (
    "pools the first token, which in a decoder has seen no other; only encoders are pooled so"
)


@dataclass(frozen=True)
class PoolingDefaults:
    """Pooling of a model without such files: that of most decoders that embed texts."""

    pooling: Pooling = Pooling.LAST
    normalize: bool = True
    task: Task = "generate"
    """Purpose of the model; one that generates gives vectors as well."""
    generates: bool = True
    """False where the model has no head that says what comes next."""
    encodes: bool = False
    """True of an encoder, which sees all of a text at once."""
    labels: tuple[str, ...] = ()
    """Names of the scores of the model's head, if it has one."""
    scores: ScoreKind = "sigmoid"
    weighs_tokens: bool = False
    """The model gives each token its weight in a text."""
    head: Pooling = Pooling.SCORE
    """Way from hidden states to scores."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of texts by name, such as `query`."""
    default_prompt: str | None = None
    """Name of the beginning of texts for which none is named."""

    def prompt(self, name: str | None) -> str:
        """The beginning of texts of that name. Raises KeyError: the model has none of that name."""
        name = self.default_prompt if name is None else name
        return "" if name is None else self.prompts[name]


class _Prompts(msgspec.Struct, frozen=True):
    """Parts of config_sentence_transformers.json."""

    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None
    activation_fn: str | None = None


def read_pooling(directory: Path) -> PoolingDefaults:
    """Pooling as `modules.json` and the files that it names say, or the default where there is no such file.
    Raises ConfigError: a file cannot be read, or says what Pagoda does not do; names the file."""
    modules = read_modules(directory)
    defaults = _by_architecture(lambda: read_model_config(directory, modules))
    path = directory / "config_sentence_transformers.json"
    if path.is_file():
        said = _read(path, _Prompts)
        if said.default_prompt_name is not None and said.default_prompt_name not in said.prompts:
            raise ConfigError(
                f"{str(path)!r} has no prompt of its default_prompt_name {said.default_prompt_name!r}."
            )
        defaults = replace(defaults, prompts=said.prompts, default_prompt=said.default_prompt_name)
        if said.activation_fn is not None and defaults.task == "score":
            kind = said.activation_fn.rpartition(".")[2]
            if kind not in ("Sigmoid", "Identity"):
                raise ConfigError(f"{str(path)!r} must name the activation_fn Sigmoid or Identity.")
            scores: ScoreKind = "sigmoid" if kind == "Sigmoid" else "identity"
            defaults = replace(defaults, scores=scores)
    if not modules or defaults.labels or defaults.task == "score":
        return defaults
    if defaults.pooling in (Pooling.ALL, Pooling.SPARSE):
        return defaults
    path = directory / FILE
    pooling, normalize = Pooling.LAST, False
    for module in modules:
        if module.kind not in _MODULE_KINDS:
            raise ConfigError(
                f"{str(path)!r} has a module {module.type!r}; only {', '.join(_MODULE_KINDS)} are supported."
            )
        normalize |= module.kind == "Normalize"
        if module.kind == "Pooling":
            pooling = _mode(directory / module.path / "config.json")
    if pooling is Pooling.FIRST and not defaults.encodes:
        raise ConfigError(f"{str(path)!r} {_FIRST_OF_DECODER}.")
    return replace(defaults, pooling=pooling, normalize=normalize)


def read_gguf_pooling(file: GgufFile) -> PoolingDefaults:
    """Pooling as the metadata of a GGUF file say, or the default where they are silent.
    Raises ConfigError: they ask for what Pagoda does not do."""
    fields = file.metadata.below(f"{file.metadata.text('general.architecture', '')}.")
    asked = fields.values.get(_GGUF_POOLING)
    if asked is None and fields.flag("attention.causal", True):
        return PoolingDefaults()
    defaults = _by_architecture(lambda: gguf_model_config(file))
    if defaults.task == "score" or asked not in _GGUF_MODES:
        return defaults
    pooling = _GGUF_MODES[fields.count(_GGUF_POOLING)]
    if pooling is Pooling.FIRST and not defaults.encodes:
        fields.refuse(_GGUF_POOLING, _FIRST_OF_DECODER)
    return replace(defaults, pooling=pooling)


def _by_architecture(read: Callable[[], ModelSpec]) -> PoolingDefaults:
    """Pooling of a model of an architecture, without files that say more."""
    try:
        spec = read()
    except ConfigError:  # which a worker will say
        return PoolingDefaults()
    encodes = spec.encoder is not None
    pooling, head = Pooling.FIRST if encodes else Pooling.LAST, spec.classifier
    if "masked" in spec.vector_maps:
        pooling = Pooling.SPARSE
    elif "token_vectors" in spec.vector_maps and "token_weights" not in spec.vector_maps:
        pooling = Pooling.ALL
    return PoolingDefaults(
        Pooling.SCORE if spec.task == "score" else pooling,
        normalize=pooling is not Pooling.SPARSE,
        task=spec.task,
        weighs_tokens="token_weights" in spec.vector_maps,
        encodes=encodes,
        generates=spec.gives_logits,
        labels=() if head is None else head.labels,
        scores="sigmoid" if head is None else head.scores,
        head=Pooling.SCORE if head is None or not head.sees_all else Pooling.SCORE_ALL,
    )


def _mode(path: Path) -> Pooling:
    fields = _read(path, dict[str, Any])
    wanted = [
        name for name, value in fields.items() if name.startswith("pooling_mode_") and value is True
    ]
    if "pooling_mode" in fields:
        wanted = [str(fields["pooling_mode"])]
    if len(wanted) != 1 or wanted[0] not in _MODES:
        raise ConfigError(
            f"{str(path)!r} must ask for one of the last token, the first token and the mean, not {wanted}."
        )
    if fields.get("include_prompt") is False:
        raise ConfigError(
            f"{str(path)!r} leaves prompts out of the mean (include_prompt), which is not supported."
        )
    return _MODES[wanted[0]]


def _read(path: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(read_regular(path), type=kind)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}.") from None
