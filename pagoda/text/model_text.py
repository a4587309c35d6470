# SPDX-License-Identifier: Apache-2.0
"""The text side of a model: tokenizer, chat template, end tokens and preferred sampling."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from pagoda.checkpoints.config_json import read_model_config
from pagoda.checkpoints.gguf.reader import read_gguf
from pagoda.checkpoints.resolve import ModelFiles, load_model_config
from pagoda.errors import ConfigError, InvalidRequestError, refuse
from pagoda.files import read_regular
from pagoda.messages.sampling_params import SamplingParams
from pagoda.text.answer_formats import AUTO, AnswerFormats, ParserChoice
from pagoda.text.encoder_files import DecoderText, read_decoder_text
from pagoda.text.generation_file import fields_not_followed
from pagoda.text.pooling_files import PoolingDefaults, read_gguf_pooling, read_pooling
from pagoda.text.speech_files import SpeechText, read_speech
from pagoda.text.templates.chat_template import ChatTemplate, read_template
from pagoda.text.tokenizers.tokenizer import IM_END, Tokenizer, byte_tokenizer, load_tokenizer
from pagoda.whole_numbers import whole_numbers

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_GGUF_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
"""Fields of generation_config.json that are taken, with the keys that GGUF files have for them."""

_TOOL_USE = "tool_use"
"""Name of the template for conversations with tools, where a model has several, as transformers reads it."""
_CHATML = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


SpecialTokensInText = Literal["allow", "reject"]


@dataclass(frozen=True)
class ModelText:
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_ids: tuple[int, ...]
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    """Values that the model's authors prefer, for fields that a request leaves open."""
    pooling: PoolingDefaults = field(default_factory=PoolingDefaults)
    parsers: ParserChoice = field(default_factory=ParserChoice)
    speech: SpeechText | None = None
    """Tokens around transcripts; None of a model that hears nothing."""
    decoder: DecoderText | None = None
    """Tokens around answers to prompts that the model's encoder reads; None of a decoder alone."""
    not_followed: tuple[str, ...] = ()
    """Fields of generation_config.json that would change answers, and do not."""
    longest: int = 0
    """Tokens of the longest sequence that the model can take, whatever the server does; 0 if it is not known."""
    special_tokens_in_text: SpecialTokensInText = "allow"
    """Texts of conversations may hold special tokens, which then are what they are in the template; or not."""

    @cached_property
    def formats(self) -> AnswerFormats:
        """The formats in which the model writes tool calls and reasoning."""
        template = self.chat_template
        found = self.parsers.formats("" if template is None else template.marks)
        if template is None or template.takes_tools or self.parsers.tool_call != AUTO:
            return found
        return replace(found, tools="hermes")  # the form of the prompt that shows them

    @property
    def template_traits(self) -> str:
        """Traits of the chat template in words, for the log and for operators."""
        if self.chat_template is None:
            return "none"
        prompt = "; tools by a prompt in Hermes' form"
        is_generic = self.takes_tools and not self.chat_template.takes_tools
        return f"{self.chat_template.tool_traits}{prompt if is_generic else ''}"

    @property
    def takes_tools(self) -> bool:
        """True if the model is shown tools, by its chat template or by a prompt that goes with any template."""
        template = self.chat_template
        return template is not None and (template.takes_tools or self.formats.tools == "hermes")

    def check_generates(self) -> None:
        """Raises InvalidRequestError: the model answers with vectors or scores alone."""
        if self.pooling.generates:
            return
        rule = "gives vectors of texts and generates none; ask POST /v1/embeddings"
        if self.pooling.task == "score":
            rule = "gives scores of texts and generates none; ask POST /v1/rerank or /v1/score"
        elif self.pooling.labels:
            rule = "gives labels of texts and generates none; ask POST /classify"
        refuse("model", rule)

    def require_template(self) -> ChatTemplate:
        """Raises InvalidRequestError: the model has no chat template, or does not generate."""
        self.check_generates()
        if self.chat_template is None:
            raise InvalidRequestError(
                "this model has no chat template; its operator can give one with --chat-template FILE.",
                param="messages",
            )
        return self.chat_template


