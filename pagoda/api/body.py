"""The bodies of requests: JSON text becomes a struct, or an error that names the field.

A field works, or it is refused unless its value changes nothing. Unknown fields are refused by name, or logged
once and ignored if the operator says so. A field that is null counts as left out.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, TypeVar, cast, get_type_hints

import msgspec
from msgspec import Meta

from pagoda.api.body_structure import check_structure
from pagoda.errors import InvalidRequestError, refuse
from pagoda.frontend.async_utils import LongWork
from pagoda.ipc.clock import MAX_TIMEOUT_S

T = TypeVar("T")

Timeout = Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)]
"""Field `timeout` of bodies: seconds from the arrival of the request until it ends, complete or not."""

LARGE_BODY_BYTES = 64 << 10
"""Longer bodies are decoded in a thread, so that other streams go on meanwhile."""

_MAX_QUOTED_CHARS = 256
_MAX_UNKNOWN_NAMES = 1000
"""Names that are logged; clients could make up any number of them."""
_log = logging.getLogger("pagoda.api")
_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MEDIA = re.compile(r"Invalid enum value '(?P<kind>\w*(?:image|audio|video|file)\w*)'$")
"""Parts of messages that are no text."""
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`$")


class UnknownFields:
    """Names of unknown fields that clients have sent; each is logged once."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def note(self, name: str) -> None:
        if name not in self.names and len(self.names) < _MAX_UNKNOWN_NAMES:
            self.names.add(name)
            _log.warning("the unknown field %s of a request is ignored", name[:_MAX_QUOTED_CHARS])


@cache
def neutral_values(kind: type[msgspec.Struct]) -> dict[str, tuple[object, ...]]:
    """The fields that are not supported, with the values (besides null) that change nothing.

    Such a field is declared as `Annotated[Any, (value, ...)]`. `typing` makes one object of equal declarations,
    and 0 equals False: a number alone is declared as `(0, 0.0)`.
    """
    hints = get_type_hints(kind, include_extras=True)
    notes = {name: getattr(hint, "__metadata__", (None,))[0] for name, hint in hints.items()}
    return {name: note for name, note in notes.items() if isinstance(note, tuple)}


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def parse_body(body: bytes, kind: type[T], unknown: UnknownFields | None = None) -> T:
    """Decodes and checks a JSON body. With `unknown`, unknown fields of it are noted there and ignored.
    Raises InvalidRequestError: the body is not JSON, or not such a body; names the field."""
    decode = _decoder(cast(Any, kind)).decode
    if len(body) > LARGE_BODY_BYTES:
        check_structure(body)
    try:
        try:
            parsed: T = decode(body)
        except msgspec.ValidationError as error:
            if unknown is None or not _UNKNOWN.match(str(error)):
                raise
            parsed = decode(_known_part(body, cast(Any, kind), unknown))
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
        _check_neutral(parsed)
    _check_duplicates(body)
    return parsed


async def parse_beside(
    body: bytes,
    kind: type[T],
    threads: LongWork,
    unknown: UnknownFields | None = None,
    *,
    tenant: str = "",
) -> T:
    """The body, decoded in one of `threads` if it is large, in the line of `tenant`. Raises: as `parse_body`."""
    if len(body) <= LARGE_BODY_BYTES:
        return parse_body(body, kind, unknown)
    return await threads.run(lambda: parse_body(body, kind, unknown), tenant)


def _known_part(body: bytes, kind: type[msgspec.Struct], unknown: UnknownFields) -> bytes:
    """The body without the fields that `kind` does not have."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    for name in fields.keys() - known:
        unknown.note(name)
        del fields[name]
    return msgspec.json.encode(fields)


def convert_body(fields: Mapping[str, Any], kind: type[T]) -> T:
    """The body of another API, translated to the fields of `kind`, as that struct.
    Raises InvalidRequestError: the fields are not such a body; names the field."""
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        converted: T = msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error)) from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply.", kind="invalid_json") from None
    if isinstance(converted, msgspec.Struct):
        _check_neutral(converted)
    return converted


def text_in(fields: Mapping[str, Any], name: str, place: str) -> str:
    """The string `name` of an object at `place` in a body. Raises InvalidRequestError: it is missing, or none."""
    value = fields.get(name)
    if value is None:
        refuse(f"{place}.{name}", "is missing", "missing_field")
    if not isinstance(value, str):
        refuse(f"{place}.{name}", "must be a string")
    return value


def joined_text(content: object, place: str, part_text: Callable[[object, str], str]) -> str:
    """The text at `place` in a body: a string, or the lines of a list of parts, each read by `part_text`, which
    gets the part and its place. Raises InvalidRequestError: it is neither."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        refuse(place, "must be a string or a list")
    return "\n".join(part_text(part, f"{place}[{i}]") for i, part in enumerate(content))


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


def _check_neutral(body: msgspec.Struct) -> None:
    for name, neutral in neutral_values(type(body)).items():
        value = getattr(body, name)
        # 0, 0.0 and False are one to `typing`, which may hand out the note of another field for them.
        if value is not None and not any(value == same for same in neutral):
            values = " or ".join(map(repr, neutral))
            hint = f" other than {values}" if neutral else ""
            message = f"{name}{hint} is not supported yet."
            raise InvalidRequestError(message, param=name, kind="not_supported")
