# SPDX-License-Identifier: Apache-2.0
"""Tokenizers out of GGUF metadata give the ids of the tokenizers that the metadata was made from."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter, TokenType
from gguf_files import add_values, finish
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from transformers import Qwen2Tokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

from pagoda.checkpoints.gguf.reader import read_gguf
from pagoda.checkpoints.resolve import EMBEDDED_MODEL, resolve_model
from pagoda.errors import ConfigError, InvalidRequestError
from pagoda.text.model_text import load_gguf_text, load_model_text, load_text
from pagoda.text.tokenizers.gguf_tokenizer import build_tokenizer
from pagoda.text.tokenizers.gguf_vocabulary import GGUFVocabulary
from pagoda.text.tokenizers.tokenizer import Tokenizer

CONTROLS = ["<|begin|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
MARKS = ["<tool_call>", "<think>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog's tail, and it's 12345 times 67!",
    "Über allen Gipfeln ist Ruh; in allen Wipfeln spürest du kaum einen Hauch.",
    "def f(x):\n    return x ** 2  # ein Quadrat\n\n\tclass A:\r\n        pass\n",
    "你好，世界。これは日本語の文です。한국어도 있습니다. Привет, мир! 😀😃 naïve café",
    "   spaces   and\ttabs \n\n\n new lines    I'LL WE'VE don't  ",
] * 4
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""As in the tokenizer.json of Llama 3."""


def texts() -> st.SearchStrategy[str]:
    """Words of the corpus, special tokens, spaces and any characters, in any order."""
    words = sorted({word for text in CORPUS for word in text.split()})
    pieces = st.one_of(
        st.sampled_from(words),
        st.sampled_from([*CONTROLS, *MARKS, "<s>", "</s>", "<unk>", "<0x41>", "▁"]),
        st.sampled_from([" ", "  ", "\n", "\r\n\n", "\t", "'s", "'LL", "0", "１２", "e\u0301", ""]),
        st.text(max_size=6),
    )
    return st.lists(pieces, max_size=12).map("".join)


# ---- from tokenizers to metadata, as llama.cpp's converter does


def write_tokenizer(
    path: Path, backend: Backend, *, model: str = "gpt2", pad: int = 0, **metadata: Any
) -> Path:
    writer = GGUFWriter(path / "t.gguf", "qwen3")
    writer.add_tokenizer_model(model)
    spec = json.loads(backend.to_str())
    names = {i: token for token, i in backend.get_vocab(with_added_tokens=True).items()}
    added = backend.get_added_tokens_decoder()
    places = range(max(names) + 1 + pad)
    writer.add_token_list([names.get(i, f"[PAD{i}]") for i in places])
    writer.add_token_types([_type_of(names.get(i), added.get(i), model) for i in places])
    if model in ("gpt2", "gemma4"):
        writer.add_token_merges([" ".join(pair) for pair in spec["model"]["merges"]])
    return write_keys(writer, metadata)


def _type_of(token: str | None, added: AddedToken | None, model: str) -> TokenType:
    if token is None:
        return TokenType.UNUSED
    if token == "<unk>":
        return TokenType.UNKNOWN
    if added is not None:
        return TokenType.CONTROL if added.special else TokenType.USER_DEFINED
    if model in ("llama", "gemma4") and token.startswith("<0x") and len(token) == 6:
        return TokenType.BYTE
    return TokenType.NORMAL


def write_keys(writer: GGUFWriter, metadata: Mapping[str, Any]) -> Path:
    keys = {name if "." in name else f"tokenizer.ggml.{name}": name for name in metadata}
    add_values(writer, {key: metadata[name] for key, name in keys.items()})
    finish(writer)
    return writer.path


def tokenizer_of(path: Path) -> Tokenizer:
    return build_tokenizer(GGUFVocabulary(read_gguf(path).metadata))


def train_byte_level(split: pre_tokenizers.PreTokenizer, *, ignore_merges: bool) -> Backend:
    backend = Backend(BPE(ignore_merges=ignore_merges))
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    add_marks(backend)
    return backend