def load_text(
    files: ModelFiles,
    *,
    simulated: bool,
    chat_template: Path | None,
    parsers: ParserChoice | None = None,
    switches: Mapping[str, object] | None = None,
    special_tokens_in_text: SpecialTokensInText = "allow",
) -> ModelText:
    """The text side of a model; that of a simulated engine does not depend on files. `switches` are values of the
    template's switches that requests leave out.
    Raises ConfigError: a file is missing, cannot be read, or does not hold what it should; a switch is wrong."""
    text = replace(
        _load_text(files, simulated=simulated, chat_template=chat_template),
        special_tokens_in_text=special_tokens_in_text,
        longest=0 if simulated else _longest(files),
    )
    if parsers is not None:
        text = replace(text, parsers=parsers)
    if switches and text.chat_template is not None:
        try:
            text = replace(text, chat_template=text.chat_template.with_defaults(switches))
        except InvalidRequestError as error:
            flag = str(error).replace("chat_template_kwargs", "--default-chat-template-kwargs")
            raise ConfigError(flag) from None
    return text


def _longest(files: ModelFiles) -> int:
    has_files = files.gguf is not None or files.directory is not None
    try:
        config = load_model_config(files.model, "auto" if has_files else "dummy")
    except ConfigError:  # the worker cannot load it either, and says why
        return 0
    return config.max_position_embeddings


def _load_text(files: ModelFiles, *, simulated: bool, chat_template: Path | None) -> ModelText:
    if files.gguf is not None and not simulated:
        text = load_gguf_text(files.gguf, chat_template=chat_template)
        return replace(text, default_sampling={**files.sampling, **text.default_sampling})
    if simulated or files.directory is None:
        return synthetic_model_text(chat_template=chat_template)
    return load_model_text(files.directory, chat_template=chat_template)


def load_model_text(directory: Path, *, chat_template: Path | None = None) -> ModelText:
    """Reads the text files of a Hugging Face model directory.

    The chat template is taken from the first of: `chat_template` (the operator's file), `chat_template.jinja`,
    `chat_template.json`, `tokenizer_config.json`. Where the model has a template named `tool_use`, conversations
    with tools are rendered with it.

    Raises ConfigError: a file is missing, cannot be read, or does not hold what it should.
    """
    try:
        tokenizer = load_tokenizer(directory)
    except ConfigError:
        if "architectures" in _read_json(directory / "config.json"):
            read_model_config(directory)  # of a model that is not served, that is what is said
        raise
    config = _read_json(directory / "tokenizer_config.json")
    special_tokens = _special_tokens(config, _read_json(directory / "special_tokens_map.json"))
    generation = _read_json(directory / "generation_config.json")
    eos = _eos_ids(generation) or _eos_ids(_read_json(directory / "config.json"))
    from_tokenizer = tokenizer.token_id(special_tokens.get("eos_token", ""))
    if from_tokenizer is not None:
        eos = eos | {from_tokenizer}
    sources = _template_sources(directory, config, chat_template)
    speech = read_speech(directory, tokenizer, generation)
    decoder = read_decoder_text(directory, generation)
    hears, reads = speech is not None, decoder is not None
    return ModelText(
        tokenizer=tokenizer,
        chat_template=_chat_template(sources, special_tokens),
        eos_token_ids=tuple(sorted(eos)),
        default_sampling=_sampling_defaults(directory / "generation_config.json", generation),
        pooling=read_pooling(directory),
        speech=speech,
        decoder=decoder,
        not_followed=fields_not_followed(generation, hears=hears, reads=reads),
    )


