# SPDX-License-Identifier: Apache-2.0
"""The bodies of requests: JSON text becomes a struct, or an error that names the field.

A field works, or it is refused unless its value changes nothing; `pagoda.api.bodies.ignored_fields` says which
fields change nothing at any value. A field that is null counts as left out, and a number such as 5.0 as a whole
one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, TypeVar, cast, get_type_hints

import msgspec
from msgspec import Meta

from pagoda.api.bodies.body_structure import check_structure
from pagoda.api.bodies.ignored_fields import Hint, Ignored
from pagoda.concurrency.async_utils import LongWork
from pagoda.errors import InvalidRequestError, refuse
from pagoda.ipc.clock import MAX_TIMEOUT_S
from pagoda.whole_numbers import whole_numbers

T = TypeVar("T")

Timeout = Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)]
"""Field `timeout` of bodies: seconds from the arrival of the request until it ends, complete or not."""

LARGE_BODY_BYTES = 64 << 10
"""Longer bodies are decoded in a thread, so that other streams go on meanwhile."""

_MAX_QUOTED_CHARS = 256
_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MEDIA = re.compile(r"Invalid enum value '(?P<kind>\w*(?:image|audio|video|file)\w*)'$")
"""Parts of messages that are no text."""
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`$")


@cache
def neutral_values(kind: type[msgspec.Struct]) -> dict[str, tuple[object, ...] | Hint]:
    """The fields that are not supported, with the values (besides null) that change nothing, or as a hint.

    Such a field is declared as `Annotated[Any, (value, ...)]`, or with a `Hint`. `typing` makes one object of
    equal declarations, and 0 equals False: a number alone is declared as `(0, 0.0)`.
    """
    hints = get_type_hints(kind, include_extras=True)
    notes = {name: getattr(hint, "__metadata__", (None,))[0] for name, hint in hints.items()}
    return {name: note for name, note in notes.items() if isinstance(note, tuple | Hint)}


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def parse_body(body: bytes, kind: type[T], ignored: Ignored | None = None) -> T:
    """Decodes and checks a JSON body; fields without effect are noted in `ignored`.
    Raises InvalidRequestError: the body is not JSON, or not such a body; names the field."""
    ignored = ignored or Ignored()
    if len(body) > LARGE_BODY_BYTES:
        check_structure(body)
    try:
        parsed: T = _decoded(body, kind, ignored)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error)) from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply.", kind="invalid_json") from None
    except UnicodeDecodeError:
        raise InvalidRequestError("the body is not valid UTF-8.", kind="invalid_json") from None
    except ValueError as error:
        message = f"the body is not valid JSON: {error}."
        raise InvalidRequestError(message, kind="invalid_json") from None
    if isinstance(parsed, msgspec.Struct):
        _check_neutral(parsed, ignored)
    _check_duplicates(body)
    return parsed


async def parse_beside(
    body: bytes,
    kind: type[T],
    threads: LongWork,
    ignored: Ignored | None = None,
    *,
    tenant: str = "",
) -> T:
    """The body, decoded in one of `threads` if it is large, in the line of `tenant`. Raises: as `parse_body`."""
    if len(body) <= LARGE_BODY_BYTES:
        return parse_body(body, kind, ignored)
    return await threads.run(lambda: parse_body(body, kind, ignored), tenant)


def _decoded(body: bytes, kind: type[T], ignored: Ignored) -> T:
    """The body without unknown fields that may be ignored, and with whole numbers where they were written as 5.0.
    Raises msgspec.ValidationError: it is no such body."""
    decode = _decoder(cast(Any, kind)).decode
    whole: set[str] = set()
    is_known = False
    while True:
        try:
            return cast(T, decode(body))
        except msgspec.ValidationError as error:
            place = _PLACE.search(str(error))
            root = _root(place["path"]) if place else ""
            if place is None and _UNKNOWN.match(str(error)) and not is_known:
                is_known = True
                body = _known_part(body, cast(Any, kind), ignored)
            elif str(error).startswith("Expected `int") and root not in whole:
                whole.add(root)
                body = _with_whole_numbers(body, root)
            else:
                raise


def _root(path: str) -> str:
    """The field of a body that a place is in."""
    return re.split(r"[.\[]", path, maxsplit=1)[0]


def _known_part(body: bytes, kind: type[msgspec.Struct], ignored: Ignored) -> bytes:
    """The body without the fields that `kind` does not have and that may be ignored; notes them."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    for name in [it for it in fields if it not in known and ignored.takes(it)]:
        ignored.note(name)
        del fields[name]
    return msgspec.json.encode(fields)