def add_marks(backend: Backend) -> None:
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in CONTROLS])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKS])


def cut(pattern: str) -> pre_tokenizers.PreTokenizer:
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), to_bytes])


def qwen2() -> Backend:
    """What transformers makes of the vocabulary of a Qwen model."""
    trained = train_byte_level(cut(LLAMA3_PATTERN), ignore_merges=False)
    spec = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in spec["merges"]]
    backend = Qwen2Tokenizer(vocab=spec["vocab"], merges=merges).backend_tokenizer
    add_marks(backend)
    return backend


def llama3() -> Backend:
    backend = train_byte_level(cut(LLAMA3_PATTERN), ignore_merges=True)
    _begin_with(backend, "<|begin|>")
    return backend


TO_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
ONLY_TO_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def gpt2() -> Backend:
    return train_byte_level(TO_BYTES, ignore_merges=False)


def smollm() -> Backend:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return train_byte_level(pre_tokenizers.Sequence([digits, TO_BYTES]), ignore_merges=False)


def _begin_with(backend: Backend, token: str) -> None:
    backend.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, backend.token_to_id(token))]
    )


def cut_as(pattern: str) -> Callable[[], Backend]:
    return lambda: train_byte_level(cut(pattern), ignore_merges=False)


GPT4O_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
"""Patterns in tokenizer.json of gpt-oss and of Seed-OSS."""


def cut_in_turn(*patterns: str, ignore_merges: bool = False) -> Callable[[], Backend]:
    """Texts are cut by one pattern after the other."""

    def train() -> Backend:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        sequence = pre_tokenizers.Sequence([*splits, ONLY_TO_BYTES])
        return train_byte_level(sequence, ignore_merges=ignore_merges)

    return train


DEEPSEEK3_PATTERNS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
"""Patterns in tokenizer.json of DeepSeek-V3."""
DEEPSEEK_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK_PATTERNS = (
    r"[\r\n]",
    r"\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u0370-\u0373\u03a3-\u03f5\u0410-\u044f\u0451]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    DEEPSEEK_HAN,
    r"\p{N}+",
)
"""Patterns in tokenizer.json of DeepSeek-V2, with those of its letters that the texts here have."""
DEEPSEEK_CODER_PATTERNS = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_HAN, r"\p{N}")
_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_WORD}{_UPPER}*{_LOWER}+{_SHORT}",
        f"{_WORD}{_UPPER}+{_LOWER}*{_SHORT}",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
"""`pat_str` of Kimi K2's tokenization_kimi.py."""


def qwen35() -> Backend:
    trained = train_byte_level(cut(PRETOKENIZE_REGEX), ignore_merges=False)
    trained.normalizer = normalizers.NFC()
    return trained


def mpt() -> Backend:
    backend = gpt2()
    backend.normalizer = normalizers.NFC()
    return backend


def falcon() -> Backend:
    """The parts of Falcon's tokenizer.json."""
    digits = pre_tokenizers.Digits(individual_digits=False)
    threes = pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")
    marks = pre_tokenizers.Punctuation("contiguous")
    parts = pre_tokenizers.Sequence([marks, TO_BYTES, digits, threes])
    return train_byte_level(parts, ignore_merges=False)


