"""The tokenizer of a GGUF file, built from its metadata.

Two kinds are known: byte-level BPE, which the metadata calls `gpt2`, and SentencePiece BPE, which it calls
`llama`. Ids are those that the tokenizer in the model's Hugging Face directory gives.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from pagoda.checkpoints.fields import Fields
from pagoda.errors import ConfigError
from pagoda.frontend.tokenizer import Tokenizer

T = TypeVar("T")

_log = logging.getLogger(__name__)

TOKENS, TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
SCORES, MERGES = "tokenizer.ggml.scores", "tokenizer.ggml.merges"
MODEL, PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
WHOLE = "tokenizer.huggingface.json"
"""A whole tokenizer.json; few files have it."""

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPACE_MARK = "▁"
_MAX_TOKEN_CHARS = 4096
"""Finding the merges of a token takes the square of its length."""

BOS, EOS = "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"
UNKNOWN = "tokenizer.ggml.unknown_token_id"
ADD_BOS, ADD_EOS = "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"
ADD_SPACE = "tokenizer.ggml.add_space_prefix"

_ROLES = {
    "bos_token": BOS,
    "eos_token": EOS,
    "unk_token": UNKNOWN,
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_SENTENCEPIECE_DEFAULTS = {UNKNOWN: 0, BOS: 1, EOS: 2}
_END_KEYS = (EOS, "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
)
"""Control tokens that end an answer. A file names one end token, where generation_config.json names them all."""


@dataclass(frozen=True)
class _Split:
    """The way in which byte-level BPE cuts a text into words, `tokenizer.ggml.pre`."""

    patterns: tuple[str, ...]
    """One after the other; what matches is a piece, and so is what lies between."""
    nfc: bool = False
    """Texts are composed first."""
    words_first: bool = False
    """A word that is a token is that token, whatever its merges say."""
    begins: bool = False
    """Texts begin with the BOS token unless the file says otherwise."""


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
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

_SPLITS = {
    "default": _Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "olmo", "exaone4"), _Split((_GPT2,))),
    "qwen2": _Split((_QWEN2,), nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2"), _Split((_QWEN2,))),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "pixtral"),
        _Split((_LLAMA3,), words_first=True, begins=True),
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), _Split((_LLAMA3,))),
    **dict.fromkeys(("gpt-4o", "llama4"), _Split((_O200K,))),
    "seed-coder": _Split((_SEED,)),
    "tekken": _Split((_TEKKEN,), words_first=True, begins=True),
    **dict.fromkeys(("smollm", "refact", "starcoder", "command-r"), _Split((r"\p{N}", _GPT2))),
}


class Vocabulary:
    def __init__(self, metadata: Fields) -> None:
        """Raises ConfigError: a key is missing or wrong."""
        self.metadata = metadata
        self.tokens = metadata.texts(TOKENS)
        if max(map(len, self.tokens), default=0) > _MAX_TOKEN_CHARS:
            self._refuse(f"has a token of more than {_MAX_TOKEN_CHARS} characters")
        self.types = [_NORMAL] * len(self.tokens)
        if TYPES in metadata:
            self.types = self.of_each(TYPES, metadata.integers(TYPES))
        # The places of unused tokens are filled with names that stand for no text.
        self.ids = {
            token: i
            for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if token and kind != _UNUSED
        }
        if not self.ids:
            self._refuse("has no token that is used")
        self._defaults = _SENTENCEPIECE_DEFAULTS if metadata.text(MODEL, "gpt2") == "llama" else {}

    def special_tokens(self) -> dict[str, str]:
        ids = {role: self.named(key) for role, key in _ROLES.items()}
        return {role: self.tokens[i] for role, i in ids.items() if i is not None}

    def end_token_ids(self) -> tuple[int, ...]:
        named = map(self.named, _END_KEYS)
        spelled = (self.ids.get(token) for token in _END_TOKENS)
        controls = {i for i in spelled if i is not None and self.types[i] == _CONTROL}
        return tuple(sorted(controls.union(i for i in named if i is not None)))

    def named(self, key: str) -> int | None:
        if key not in self.metadata:
            usual = self._defaults.get(key, len(self.tokens))
            return usual if usual < len(self.tokens) else None
        token_id = self.metadata.count(key)
        if token_id >= len(self.tokens):
            self.metadata.refuse(key, f"must be below {len(self.tokens)}, the number of tokens")
        return token_id

    def added(self) -> Iterator[AddedToken]:
        """Tokens that are found in a text before it is cut into words."""
        for token, i in self.ids.items():
            kind = self.types[i]
            if kind in (_CONTROL, _UNKNOWN) or (kind == _USER_DEFINED and _SPACE_MARK not in token):
                yield AddedToken(token, normalized=False, special=kind != _USER_DEFINED)

    def of_each(self, key: str, values: list[T]) -> list[T]:
        """Returns `values`, those under `key`, if each token has one."""
        if len(values) != len(self.tokens):
            self._refuse(f"has {len(self.tokens)} tokens, but {key} has {len(values)} values")
        return values

    def _refuse(self, fault: str) -> NoReturn:
        raise ConfigError(f"{self.metadata.source}: {TOKENS} {fault}.")


def build_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
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


def _backend(vocabulary: Vocabulary) -> Backend:
    metadata = vocabulary.metadata
    kind = metadata.text(MODEL)
    if kind == "gpt2":
        split = _split(metadata)
        backend, begins = _byte_level(vocabulary, split), split.begins
    elif kind == "llama":
        backend, begins = _sentencepiece(vocabulary), True
    else:
        metadata.refuse(MODEL, "must be gpt2 or llama")
    # One by one they would be indexed again for each.
    backend.add_tokens(list(vocabulary.added()))
    first = vocabulary.named(BOS) if metadata.flag(ADD_BOS, begins) else None
    last = vocabulary.named(EOS) if metadata.flag(ADD_EOS, False) else None
    if first is not None or last is not None:
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


def _byte_level(vocabulary: Vocabulary, split: _Split) -> Backend:
    model = BPE(
        vocab=vocabulary.ids, merges=_merges(vocabulary.metadata), ignore_merges=split.words_first
    )
    backend = Backend(model)
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    words = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*words, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocabulary: Vocabulary) -> Backend:
    metadata = vocabulary.metadata
    merges = _merges(metadata) if MERGES in metadata else _merges_by_score(vocabulary)
    unknown = vocabulary.named(UNKNOWN)
    model = BPE(
        vocab=vocabulary.ids,
        merges=merges,
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=_BYTE in vocabulary.types,
    )
    backend = Backend(model)
    mark_spaces = normalizers.Replace(" ", _SPACE_MARK)
    steps = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.flag(ADD_SPACE, True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), mark_spaces])
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


def _merges_by_score(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """All pairs that make a token, those of the highest score first.

    SentencePiece always merges the pair whose token has the highest score (Kudo and Richardson 2018).
    """
    ids, scores = vocabulary.ids, vocabulary.of_each(SCORES, vocabulary.metadata.numbers(SCORES))
    joined = [token for token, i in ids.items() if vocabulary.types[i] in (_NORMAL, _USER_DEFINED)]
    merges = []
    for token in sorted(joined, key=lambda token: (-scores[ids[token]], ids[token])):
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [(left, right) for left, right in cuts if left in ids and right in ids]
        merges += sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges


def _frame(first: int | None, last: int | None) -> processors.TemplateProcessing:
    """Puts a token in front of every text, one behind it, or both."""
    begin, end = "FIRST" * (first is not None), "LAST" * (last is not None)
    ids = [(name, i) for name, i in ((begin, first), (end, last)) if i is not None]
    return processors.TemplateProcessing(single=f"{begin} $A {end}".strip(), special_tokens=ids)
