# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, WordPiece

from pagoda.text.tokenizers.detokenizer import REPLACEMENT, byte_level_alphabet
from pagoda.text.tokenizers.tokenizer import Tokenizer, byte_tokenizer

SPACE_MARK = "▁"


def byte_level() -> Tokenizer:
    vocab = {**byte_level_alphabet(), "Ġa": 256, "ĠðŁ": 257, "æĹ": 258}
    backend = Backend(BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    backend.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("日 本")])
    return Tokenizer(backend)


def sentencepiece(*, strip: bool) -> Tokenizer:
    vocab = {"<unk>": 0, "<s>": 1}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for piece in (SPACE_MARK, f"{SPACE_MARK}a", "b", f"o{SPACE_MARK}w", "é", "<0xZZ>"):
        vocab[piece] = len(vocab)
    backend = Backend(BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens([AddedToken("<s>", normalized=False)])
    return Tokenizer(backend)


def wordpiece() -> Tokenizer:
    vocab = {"[UNK]": 0, "un": 1, "##able": 2, "##s": 3, "dog": 4, "!": 5, "[CLS]": 6}
    backend = Backend(WordPiece(vocab, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken("[CLS]", normalized=False)])
    return Tokenizer(backend)


TOKENIZERS = {
    "byte_level": byte_level(),
    "sentencepiece": sentencepiece(strip=False),
    "sentencepiece_strip": sentencepiece(strip=True),
    "synthetic": byte_tokenizer(),
}


def stream(tokenizer: Tokenizer, prompt: list[int], ids: list[int], *, skip: bool) -> list[str]:
    decoder = tokenizer.incremental(prompt, skip_special_tokens=skip)
    return [*(decoder.push(i) for i in ids), decoder.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300)
@given(ids=st.lists(st.integers(0, 275), max_size=24), skip=st.booleans())
def test_deltas_add_up_to_the_tokenizers_own_decode(name: str, ids: list[int], skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(tokenizer, [], ids, skip=skip)) == expected


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(max_size=20))
def test_characters_are_never_split(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    offset = 2 if name.startswith("sentencepiece") else 0
    deltas = stream(tokenizer, [], [byte + offset for byte in text.encode()], skip=True)
    assert "".join(deltas) == tokenizer.decode([b + offset for b in text.encode()])
    if REPLACEMENT not in text:
        assert all(REPLACEMENT not in delta for delta in deltas)


@given(
    prompt=st.lists(st.sampled_from([1, 258, 259, 260, 261, 262]), max_size=6),
    ids=st.lists(st.integers(0, 263), max_size=12),
)
def test_the_space_that_begins_a_text_is_kept_behind_a_prompt(
    prompt: list[int], ids: list[int]
) -> None:
    tokenizer = TOKENIZERS["sentencepiece_strip"]
    whole = tokenizer.decode(prompt + ids)
    assert tokenizer.decode(prompt) + "".join(stream(tokenizer, prompt, ids, skip=True)) == whole


@pytest.mark.parametrize("ids", [[6, 1, 2, 3, 4, 5, 1, 2], [4], []])
def test_an_unknown_decoder_is_served_by_a_window(ids: list[int]) -> None:
    tokenizer = wordpiece()
    assert "".join(stream(tokenizer, [], ids, skip=True)) == tokenizer.decode(ids)


def test_a_character_comes_with_its_last_byte() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    assert stream(tokenizer, [], list("é!".encode()), skip=True) == ["", "é", "!", ""]


def test_ids_beyond_the_synthetic_vocabulary_render_as_numbers() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.decode([72, 105, 4711]) == "Hi 4711"
    assert tokenizer.encode("Hi", add_special_tokens=True) == [72, 105]
