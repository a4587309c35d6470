# SPDX-License-Identifier: Apache-2.0
"""Messages of `envoy.service.ext_proc.v3.ExternalProcessor` and of `grpc.health.v1.Health`, as far as a picker
reads and writes them.

Numbers of fields are those of Envoy's api/envoy/service/ext_proc/v3/external_processor.proto at 0015fbd5; the
endpoint picker protocol is docs/proposals/004-endpoint-picker-protocol of
kubernetes-sigs/gateway-api-inference-extension at 0fc3b125.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pagoda.plugins.epp.wire import encode, field_of, fields_of, number_of

DESTINATION = "x-gateway-destination-endpoint"
"""Header, and key of dynamic metadata, of the picked endpoint."""
PREFILLER = "x-prefiller-host-port"
"""Header of the endpoint that is to compute the prompt, which llm-d's routing proxy at the picked one reads."""
_NAMESPACE = "envoy.lb"
_SUBSET_NAMESPACE, _SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
_OVERWRITE = 2
"""`HeaderValueOption.append_action`: a header of the client's own does not count."""
_CHUNK_BYTES = 62_000
"""Envoy takes less than 64 KiB in one streamed body."""
_MOST_LISTED, _OF_ENTRY = 4096, 8
"""Entries of a list of headers or endpoints, and fields of each."""
FULL_DUPLEX = 4
"""`ProcessingMode.BodySendMode` of bodies that come as they are, and are sent back."""


class Part(enum.IntEnum):
    """Parts of a request and its answer, by the fields of `ProcessingRequest`."""

    REQUEST_HEADERS = 2
    RESPONSE_HEADERS = 3
    REQUEST_BODY = 4
    RESPONSE_BODY = 5
    REQUEST_TRAILERS = 6
    RESPONSE_TRAILERS = 7

    @property
    def reply(self) -> int:
        """The field of `ProcessingResponse` that answers it."""
        return {2: 1, 3: 2, 4: 3, 5: 4, 6: 5, 7: 6}[self]


_PARTS = frozenset(Part)


@dataclass(frozen=True)
class Processing:
    """A `ProcessingRequest`."""

    part: Part
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_end: bool = False
    subset: Sequence[str] | None = None
    """Endpoints of which one must be picked; None for all."""
    request_mode: int | None = None
    """Mode of the request's body; None if the message does not say."""
    response_mode: int | None = None
    is_observed_only: bool = False
    """Nobody waits for a reply."""


def decode_processing(data: bytes) -> Processing:
    """Raises ValueError: it is no `ProcessingRequest`."""
    part, content = None, b""
    subset: Sequence[str] | None = None
    modes: tuple[int | None, int | None] = (None, None)
    is_observed_only = False
    for number, value in fields_of(data):
        if isinstance(value, int):
            is_observed_only |= number == 10 and bool(value)
        elif number in _PARTS:
            part, content = Part(number), value
        elif number == 8:
            subset = _subset_of(value)
        elif number == 11:
            modes = number_of(value, 1), number_of(value, 2)
    if part is None:
        raise ValueError("a message has none of the parts of a request")
    headers: Mapping[str, str] = {}
    body, is_end = b"", False
    if part in (Part.REQUEST_HEADERS, Part.RESPONSE_HEADERS):
        headers, is_end = _headers_of(field_of(content, 1)), bool(number_of(content, 3))
    elif part in (Part.REQUEST_BODY, Part.RESPONSE_BODY):
        body, is_end = field_of(content, 1), bool(number_of(content, 2))
    return Processing(part, headers, body, is_end, subset, *modes, is_observed_only)


def _headers_of(data: bytes) -> dict[str, str]:
    """A `HeaderMap`, whose values are in `raw_value`, or in `value` of older proxies."""
    headers: dict[str, str] = {}
    for number, one in fields_of(data, _MOST_LISTED):
        if number == 1 and isinstance(one, bytes):
            key = field_of(one, 1, _OF_ENTRY).decode(errors="replace").lower()
            value = field_of(one, 3, _OF_ENTRY) or field_of(one, 2, _OF_ENTRY)
            headers[key] = value.decode(errors="replace")
    return headers