BLOOM_PATTERN = r" ?[^(\s|[.,!?…。，、।۔،])]+"
BAILING_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+"
)
"""Patterns in tokenizer.json of Bloom and of Ling."""
BYTE_LEVEL = {
    **{"mpt": mpt, "falcon": falcon, "bloom": cut_as(BLOOM_PATTERN)},
    "bailingmoe2": cut_as(BAILING_PATTERN),
    "superbpe": cut_in_turn(r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    **{"qwen2": qwen2, "qwen35": qwen35, "llama-bpe": llama3, "gpt-2": gpt2, "smollm": smollm},
    **{"command-r": smollm, "exaone4": gpt2, "glm4": cut_as(LLAMA3_PATTERN)},
    **{"gpt-4o": cut_as(GPT4O_PATTERN), "seed-coder": cut_as(SEED_PATTERN)},
    "deepseek-v3": cut_in_turn(*DEEPSEEK3_PATTERNS),
    "deepseek-llm": cut_in_turn(*DEEPSEEK_PATTERNS),
    "deepseek-coder": cut_in_turn(*DEEPSEEK_CODER_PATTERNS),
    "kimi-k2": cut_in_turn(KIMI_PATTERN, ignore_merges=True),
}


@pytest.fixture(scope="module", params=BYTE_LEVEL)
def byte_level(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Backend, Tokenizer]:
    backend = BYTE_LEVEL[request.param]()
    begin = backend.token_to_id("<|begin|>")
    path = tmp_path_factory.mktemp("tokenizer")
    return backend, tokenizer_of(
        write_tokenizer(path, backend, pre=request.param, bos_token_id=begin, pad=3)
    )


@settings(max_examples=300, deadline=None)
@given(text=texts())
def test_byte_level_ids(byte_level: tuple[Backend, Tokenizer], text: str) -> None:
    backend, tokenizer = byte_level
    assert_alike(backend, tokenizer, text)


def assert_alike(backend: Backend, tokenizer: Tokenizer, text: str) -> None:
    for special in (False, True):
        expected = backend.encode(text, add_special_tokens=special).ids
        assert tokenizer.encode(text, add_special_tokens=special) == expected
    for skip in (False, True):
        decoded = backend.decode(expected, skip_special_tokens=skip)
        assert tokenizer.decode(expected, skip_special_tokens=skip) == decoded


def test_unused_places_stand_for_nothing(tmp_path: Path) -> None:
    backend = gpt2()
    size = backend.get_vocab_size(with_added_tokens=True)
    tokenizer = tokenizer_of(write_tokenizer(tmp_path, backend, pre="gpt-2", pad=2))
    assert tokenizer.token(size) == ""
    assert tokenizer.decode([size + 1, 40]) == backend.decode([40])


# ---- SentencePiece


def train_sentencepiece(*, prefix: bool) -> Backend:
    """Trained as BPE; a merge makes the token with the next id, so scores go down with ids."""
    with_bytes = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    special = ["<unk>", "<s>", "</s>"]
    spaces = normalizers.Replace(" ", "▁")
    trained = Backend(BPE(**with_bytes))
    trained.normalizer = spaces
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    trained.train_from_iterator([f"▁{word}" for t in CORPUS for word in t.split()], trainer)
    spec = json.loads(trained.to_str())["model"]
    # Characters that the corpus has seldom are left to bytes.
    seldom = set("你好世界한국😃")
    kept = [token for token in spec["vocab"] if not seldom & set(token)]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {token: i for i, token in enumerate([*kept[:3], *byte_tokens, *kept[3:]])}
    merges = [
        (left, right) for left, right in spec["merges"] if {left, right, left + right} <= {*vocab}
    ]
    backend = Backend(BPE(vocab=vocab, merges=merges, **with_bytes))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    prepend = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    backend.normalizer = prepend if prefix else spaces
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    add_marks(backend)
    _begin_with(backend, "<s>")
    return backend


def scores_of(backend: Backend) -> list[float]:
    size = backend.get_vocab_size(with_added_tokens=True)
    return [0.0 if i < 259 else float(259 - i) for i in range(size)]


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no prefix"])
def sentencepiece(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Backend, Tokenizer]:
    backend = train_sentencepiece(prefix=request.param)
    path = tmp_path_factory.mktemp("tokenizer")
    keys = {"scores": scores_of(backend), "add_space_prefix": request.param}
    return backend, tokenizer_of(write_tokenizer(path, backend, model="llama", **keys))


@settings(max_examples=300, deadline=None)
@given(text=texts())
def test_merges_in_place_of_scores(text: str, merged: tuple[Backend, Tokenizer]) -> None:
    """Gemma 4 has SentencePiece's pieces, and merges."""
    assert_alike(*merged, text)


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Backend, Tokenizer]:
    backend, path = train_sentencepiece(prefix=False), tmp_path_factory.mktemp("tokenizer")
    keys = {"scores": scores_of(backend), "add_space_prefix": False, "bos_token_id": 1}
    return backend, tokenizer_of(write_tokenizer(path, backend, model="gemma4", **keys))


