# SPDX-License-Identifier: Apache-2.0
"""`--speculative-config`: what it may say, checked before anything is loaded."""

from __future__ import annotations

from typing import get_args

import msgspec

from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.resolve import load_model_config, resolve_model
from pagoda.errors import ConfigError
from pagoda.messages.speculation import Method, SpeculativeConfig

FLAG = "--speculative-config"
_WITH_FILES = {
    "draft_model": "a smaller model of the same tokenizer",
    "eagle3": "the directory of a head that was trained for this model",
}
"""Methods that need a `model`."""
_KEYS_OF = {
    "prompt_lookup_min": "ngram",
    "prompt_lookup_max": "ngram",
    "suffix_decoding_max_tree_depth": "suffix",
    "suffix_decoding_max_cached_requests": "suffix",
    "suffix_decoding_max_spec_factor": "suffix",
    "suffix_decoding_min_token_prob": "suffix",
}
"""The method that each key is for; `auto` may become `suffix`."""


def read_speculative_config(text: str | None) -> SpeculativeConfig:
    """The configuration that a JSON object says; without one, the default.

    Raises ConfigError: it is none, has an unknown method or key, or a key that its method has no use for.
    """
    if text is None:
        return SpeculativeConfig()
    try:
        given = msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeEncodeError):
        raise ConfigError(
            f'{FLAG} takes a JSON object such as \'{{"method": "suffix"}}\', got {text[:80]!r}.'
        ) from None
    try:
        config = msgspec.convert(given, SpeculativeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{FLAG}: {_sentence(str(error))}") from None
    if config.model is not None and config.method == "auto":
        config = msgspec.structs.replace(config, method="draft_model")
    if config.model is None and config.method in _WITH_FILES:
        raise ConfigError(f"{FLAG}: {config.method} needs model, {_WITH_FILES[config.method]}.")
    if config.model is not None and config.method not in _WITH_FILES:
        why = (
            "whose weights come with the model"
            if config.method == "mtp"
            else "which has no weights"
        )
        raise ConfigError(f"{FLAG}: model has no use with the method {config.method}, {why}.")
    for key, method in _KEYS_OF.items():
        if key in given and config.method not in (method, "auto" if method == "suffix" else method):
            raise ConfigError(f"{FLAG}: {key} needs the method {method}, not {config.method}.")
    least, longest = config.prompt_lookup_min, config.prompt_lookup_max
    if least is not None and longest is not None and least > longest:
        raise ConfigError(
            f"{FLAG}: prompt_lookup_min must be at most prompt_lookup_max ({longest}), got {least}."
        )
    return config


def _sentence(error: str) -> str:
    """Sentence about a value that msgspec refuses, with the key by its name."""
    rule, _, place = error.replace("`", "").partition(" - at $.")
    if rule.startswith("Object contains unknown field "):
        known = ", ".join(SpeculativeConfig.__struct_fields__)
        return f"there is no key {rule.rpartition(' ')[2]}; there are {known}."
    if place == "method":
        return (
            f"method must be one of {', '.join(get_args(Method))}, got {rule.rpartition(' ')[2]}."
        )
    rule = rule.removeprefix("Expected ").replace(" | null", "")
    return f"{place} must be {rule}."


def speculation_of(config: SpeculativeConfig, model: str, load_format: str) -> SpeculativeConfig:
    """The configuration with this model. Its files are read only if a method is asked for by its name: engines do
    without where `auto` cannot be (`build_parts`).

    Raises ConfigError: the model cannot speculate.
    """
    if config.method in ("off", "auto"):
        return config
    try:
        spec = load_model_config(model, load_format)
    except ConfigError:
        return config  # the worker says what is wrong with the model
    if problem := _problem(spec, config.method):
        raise ConfigError(
            f'{FLAG}: {model} {problem}; leave it out, or say \'{{"method": "off"}}\'.'
        )
    if config.model is None:
        return config
    files = resolve_model(config.model, load_format=load_format)
    return msgspec.structs.replace(config, model=files.model)


def _problem(spec: ModelSpec, method: Method) -> str:
    if any(layer.kv_kind == "step" for layer in spec.layers):
        return "is an encoder, which says no tokens"
    if method == "mtp" and spec.next_token is None:
        return "brings no head that guesses tokens, which mtp is for"
    return ""
