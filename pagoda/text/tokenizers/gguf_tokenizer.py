# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a GGUF file, built from its metadata.

Four kinds are known: byte-level BPE, which the metadata calls `gpt2`, SentencePiece BPE, which it calls `llama`
or, with merges in place of scores, `gemma4`, and the two of `gguf_encoder_tokenizers`. Ids are those that the
tokenizer in the model's directory gives.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from pagoda.checkpoints.fields import Fields
from pagoda.errors import ConfigError
from pagoda.text.tokenizers.gguf_encoder_tokenizers import unigram, wordpiece
from pagoda.text.tokenizers.gguf_vocabulary import (
    BOS,
    BYTE,
    EOS,
    MERGES,
    MODEL,
    NORMAL,
    PRE,
    SCORES,
    SPACE_MARK,
    UNKNOWN,
    USER_DEFINED,
    GGUFVocabulary,
)
from pagoda.text.tokenizers.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

WHOLE = "tokenizer.huggingface.json"
"""A whole tokenizer.json; few files have it."""

ADD_BOS, ADD_EOS = "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"
ADD_SPACE = "tokenizer.ggml.add_space_prefix"


@dataclass(frozen=True)
class _Split:
    """The way in which byte-level BPE cuts a text into words, `tokenizer.ggml.pre`."""

    patterns: tuple[str, ...]
    """One after the other; what matches is a piece, and so is what lies between."""
    behind: tuple[str, ...] = ()
    """The same, of pieces whose bytes are characters."""
    nfc: bool = False
    """Texts are composed first."""
    words_first: bool = False
    """A word that is a token is that token, whatever its merges say."""
    begins: bool = False
    """Texts begin with the BOS token unless the file says otherwise."""
    ends: bool = False
    """The same of the EOS token at their end."""


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_QWEN35 = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c88\u2d00-\u2d2d\ua790-\ua7fa\uab30-\uab68"
    r"\x{10570}-\x{105bc}\x{16e40}-\x{16e7f}\x{1d400}-\x{1d7cb}\x{1df00}-\x{1df1e}]]"
)
"""Letters with case, but for those that the tokenizer of DeepSeek-V2 does not list."""
_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?{_CASED}+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _HAN,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")
_SENTENCES = r" ?[^(\s|[.,!?…。，、।۔،])]+"
"""Words between spaces and marks of several scripts, as Bloom's tokenizer.json has it."""
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+"
)
_AFMOE = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fd5"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    "\u1100-\u11ff]+",
    _DEEPSEEK3[2],
)
"""Digits in threes from the end, and scripts without spaces."""
_NOT_HAN = r"&&[^\p{Han}]]"
_KIMI_UPPER, _KIMI_LOWER = _UPPER[:-1] + _NOT_HAN, _LOWER[:-1] + _NOT_HAN
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}*{_KIMI_LOWER}+{_ENDINGS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}+{_KIMI_LOWER}*{_ENDINGS}?|\p{{N}}{{1,3}}|{_REST}"
)

_SPLITS = {
    "default": _Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(
        (
            *("gpt-2", "exaone4", "phi-2", "jais", "trillion", "granite-docling", "gigachat"),
            *("a.x-4.0", "mellum", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de"),
        ),
        _Split((_GPT2,)),
    ),
    **dict.fromkeys(("mpt", "olmo"), _Split((_GPT2,), nfc=True)),
    **dict.fromkeys(("qwen2", "kormo", "f2llmv2", "megrez"), _Split((_QWEN2,), nfc=True)),
    "qwen35": _Split((_QWEN35,), nfc=True),
    "roberta-bpe": _Split((_GPT2,), begins=True, ends=True),
    **dict.fromkeys(
        ("deepseek-r1-qwen", "stablelm2", "hunyuan", "grok-2", "solar-open"), _Split((_QWEN2,))
    ),
    **dict.fromkeys(
        (
            *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "pixtral"),
            *("midm-2.0", "jina-v5-nano"),
        ),
        _Split((_LLAMA3,), words_first=True, begins=True),
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), _Split((_LLAMA3,))),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _Split((_O200K,))),
    "seed-coder": _Split((_SEED,)),
    "deepseek-llm": _Split(_DEEPSEEK),
    "deepseek-coder": _Split(_DEEPSEEK_CODER),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _Split(_DEEPSEEK3)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _Split((_BAILING,))),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), _Split((_SENTENCES,))),
    "viking": _Split((_SENTENCES, r"\p{N}")),
    "superbpe": _Split((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "falcon": _Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2), behind=(r"\p{N}+", "[0-9][0-9][0-9]")),
    "afmoe": _Split(_AFMOE),
    "kimi-k2": _Split((_KIMI,), words_first=True),
    "tekken": _Split((_TEKKEN,), words_first=True, begins=True),
    **dict.fromkeys(
        ("smollm", "refact", "starcoder", "command-r", "codeshell", "exaone", "minerva-7b"),
        _Split((r"\p{N}", _GPT2)),
    ),
}