@settings(max_examples=300, deadline=None)
@given(text=texts())
def test_sentencepiece_ids(sentencepiece: tuple[Backend, Tokenizer], text: str) -> None:
    backend, tokenizer = sentencepiece
    assert_alike(backend, tokenizer, text)


# ---- the embedded model, and what else a file says of text


def test_a_whole_tokenizer_in_the_file_is_taken_as_it_is(tmp_path: Path) -> None:
    files = resolve_model(EMBEDDED_MODEL)
    assert files.directory is not None
    whole = (files.directory / "tokenizer.json").read_text(encoding="utf-8")
    config = json.loads((files.directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    expected = load_model_text(files.directory)
    keys = {
        "tokenizer.huggingface.json": whole,
        "tokenizer.chat_template": config["chat_template"],
        "eos_token_id": 928,
    }
    path = write_tokenizer(tmp_path, Backend.from_str(whole), pre="default", **keys)
    found = load_gguf_text(path)
    assert found.eos_token_ids == expected.eos_token_ids == (926, 928)
    conversation = [{"role": "user", "content": "Say <tool_call> twice, 12 + 30."}]
    prompt = found.require_template().render(conversation)
    assert prompt == expected.require_template().render(conversation)
    ids = expected.tokenizer.encode(prompt, add_special_tokens=False)
    assert found.tokenizer.encode(prompt, add_special_tokens=False) == ids
    assert found.tokenizer.decode(ids) == expected.tokenizer.decode(ids)


def test_end_tokens_are_named_or_known_by_their_spelling(tmp_path: Path) -> None:
    backend = qwen2()
    end, text_end, begin = map(backend.token_to_id, ("<|im_end|>", "<|endoftext|>", "<|begin|>"))
    path = write_tokenizer(tmp_path, backend, pre="qwen2", eot_token_id=begin, eos_token_id=end)
    assert load_gguf_text(path).eos_token_ids == tuple(sorted((end, text_end, begin)))
    plain = train_sentencepiece(prefix=True)
    path = write_tokenizer(tmp_path, plain, scores=scores_of(plain), model="llama")
    spelled = [plain.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    assert load_gguf_text(path).eos_token_ids == (2, *spelled)


def test_the_chat_template_knows_the_special_tokens(tmp_path: Path) -> None:
    backend = gpt2()
    keys = {
        "bos_token_id": backend.token_to_id("<|begin|>"),
        "tokenizer.chat_template": "{{ bos_token }}{{ eos_token }}!",
    }
    path = write_tokenizer(tmp_path, backend, pre="gpt-2", **keys)
    assert load_gguf_text(path).require_template().render([]) == "<|begin|>!"
    (tmp_path / "own.jinja").write_text("mine", encoding="utf-8")
    own = load_gguf_text(path, chat_template=tmp_path / "own.jinja")
    assert own.require_template().render([]) == "mine"
    keys["tokenizer.chat_template.tool_use"] = "{{ tools[0].function.name if tools }}"
    named = load_gguf_text(write_tokenizer(tmp_path, backend, pre="gpt-2", **keys))
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert named.require_template().render([], tools=tools) == "f"
    with pytest.raises(InvalidRequestError, match="no chat template"):
        load_gguf_text(write_tokenizer(tmp_path, backend, pre="gpt-2")).require_template()


def test_sampling_preferences(tmp_path: Path) -> None:
    keys = {"pre": "gpt-2", "general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    files = resolve_model(str(write_tokenizer(tmp_path, gpt2(), **keys)))
    for simulated, expected in ((False, {"temperature": 0.5, "top_k": 20}), (True, {})):
        text = load_text(files, simulated=simulated, chat_template=None)
        assert text.default_sampling == expected
    path = write_tokenizer(tmp_path, gpt2(), **keys | {"general.sampling.temp": -1.0})
    with pytest.raises(ConfigError, match=r"t\.gguf' has sampling parameters that are not possi"):
        load_gguf_text(path)


@pytest.mark.parametrize(
    ("keys", "is_framed"),
    [
        ({}, False),
        ({"add_bos_token": True, "add_eos_token": True}, True),
        ({"add_bos_token": False, "add_eos_token": False}, False),
    ],
)
def test_tokens_around_a_text(keys: dict[str, Any], is_framed: bool, tmp_path: Path) -> None:
    backend = gpt2()
    begin, end = backend.token_to_id("<|begin|>"), backend.token_to_id("<|im_end|>")
    keys = {"bos_token_id": begin, "eos_token_id": end, **keys}
    tokenizer = tokenizer_of(write_tokenizer(tmp_path, backend, pre="gpt-2", **keys))
    plain = tokenizer.encode("fox", add_special_tokens=False)
    framed = [begin, *plain, end] if is_framed else plain
    assert tokenizer.encode("fox", add_special_tokens=True) == framed


def test_a_file_without_its_way_of_cutting_is_taken_as_llama_cpp_takes_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = tokenizer_of(write_tokenizer(tmp_path, gpt2()))
    assert "has no tokenizer.ggml.pre" in caplog.text
    text = "x == 12345, isn't it?  "
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


LETTERS = {"tokens": ["a", "b", "ab"], "merges": ["a b"], "pre": "gpt-2", "model": "gpt2"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": "rwkv"},
            "tokenizer.ggml.model must be one of gpt2, llama, gemma4, bert, t5, got 'rwkv'.",
        ),
        ({"model": None}, "lacks tokenizer.ggml.model, a string."),
        ({"tokens": None}, "lacks tokenizer.ggml.tokens, a list of strings."),
        ({"tokens": "abc"}, "tokenizer.ggml.tokens must be a list of strings, got 'abc'."),
        ({"tokens": [""]}, "tokenizer.ggml.tokens has no token that is used."),
        ({"tokens": ["a" * 5000]}, "tokens has a token of more than 4096 characters."),
        ({"merges": None}, "lacks tokenizer.ggml.merges, a list of strings."),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges has 'ab', which is not two tokens."),
        ({"merges": ["a c"]}, "has no tokenizer that can be built: "),
        ({"token_type": [1, 1]}, "has 3 tokens, but tokenizer.ggml.token_type has 2 values."),
        ({"bos_token_id": 3}, "bos_token_id must be below 3, the number of tokens, got 3."),
        ({"add_bos_token": 1, "bos_token_id": 1}, "add_bos_token must be true or false, got 1."),
        ({"pre": "unheard-of"}, "pre must be one of default, gpt-2, "),
        ({"model": "llama", "merges": None}, "lacks tokenizer.ggml.scores, a list of numbers."),
        (
            {"model": "llama", "merges": None, "scores": [0.5]},
            "has 3 tokens, but tokenizer.ggml.scores has 1 values.",
        ),
        ({"tokenizer.huggingface.json": "{}"}, "has no tokenizer that can be built: "),
        ({"tokenizer.chat_template": "{%"}, "the chat template is not valid Jinja"),
        ({"tokenizer.chat_template": 5}, "tokenizer.chat_template must be a string, got 5."),
    ],
)
def test_wrong_metadata_is_one_sentence(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    keys = {key: value for key, value in (LETTERS | changes).items() if value is not None}
    path = write_keys(GGUFWriter(tmp_path / "t.gguf", "qwen3"), keys)
    with pytest.raises(ConfigError) as caught:
        load_gguf_text(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_flipped_bytes_are_refused_or_read(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = random.Random(seed)
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    kind = rng.choice(["gpt2", "llama"])
    keys = LETTERS | {"model": kind, "scores": [0.0, 0.0, 1.0], "token_type": [1, 1, 1]}
    keys |= {"bos_token_id": 1, "tokenizer.chat_template": "{{ bos_token }}"}
    write_keys(GGUFWriter(path, "qwen3"), keys)
    data = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(len(data))] = rng.choice((0, 1, 0xFF, rng.randrange(256)))
    path.write_bytes(data)
    try:
        text = load_gguf_text(path)
    except ConfigError:
        return
    text.tokenizer.encode("ab", add_special_tokens=True)
