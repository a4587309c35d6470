# SPDX-License-Identifier: Apache-2.0
"""Bounds of what a body costs to decode, checked before: values are made one by one while other streams wait."""

from __future__ import annotations

from pagoda.errors import InvalidRequestError

MAX_ARRAYS = 20_000
"""Arrays of a body; most of a microsecond each."""
MAX_OBJECTS = 60_000
"""Objects of a body; a fifth of a microsecond each."""
MAX_STRINGS = 120_000
"""Strings of a body, names of fields among them; half a microsecond each."""
MAX_ESCAPES = 1_500_000
"""Backslashes in strings: Python's JSON writes one for each character that is not in ASCII."""
MAX_VALUES = 600_000
"""Values of a body; token ids take thirty nanoseconds each."""


def check_structure(body: bytes) -> None:
    """Raises InvalidRequestError: a body, which need not be JSON, has too many values to be decoded at once.

    The bytes are counted, which is much faster than decoding them. What is inside of strings does not count.
    """
    _check(body.count(b"\\"), MAX_ESCAPES, "escapes in its strings")
    num_quotes = body.count(b'"')
    if num_quotes > 2 * MAX_STRINGS:
        num_quotes -= body.replace(rb"\\", b"").count(rb"\"")
        _check(num_quotes // 2, MAX_STRINGS, "strings")
    limits = (
        (b"[", MAX_ARRAYS, "arrays"),
        (b"{", MAX_OBJECTS, "objects"),
        (b",", MAX_VALUES, "values"),
    )
    if all(body.count(mark) <= most for mark, most, _ in limits):
        return
    outside = _outside_of_strings(body)
    for mark, most, what in limits:
        _check(outside.count(mark), most, what)


def _outside_of_strings(body: bytes) -> bytes:
    if b"\\" in body:
        body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    return b"".join(body.split(b'"')[::2])


def _check(number: int, most: int, what: str) -> None:
    if number > most:
        raise InvalidRequestError(f"the body has more than {most} {what}.")
