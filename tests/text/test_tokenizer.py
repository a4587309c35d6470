# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from pagoda.errors import InvalidRequestError
from pagoda.text.tokenizers.tokenizer import PairTokens, Tokenizer


def _backend() -> Backend:
    """Two words, and what BERT puts around and between texts."""
    vocabulary = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "b": 4}
    backend = Backend(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    return backend


TOKENIZER = Tokenizer(_backend())


@given(st.integers(0, 9), st.integers(0, 9), st.integers(3, 24))
def test_pairs_are_cut_as_the_library_cuts_them(first: int, second: int, most: int) -> None:
    texts = "a " * first, "b " * second
    expected = _backend()
    expected.enable_truncation(most, strategy="longest_first")
    both = expected.encode(*texts)
    found = TOKENIZER.encode_pair(*texts, add_special_tokens=True, most=most)
    assert found == PairTokens(both.ids, both.type_ids.index(1))


def test_pairs_without_special_tokens_and_of_half_characters() -> None:
    bare = TOKENIZER.encode_pair("a a", "b", add_special_tokens=False)
    assert bare.ids == [3, 3, 4]
    with pytest.raises(InvalidRequestError, match="must be at least 3, the tokens around texts"):
        TOKENIZER.encode_pair("a", "b", add_special_tokens=True, most=2)
    with pytest.raises(InvalidRequestError, match="surrogate"):
        TOKENIZER.encode_pair("a", "\ud800", add_special_tokens=True)
