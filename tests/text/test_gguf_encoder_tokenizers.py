# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of encoders out of GGUF metadata give the ids of those that the metadata was made from, pairs too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf import GGUFWriter, TokenType
from gguf_files import finish
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    Tokenizer as Backend,
)
from tokenizers import (
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from pagoda.checkpoints.gguf.reader import read_gguf
from pagoda.errors import ConfigError
from pagoda.text.tokenizers.gguf_tokenizer import build_tokenizer
from pagoda.text.tokenizers.gguf_vocabulary import GGUFVocabulary
from pagoda.text.tokenizers.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog's tail, and it's 12345 times 67!",
    "Über allen Gipfeln ist Ruh; in allen Wipfeln spürest du kaum einen Hauch.",
    "你好，世界。これは日本語の文です。 Привет, мир! naïve café   ABC \t\n def",
] * 4
BERT_MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA_MARKS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(sorted({word for text in CORPUS for word in text.split()})),
        st.sampled_from([*BERT_MARKS, *ROBERTA_MARKS, " ", "  ", "\n", "é", "e\u0301", "##a", "▁"]),
        st.text(max_size=6),
    ),
    max_size=10,
).map(" ".join)


def bert(*, lowercase: bool) -> Backend:
    """The tokenizer of BERT, cased or not."""
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=BERT_MARKS, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return backend


def xlm_roberta() -> Backend:
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=ROBERTA_MARKS, unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return _framed(backend)


def roberta() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=ROBERTA_MARKS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return _framed(backend)


def _framed(backend: Backend) -> Backend:
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return backend


def _phantom(token: str, kind: TokenType) -> str:
    """A token of BERT as llama.cpp's converter spells it."""
    if kind == TokenType.CONTROL:
        return token
    return token[2:] if token.startswith("##") else f"▁{token}"


def write(path: Path, backend: Backend, model: str) -> Path:
    writer = GGUFWriter(path / "t.gguf", "bert")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre("roberta-bpe" if model == "gpt2" else "default")
    vocab = backend.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    marks = BERT_MARKS if model == "bert" else ROBERTA_MARKS
    kinds = [TokenType.CONTROL if token in marks else TokenType.NORMAL for token in tokens]
    spec = json.loads(backend.to_str())["model"]
    if model == "bert":
        tokens = [_phantom(token, kind) for token, kind in zip(tokens, kinds, strict=True)]
        writer.add_unk_token_id(1)
        writer.add_sep_token_id(3)
    else:
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(3)
    if model == "t5":
        writer.add_token_scores([score for _, score in spec["vocab"]])
    if model == "gpt2":
        writer.add_token_merges([" ".join(pair) for pair in spec["merges"]])
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    finish(writer)
    return writer.path


MADE = {
    "uncased": (lambda: bert(lowercase=True), "bert"),
    "cased": (lambda: bert(lowercase=False), "bert"),
    "unigram": (xlm_roberta, "t5"),
    "bytes": (roberta, "gpt2"),
}


@pytest.fixture(scope="module", params=MADE)
def encoder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Backend, Tokenizer]:
    make, model = MADE[request.param]
    backend = make()
    path = write(tmp_path_factory.mktemp("tokenizer"), backend, model)
    return backend, build_tokenizer(GGUFVocabulary(read_gguf(path).metadata))


@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_ids(encoder: tuple[Backend, Tokenizer], text: str) -> None:
    backend, tokenizer = encoder
    for special in (True, False):
        expected = backend.encode(text, add_special_tokens=special).ids
        assert tokenizer.encode(text, add_special_tokens=special) == expected


@settings(max_examples=50, deadline=None)
@given(first=TEXTS, second=TEXTS)
def test_pairs(encoder: tuple[Backend, Tokenizer], first: str, second: str) -> None:
    backend, tokenizer = encoder
    expected = backend.encode(first, second)
    found = tokenizer.encode_pair(first, second, add_special_tokens=True)
    types = expected.type_ids
    assert found.ids == expected.ids
    assert found.second == (types.index(1) if 1 in types else 0)


def test_a_vocabulary_without_a_separator(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "t.gguf", "bert")
    writer.add_tokenizer_model("bert")
    writer.add_token_list(["[UNK]", "[CLS]", "▁a"])
    finish(writer)
    message = "lacks the token .SEP., and tokenizer.ggml.seperator_token_id names none"
    with pytest.raises(ConfigError, match=message):
        build_tokenizer(GGUFVocabulary(read_gguf(writer.path).metadata))