def _subset_of(metadata: bytes) -> list[str] | None:
    """The subset in a `Metadata`, whose values are `google.protobuf.Struct`s."""
    struct = _entry(metadata, 1, _SUBSET_NAMESPACE)
    value = None if struct is None else _entry(struct, 1, _SUBSET)
    if value is None:
        return None
    endpoints = [
        field_of(one, 3, _OF_ENTRY).decode(errors="replace")
        for number, one in fields_of(field_of(value, 6), _MOST_LISTED)
        if number == 1 and isinstance(one, bytes)
    ]
    text = field_of(value, 3).decode(errors="replace")
    return [*endpoints, *filter(None, (part.strip() for part in text.split(",")))]


def _entry(data: bytes, number: int, key: str) -> bytes | None:
    """The value of a key in a map; None if it is not there."""
    entries = (it for name, it in fields_of(data, _MOST_LISTED) if name == number)
    for entry in entries:
        if isinstance(entry, bytes) and field_of(entry, 1, _OF_ENTRY) == key.encode():
            return field_of(entry, 2, _OF_ENTRY)
    return None


def empty_reply(part: Part) -> bytes:
    """Goes on with the part as it is."""
    inner = b"" if part in (Part.REQUEST_TRAILERS, Part.RESPONSE_TRAILERS) else encode(1, b"")
    return encode(part.reply, inner)


def picked_reply(part: Part, endpoint: str, prefill: str | None = None) -> bytes:
    """Goes on with the part, and tells the gateway the endpoint, in the header and in the metadata, and whoever is
    behind it the endpoint for the prompt. A header for that which the client has sent counts for nothing."""
    set_headers = encode(1, _header(DESTINATION, endpoint))
    set_headers += (
        encode(2, PREFILLER) if prefill is None else encode(1, _header(PREFILLER, prefill))
    )
    common = encode(2, set_headers) + encode(5, 1)  # the route may depend on the header
    place = _struct({DESTINATION: encode(3, endpoint)})
    metadata = encode(8, _struct({_NAMESPACE: encode(5, place)}))
    return encode(part.reply, encode(1, common)) + metadata


def _header(name: str, value: str) -> bytes:
    return encode(1, encode(1, name) + encode(3, value)) + encode(3, _OVERWRITE)


def _struct(values: Mapping[str, bytes]) -> bytes:
    """A `google.protobuf.Struct` of encoded `Value`s."""
    return b"".join(encode(1, encode(1, key) + encode(2, value)) for key, value in values.items())


def body_replies(part: Part, body: bytes, *, is_end: bool) -> list[bytes]:
    """Sends a body on as it is, in pieces that a gateway takes."""
    starts = range(0, max(1, len(body)), _CHUNK_BYTES)
    replies = []
    for start in starts:
        piece = body[start : start + _CHUNK_BYTES]
        is_last = is_end and start + _CHUNK_BYTES >= len(body)
        streamed = encode(1, piece) + encode(2, int(is_last))
        replies.append(encode(part.reply, encode(1, encode(3, encode(3, streamed)))))
    return replies


def refusal_reply(status: int, reason: str) -> bytes:
    """Answers the client in place of a host."""
    return encode(7, encode(1, encode(1, status)) + encode(3, reason) + encode(5, "pagoda"))


def decode_health_check(data: bytes) -> str:
    """The service of a `HealthCheckRequest`. Raises ValueError: it is none."""
    return field_of(data, 1).decode(errors="replace")


def health_reply(*, is_serving: bool) -> bytes:
    """A `HealthCheckResponse`."""
    return encode(1, 1 if is_serving else 2)
