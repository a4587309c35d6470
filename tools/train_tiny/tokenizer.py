# SPDX-License-Identifier: Apache-2.0
"""The tokenizer: byte-level BPE whose merges spell out a fixed list of boilerplate pieces.

A piece (` What`, ` upper`, `": "`) is matched as a whole by the Split regex and merged left to
right into one token; everything else falls apart into single bytes. So digits are always single
tokens and a word in a question is always spelled letter by letter, with or without quotes.

    python -m tools.train_tiny.tokenizer --out DIR
"""

from __future__ import annotations

import argparse
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
SPECIAL_TOKENS: tuple[str, ...] = (END_OF_TEXT, IM_START, IM_END)
ADDED_TOKENS: tuple[str, ...] = (
    "<tool_call>",
    "</tool_call>",
    "<tools>",
    "</tools>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
VOCAB_MULTIPLE = 64

TEMPLATE_FILE = Path(__file__).with_name("chat_template.jinja")

# Words after a space and capitalised words; each is matched only as a whole word.
_SPACED = """
a after an and answer are arithmetic as assist assistant at backwards briefly call can capital
each exactly expression find for from function functions have helpful how in is it json key larger
largest letter letters list may me more number numbers object occur of often old one only or order
other phrase precise provided query result return schema signatures small smaller smallest sum tags
than that the the these this times to tools up upper user value values very which with within word
you your case minus less greater many does years I JSON Tools XML
"""
_CAPITAL = """
Add Answer Calculate Convert Count Evaluate Find For Hello Here How I Look Put Read Remember Repeat
Reverse Say Sort Spell Subtract The These Upper Use What Which Who Write You
"""
_WORDS: tuple[str, ...] = (*(f" {w}" for w in _SPACED.split()), *_CAPITAL.split())
# Pieces that are not words. None is a quote followed by letters alone, so quoted words stay
# letters.
_MARKS: tuple[str, ...] = (
    "assistant\n",
    "system\n",
    "user\n",
    " = ",
    " + ",
    " - ",
    ", ",
    "\n\n",
    '": ',
    '": "',
    '": ["',
    '", "',
    '"}',
    '"]',
    '{"',
    '{"type": "string"}',
    '{"type": "integer"}',
    '{"type": "object", "properties": ',
    '}, "required": ["',
    '{"type": "function", "function": ',
    '{"name": "',
    '{"name": <function-name>, "arguments": <args-json-object>}',
    '{"expression": ',
    '{"key": ',
    '", "description": "',
    '", "parameters": ',
    '", "arguments": ',
)
PIECES: tuple[str, ...] = (*_WORDS, *_MARKS)

# Merges of pieces that begin with an earlier character here rank before the others, so a chain
# is never broken up by another piece's chain (tests check that every piece is one token).
_FIRST_CHARACTERS = (" ", "{", "}", '"', ",", "\n")


def _rank(piece: str) -> tuple[int, int, str]:
    """Order the pieces' merges: listed first characters, capitals, small letters; long first."""
    first = piece[0]
    if first in _FIRST_CHARACTERS:
        stage = _FIRST_CHARACTERS.index(first)
    else:
        stage = len(_FIRST_CHARACTERS) + first.islower()
    return stage, -len(piece), piece


def _pattern() -> str:
    def alternatives(items: tuple[str, ...]) -> str:
        longest_first = sorted(items, key=lambda item: (-len(item), item))
        return "|".join(re.sub(r"([^\w\s<>\",:=])", r"\\\1", item) for item in longest_first)

    pieces, words = alternatives(_MARKS), alternatives(_WORDS)
    return f"(?:{pieces})|(?:{words})(?![A-Za-z0-9])|[\\s\\S]"


def _byte_symbols() -> dict[int, str]:
    """Return the printable symbol of each byte in byte-level BPE (the GPT-2 table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {b: chr(b) for b in printable}
    free = (b for b in range(256) if b not in table)
    table.update({b: chr(256 + i) for i, b in enumerate(free)})
    return dict(sorted(table.items()))


def _merges(symbols: dict[int, str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the new tokens and the merges: a chain from left to right for every piece."""
    tokens: dict[str, None] = {}
    merges: dict[tuple[str, str], None] = {}
    for piece in sorted(PIECES, key=_rank):
        spelled = [symbols[b] for b in piece.encode()]
        for i in range(1, len(spelled)):
            left = "".join(spelled[:i])
            merges.setdefault((left, spelled[i]))
            tokens.setdefault(left + spelled[i])
    return list(tokens), list(merges)


def build_tokenizer() -> Tokenizer:
    """Build the tokenizer from the lists above; nothing is learned from data."""
    symbols = _byte_symbols()
    tokens, merges = _merges(symbols)
    vocab = {token: i for i, token in enumerate([*symbols.values(), *tokens])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = Sequence(
        [
            Split(Regex(_pattern()), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ADDED_TOKENS])
    return tokenizer


def padded_vocab_size(tokenizer: Tokenizer) -> int:
    """Return the vocabulary size rounded up to the embedding's multiple."""
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    return -(-size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token that must exist."""
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return found


@lru_cache(maxsize=1)
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(TEMPLATE_FILE.read_text(encoding="utf-8"))


def render_chat(
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    **kwargs: Any,
) -> str:
    """Render a chat through the chat template, as a server does."""
    return _template().render(
        messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs
    )


def tokenizer_config(max_length: int) -> dict[str, Any]:
    """Return tokenizer_config.json, the chat template in it."""
    tokenizer = build_tokenizer()
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token in SPECIAL_TOKENS,
        }
        for token in (*SPECIAL_TOKENS, *ADDED_TOKENS)
    }
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "bos_token": None,
        "chat_template": TEMPLATE_FILE.read_text(encoding="utf-8"),
        "clean_up_tokenization_spaces": False,
        "eos_token": IM_END,
        "model_max_length": max_length,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def save_tokenizer(folder: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    text = json.dumps(tokenizer_config(max_length), indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--max-length", type=int, default=2048)
    args = parser.parse_args()
    save_tokenizer(args.out, args.max_length)


if __name__ == "__main__":
    main()
