# SPDX-License-Identifier: Apache-2.0
"""Tokenizer, detokenizer and chat template give what transformers gives, on awkward strings."""

from __future__ import annotations

import random
import sys
import unicodedata
from pathlib import Path

import pytest
from real_model import LANGUAGES, TEXTS, Oracle

from pagoda.text.model_text import ModelText, load_gguf_text

PIECES = [
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<file_sep>", "<|im_sta", "|>"),
    *("user\n", "assistant", "'s", "'LL", "don't", "I'm", " the", "The", "naïve", "Straße", "ﬁ"),
    *(
        " ",
        "  ",
        "   ",
        "\t",
        "\n",
        "\n\n",
        "\r\n",
        "\u00a0",
        "\u2003",
        "\u200b",
        "\ufeff",
        "\u3000",
    ),
    *("\x00", "\x07", "\x1b[31m", "\x7f", "\x85", "\u2028", "\u2029", "\u00ad"),
    *("👩‍👩‍👧‍👦", "👍🏽", "🏳️‍🌈", "🇩🇪🇫🇷", "😀", "❤️", "\u200d", "\ufe0f"),
    *("שלום", "مرحبا بالعالم", "\u202eevil\u202c", "\u200f", "الـ١٢٣"),
    *("你好", "，世界。", "日本語のテキスト", "한국어", "Привет", "ελληνικά", "ไทย", "हिन्दी"),
    *("e\u0301", "é", "a\u0300\u0301\u0302", "Z̸͇̾a̷̲͝l̵g̴o̷", "\u0301"),
    *("1234567890" * 3, "3.14159", "1,000,000", "½", "²", "Ⅷ", "٣٤", "１２", "0x1F", "1e-9"),
    *(
        "def f(x):\n    return x**2",
        "!=",
        "-->",
        "...",
        "“quoted”",
        "https://a.b/c?d=e&f=%20",
        "$",
        "€",
    ),
    *("\U0001d54f", "\U00020000", "\ue000", "\U0010ffff", "\ufffd", "\ufffe"),
    *("a" * 200, " " * 70, "\n" * 33, "ab " * 40),
]


def _strings() -> list[str]:
    """A thousand: each piece alone, and pieces in random order, with a random character now and then."""
    rng = random.Random(16)
    strings = ["", *PIECES]
    while len(strings) < 1000:
        parts = [rng.choice(PIECES) for _ in range(rng.randint(2, 9))]
        code_point = rng.randrange(0x110000)
        if not 0xD800 <= code_point < 0xE000:
            parts.insert(rng.randrange(len(parts)), chr(code_point))
        strings.append(rng.choice(["", " "]).join(parts))
    return strings


STRINGS = _strings()


@pytest.fixture(scope="module")
def text(gguf: Path) -> ModelText:
    return load_gguf_text(gguf)


@pytest.mark.parametrize("special", [False, True])
def test_token_ids(text: ModelText, oracle: Oracle, special: bool) -> None:
    for string in STRINGS:
        wanted = oracle.tokenizer(string, add_special_tokens=special)["input_ids"]
        assert text.tokenizer.encode(string, add_special_tokens=special) == wanted, repr(string)


def test_every_character_between_words(text: ModelText, oracle: Oracle) -> None:
    """How digits and words are cut depends on the class of a character alone."""
    assigned = [
        chr(i)
        for i in range(sys.maxunicode + 1)
        if unicodedata.category(chr(i)) not in ("Cn", "Co", "Cs") and not 0x3400 <= i <= 0xD7FF
    ]
    strings = ["".join(f"a{c} {c}{c}1" for c in assigned[i::64]) for i in range(64)]
    backend = oracle.tokenizer.backend_tokenizer
    for string, wanted in zip(strings, backend.encode_batch(strings), strict=True):
        assert text.tokenizer.encode(string, add_special_tokens=False) == wanted.ids


@pytest.mark.parametrize("skip", [False, True])
def test_streams_add_up_to_the_whole_text(text: ModelText, oracle: Oracle, skip: bool) -> None:
    """Ids of strings, and any ids at all, whose bytes are often no characters."""
    rng = random.Random(17)
    several = [text.tokenizer.encode(string, add_special_tokens=False) for string in STRINGS]
    several += [[rng.randrange(49152) for _ in range(rng.randint(1, 40))] for _ in range(500)]
    several += [[rng.randrange(300) for _ in range(rng.randint(1, 40))] for _ in range(500)]
    for ids in several:
        wanted = oracle.tokenizer.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )
        decoder = text.tokenizer.incremental((), skip_special_tokens=skip)
        deltas = [*map(decoder.push, ids), decoder.flush()]
        assert "".join(deltas) == wanted
        assert text.tokenizer.decode(ids, skip_special_tokens=skip) == wanted


def test_texts_come_back(text: ModelText) -> None:
    """The vocabulary lacks bytes of rare planes, whose characters nobody gets back; these texts have none."""
    for name in LANGUAGES:
        string = (TEXTS / f"{name}.txt").read_text("utf-8")
        ids = text.tokenizer.encode(string, add_special_tokens=False)
        assert text.tokenizer.decode(ids, skip_special_tokens=False) == string


def test_conversations(text: ModelText, oracle: Oracle) -> None:
    rng = random.Random(18)
    template = text.require_template()
    for i in range(300):
        messages = [
            {"role": ("user", "assistant")[turn % 2], "content": rng.choice(STRINGS)}
            for turn in range(1 + 2 * (i % 3))
        ]
        if i % 2:
            messages.insert(0, {"role": "system", "content": rng.choice(STRINGS)})
        wanted = oracle.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        assert template.render(messages) == wanted


def test_ends_and_sampling(text: ModelText, oracle: Oracle) -> None:
    assert oracle.tokenizer.eos_token_id in text.eos_token_ids
    names = {oracle.tokenizer.convert_ids_to_tokens(i) for i in text.eos_token_ids}
    assert names == {"<|im_end|>", "<|endoftext|>"}