def build_tokenizer(vocabulary: GGUFVocabulary) -> Tokenizer:
    """Raises ConfigError: a key is missing or wrong, or the tokenizer is of a kind that Pagoda does not know."""
    metadata = vocabulary.metadata
    try:
        if WHOLE in metadata:
            return Tokenizer(Backend.from_str(metadata.text(WHOLE)))
        return Tokenizer(_backend(vocabulary))
    except ConfigError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(
            f"{metadata.source} has no tokenizer that can be built: {error}."
        ) from None


def _backend(vocabulary: GGUFVocabulary) -> Backend:
    metadata = vocabulary.metadata
    kind, begins, ends = metadata.text(MODEL), True, False
    if kind == "gpt2":
        split = _split(metadata)
        backend, begins, ends = _byte_level(vocabulary, split), split.begins, split.ends
    elif kind in ("llama", "gemma4"):
        backend = _sentencepiece(vocabulary)
    elif kind == "bert":
        backend = wordpiece(vocabulary)
    elif kind == "t5":
        backend, ends = unigram(vocabulary), True
    else:
        metadata.refuse(MODEL, "must be one of gpt2, llama, gemma4, bert, t5")
    # One by one they would be indexed again for each.
    backend.add_tokens(list(vocabulary.added()))
    first = vocabulary.named(BOS) if metadata.flag(ADD_BOS, begins) else None
    last = vocabulary.named(EOS) if metadata.flag(ADD_EOS, ends) else None
    if kind != "bert" and (first is not None or last is not None):
        backend.post_processor = _frame(first, last)
    return backend


def _split(metadata: Fields) -> _Split:
    if PRE not in metadata:
        _log.warning(
            "%s has no %s, so texts are cut into words in the way called 'default'; answers may be worse",
            metadata.source,
            PRE,
        )
    split = _SPLITS.get(metadata.text(PRE, "default"))
    if split is None:
        metadata.refuse(PRE, f"must be one of {', '.join(_SPLITS)}")
    return split


def _byte_level(vocabulary: GGUFVocabulary, split: _Split) -> Backend:
    model = BPE(
        vocab=vocabulary.ids, merges=_merges(vocabulary.metadata), ignore_merges=split.words_first
    )
    backend = Backend(model)
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    words, behind = (
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        for patterns in (split.patterns, split.behind)
    )
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*words, to_bytes, *behind])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocabulary: GGUFVocabulary) -> Backend:
    metadata = vocabulary.metadata
    merges = _merges(metadata) if MERGES in metadata else _merges_by_score(vocabulary)
    unknown = vocabulary.named(UNKNOWN)
    model = BPE(
        vocab=vocabulary.ids,
        merges=merges,
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=BYTE in vocabulary.types,
    )
    backend = Backend(model)
    mark_spaces = normalizers.Replace(" ", SPACE_MARK)
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.flag(ADD_SPACE, True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), mark_spaces])
        backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer = mark_spaces
        backend.decoder = decoders.Sequence(steps)
    return backend


def _merges(metadata: Fields) -> list[tuple[str, str]]:
    """Pairs, the first merges first; a pair is written with one space between its parts."""
    pairs = []
    for merge in metadata.texts(MERGES):
        left, _, right = merge.partition(" ")
        if not left or not right:
            raise ConfigError(
                f"{metadata.source}: {MERGES} has {merge!r}, which is not two tokens."
            )
        pairs.append((left, right))
    return pairs


def _merges_by_score(vocabulary: GGUFVocabulary) -> list[tuple[str, str]]:
    """All pairs that make a token, those of the highest score first.

    SentencePiece always merges the pair whose token has the highest score (Kudo and Richardson 2018).
    """
    ids, scores = vocabulary.ids, vocabulary.of_each(SCORES, vocabulary.metadata.numbers(SCORES))
    joined = [token for token, i in ids.items() if vocabulary.types[i] in (NORMAL, USER_DEFINED)]
    merges = []
    for token in sorted(joined, key=lambda token: (-scores[ids[token]], ids[token])):
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [(left, right) for left, right in cuts if left in ids and right in ids]
        merges += sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges


def _frame(first: int | None, last: int | None) -> processors.TemplateProcessing:
    """Puts a token in front of every text, one behind it, or both; between two texts the last one stands twice."""
    begin, end = "FIRST" * (first is not None), "LAST" * (last is not None)
    ids = [(name, i) for name, i in ((begin, first), (end, last)) if i is not None]
    single, pair = (begin, "$A", end), (begin, "$A", end, end, "$B", end)
    return processors.TemplateProcessing(
        single=[*filter(None, single)], pair=[*filter(None, pair)], special_tokens=ids
    )
