# SPDX-License-Identifier: Apache-2.0
"""What is not a message is said to be none, whatever is wrong with it."""

from __future__ import annotations

import msgspec
import pytest

from pagoda.ipc.codec import Codec


class Word(msgspec.Struct, tag="word"):
    text: str


NOT_A_MESSAGE = {
    "nothing": b"",
    "of another type": b"\xc0",
    "of another tag": b"\x81\xa4type\xa5other",
    "no UTF-8": b"\x82\xa4type\xa4word\xa4text\xa2\xff\xfe",
    "a tag that is no UTF-8": b"\x82\xa4type\xa2\xff\xfe\xa4text\xa0",
    "deeply nested": b"\x83\xa4type\xa4word\xa4text\xa0\xa4more" + b"\x91" * 100_000,
    "deeply nested at once": b"\x91" * 100_000,
}


@pytest.mark.parametrize("payload", NOT_A_MESSAGE.values(), ids=NOT_A_MESSAGE)
def test_what_is_no_message_is_a_decode_error(payload: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        Codec[Word](Word).decode(payload)


def test_what_is_encoded_is_decoded() -> None:
    codec = Codec[Word](Word)
    assert codec.decode(codec.encode(Word("ü"))) == Word("ü")
