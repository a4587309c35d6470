# SPDX-License-Identifier: Apache-2.0
"""Writes the texts of a model's tokens to standard output: `python -m pagoda.text.token_texts`.

Engines handle token ids only. For grammars they need to know what tokens spell, and ask this program, which reads
a `TokenTextsOrder` from standard input.
"""

from __future__ import annotations

import sys

import msgspec

from pagoda.checkpoints.resolve import resolve_model
from pagoda.engine.structured_output.vocabulary import TokenTexts, TokenTextsOrder
from pagoda.errors import PagodaError
from pagoda.text.model_text import load_text, synthetic_model_text


def token_texts(order: TokenTextsOrder) -> TokenTexts:
    """The texts of the model's tokens. Raises PagodaError: its tokenizer cannot be read."""
    if order.simulated:
        text = synthetic_model_text()
    else:
        files = resolve_model(order.model, load_format=order.load_format)
        text = load_text(files, simulated=False, chat_template=None)
    return TokenTexts(text.tokenizer.spec(), text.eos_token_ids)


def main() -> None:
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=TokenTextsOrder)
    try:
        sys.stdout.buffer.write(msgspec.msgpack.encode(token_texts(order)))
    except PagodaError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
