# SPDX-License-Identifier: Apache-2.0
"""Which tokens a grammar may choose from: those that the model and its tokenizer both have."""

from __future__ import annotations

import os

import msgspec
import pytest
from harness import VOCAB_SIZE, make_request
from small_grammars import EOS, GRAMMARS, constraint_of, token_texts

from pagoda.engine.structured_output.constraint import Constraint
from pagoda.engine.structured_output.grammars import Grammars
from pagoda.engine.structured_output.vocabulary import TokenTextsOrder, load_token_texts
from pagoda.errors import PagodaError
from pagoda.messages.frontend import GenerateRequest, Grammar
from pagoda.text.model_text import synthetic_model_text
from pagoda.text.token_texts import token_texts as read_token_texts


def constrained(request_id: str, grammar: Grammar, **fields: object) -> GenerateRequest:
    return make_request(request_id, [1, 2, 3], grammar=grammar, eos_token_ids=(EOS,), **fields)


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 64, 200])
def test_tokens_beyond_the_tokenizer_are_never_allowed(vocab_size: int) -> None:
    grammars = Grammars(token_texts, vocab_size, run=lambda work: work())
    grammars.take(constrained("r", GRAMMARS[1]), GRAMMARS[1])
    ((_, place),) = grammars.drain()
    assert isinstance(place, Constraint)
    mask = place.mask()
    assert mask is not None
    assert len(mask) == -(-vocab_size // 32) * 4
    assert int.from_bytes(mask, "little") >> VOCAB_SIZE == 0


def test_tokens_of_a_smaller_model_alone_are_allowed() -> None:
    texts = msgspec.structs.replace(token_texts(), eos_token_ids=(3,))
    grammars = Grammars(lambda: texts, 40, run=lambda work: work())
    grammar = Grammar("regex", r"(?s:.)*")
    grammars.take(constrained("r", grammar), grammar)
    ((_, place),) = grammars.drain()
    assert isinstance(place, Constraint)
    mask = place.mask()
    assert mask is not None
    assert int.from_bytes(mask, "little") >> 40 == 0


def test_held_back_tokens_are_left_out_where_there_is_a_choice() -> None:
    request = constrained("r", Grammar("regex", "ab?"))
    place = constraint_of(request)
    assert place is not None
    assert place.consume(0)
    bits = int.from_bytes(place.mask() or b"", "little")
    assert bits == 1 << 1 | 1 << EOS
    assert int.from_bytes(place.mask([EOS]) or b"", "little") == 1 << 1
    assert place.mask([1, EOS]) == place.mask()


def test_texts_of_tokens_come_from_a_process_that_reads_the_model() -> None:
    order = TokenTextsOrder("tiny", "dummy", simulated=True)
    texts = load_token_texts(order)
    assert texts == read_token_texts(order)
    assert texts.eos_token_ids == synthetic_model_text().eos_token_ids
    with pytest.raises(PagodaError, match="there is no model directory"):
        load_token_texts(TokenTextsOrder(f"no/such/{os.getpid()}/model", "auto", simulated=False))