def load_gguf_text(path: Path, *, chat_template: Path | None = None) -> ModelText:
    """Takes everything out of the metadata of a GGUF file, but for the chat template that the operator names.
    Raises ConfigError: the file cannot be read, or its metadata does not say what it should."""
    # Servers of other files need neither.
    from pagoda.text.tokenizers.gguf_tokenizer import build_tokenizer
    from pagoda.text.tokenizers.gguf_vocabulary import GGUFVocabulary

    file = read_gguf(path)
    metadata = file.metadata
    vocabulary = GGUFVocabulary(metadata)
    special_tokens = vocabulary.special_tokens()
    sources = {
        "default": metadata.text("tokenizer.chat_template", ""),
        _TOOL_USE: metadata.text(f"tokenizer.chat_template.{_TOOL_USE}", ""),
    }
    if chat_template is not None:
        sources = {"default": read_template(chat_template)}
    preferred = {
        name: metadata.amount(key) for name, key in _GGUF_SAMPLING.items() if key in metadata
    }
    return ModelText(
        tokenizer=build_tokenizer(vocabulary),
        chat_template=_chat_template(sources, special_tokens),
        eos_token_ids=vocabulary.end_token_ids(),
        default_sampling=_sampling_defaults(path, preferred),
        pooling=read_gguf_pooling(file),
    )


def synthetic_model_text(*, chat_template: Path | None = None) -> ModelText:
    """The text side of models without files (shape presets, simulated executor): bytes as tokens, and ChatML."""
    tokenizer = byte_tokenizer()
    source = _CHATML if chat_template is None else read_template(chat_template)
    eos = tokenizer.token_id(IM_END)
    return ModelText(
        tokenizer=tokenizer,
        chat_template=ChatTemplate(source, special_tokens={"eos_token": IM_END}),
        eos_token_ids=() if eos is None else (eos,),
    )


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is no such file."""
    try:
        value = json.loads(read_regular(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{str(path)!r} must hold a JSON object.")
    return value


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by role; each is written as a string or as an object with `content`."""
    found: dict[str, str] = {}
    for source in sources:
        for role in _SPECIAL_TOKENS:
            value = source.get(role)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found.setdefault(role, text)
    return found


def _eos_ids(config: Mapping[str, Any]) -> frozenset[int]:
    value = whole_numbers(config.get("eos_token_id"))
    ids = value if isinstance(value, list) else [value]
    return frozenset(i for i in ids if isinstance(i, int) and i >= 0)


def _chat_template(
    sources: Mapping[str, str], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """The template of a model, out of its templates by name; None if it has none."""
    given = {name: source for name, source in sources.items() if source}
    default = given.get("default") or next(iter(given.values()), None)
    if default is None:
        return None
    return ChatTemplate(default, special_tokens=special_tokens, tool_use=given.get(_TOOL_USE))


def _template_sources(
    directory: Path, config: Mapping[str, Any], operators: Path | None
) -> dict[str, str]:
    """The templates of a model by name; empty if it has none."""
    if operators is not None:
        return {"default": read_template(operators)}
    default = _template_in(directory / "chat_template.jinja")
    if default:
        named = directory / "additional_chat_templates" / f"{_TOOL_USE}.jinja"
        return {"default": default, _TOOL_USE: _template_in(named)}
    for holder in (_read_json(directory / "chat_template.json"), config):
        template = holder.get("chat_template")
        if isinstance(template, str):
            return {"default": template}
        if isinstance(template, list):
            template = {
                it.get("name"): it.get("template") for it in template if isinstance(it, dict)
            }
        if isinstance(template, dict):
            pairs = template.items()
            return {name: it for name, it in pairs if isinstance(name, str) and isinstance(it, str)}
    return {}


def _template_in(path: Path) -> str:
    """The template in a file of a model; empty when there is no such file."""
    try:
        return read_regular(path).decode()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as a chat template: {error}.") from None


def _sampling_defaults(path: Path, generation: Mapping[str, Any]) -> dict[str, float]:
    """The sampling that a model prefers, in the words of generation_config.json; `path` says so.

    `do_sample: false` is said by models whose answers should be the likeliest ones.
    """
    given = {name: whole_numbers(generation.get(name)) for name in _GGUF_SAMPLING}
    found: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if generation.get("do_sample") is False:
        found["temperature"] = 0.0
    try:
        msgspec.convert(found, SamplingParams).checked()
    except (msgspec.ValidationError, InvalidRequestError) as error:
        raise ConfigError(
            f"{str(path)!r} has sampling parameters that are not possible: {error}."
        ) from None
    return found