def _with_whole_numbers(body: bytes, root: str) -> bytes:
    """The JSON object with whole numbers for floats that are whole: in its field `root`, and where a float is all
    of another field's value."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    for name, raw in fields.items():
        if name == root or _is_number(raw):
            fields[name] = msgspec.Raw(msgspec.json.encode(whole_numbers(msgspec.json.decode(raw))))
    return msgspec.json.encode(fields)


def _is_number(raw: msgspec.Raw) -> bool:
    return bytes(raw)[:1] in b"-0123456789"


def convert_body(fields: Mapping[str, Any], kind: type[T], ignored: Ignored) -> T:
    """The body of another API, translated to the fields of `kind`, as that struct; fields without effect are noted
    in `ignored`.
    Raises InvalidRequestError: the fields are not such a body; names the field."""
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        converted: T = msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error)) from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply.", kind="invalid_json") from None
    if isinstance(converted, msgspec.Struct):
        _check_neutral(converted, ignored)
    return converted


def text_in(fields: Mapping[str, Any], name: str, place: str) -> str:
    """The string `name` of an object at `place` in a body. Raises InvalidRequestError: it is missing, or none."""
    value = fields.get(name)
    if value is None:
        refuse(f"{place}.{name}", "is missing", "missing_field")
    if not isinstance(value, str):
        refuse(f"{place}.{name}", "must be a string")
    return value


def text_or_parts(
    content: object, place: str, part_text: Callable[[object, str], str]
) -> str | list[dict[str, str]]:
    """The content at `place` in a body, a string or a list of parts, as chat completions have it. `part_text`
    reads a part; it gets the part and its place. Raises InvalidRequestError: the content is neither."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        refuse(place, "must be a string or a list")
    return content_of([part_text(part, f"{place}[{i}]") for i, part in enumerate(content)])


def content_of(texts: Sequence[str]) -> str | list[dict[str, str]]:
    """The content of a message of chat completions with these texts: parts if there are several."""
    if len(texts) > 1:
        return [{"type": "text", "text": text} for text in texts]
    return "".join(texts)


_NOT_BRACES = bytes(byte for byte in range(256) if byte not in b"{}")


def _check_duplicates(body: bytes) -> None:
    """Refuses a key that is given twice in one object. `body` is valid JSON; it is searched for quotes only.

    Decoders keep the last of two values, other programs the first: a proxy before the server would see another
    request than the server.
    """
    # Behind these, every quote begins or ends a string. Raw control characters are in no JSON string.
    has_escapes = b"\\" in body
    if has_escapes:
        body = body.replace(rb"\\", b"\x01").replace(rb"\"", b"\x02")
    pieces = body.split(b'"')  # outside, string, outside, string, ..., outside
    open_objects: list[set[bytes]] = []
    for index in range(0, len(pieces) - 1, 2):
        for brace in pieces[index].translate(None, _NOT_BRACES):
            if brace == 0x7B:
                open_objects.append(set())
            else:
                open_objects.pop()
        if not pieces[index + 2].lstrip().startswith(b":"):
            continue
        key = pieces[index + 1]
        if has_escapes and not key.isalnum():  # "\\u0061" is "a"
            escaped = key.replace(b"\x01", rb"\\").replace(b"\x02", rb"\"")
            key = msgspec.json.decode(b'"%b"' % escaped, type=str).encode()
        if key in open_objects[-1]:
            name = key.decode()[:_MAX_QUOTED_CHARS]
            message = f"{name!r} is given twice in one object."
            raise InvalidRequestError(message, param=name, kind="duplicate_field")
        open_objects[-1].add(key)


def _invalid_field(message: str) -> InvalidRequestError:
    place = _PLACE.search(message)
    path = place["path"] if place else ""
    reason = message[: place.start()] if place else message
    for pattern, rule, kind in (
        (_UNKNOWN, "is not a known field", "unknown_field"),
        (_MISSING, "is missing", "missing_field"),
    ):
        found = pattern.match(reason)
        if found:
            name = found["name"][:_MAX_QUOTED_CHARS]
            param = f"{path}.{name}" if path else name
            return InvalidRequestError(f"{param} {rule}.", param=param, kind=kind)
    media = _MEDIA.match(reason)
    if media and path.endswith("].type"):
        rule = "is not supported: this server reads text only; send parts of type 'text'"
        message = f"{path}: {media['kind']!r} {rule}."
        return InvalidRequestError(message, param=path, kind="not_supported")
    reason = reason.replace("`", "")
    return InvalidRequestError(
        f"{path or 'the body'}: {reason[:1].lower()}{reason[1:]}.", param=path or None
    )


def _check_neutral(body: msgspec.Struct, ignored: Ignored, prefix: str = "") -> None:
    for field in body.__struct_fields__:
        inner = getattr(body, field)
        if isinstance(inner, msgspec.Struct):
            _check_neutral(inner, ignored, f"{prefix}{field}.")
    for field, note in neutral_values(type(body)).items():
        name = f"{prefix}{field}"
        neutral = note.served if isinstance(note, Hint) else note
        value = getattr(body, field)
        # 0, 0.0 and False are one to `typing`, which may hand out the note of another field for them.
        if value is None or any(value == same for same in neutral):
            continue
        if isinstance(note, Hint):
            ignored.note(name)
            continue
        values = " or ".join(map(repr, neutral))
        hint = f" other than {values}" if neutral else ""
        raise InvalidRequestError(
            f"{name}{hint} is not supported yet.", param=name, kind="not_supported"
        )
