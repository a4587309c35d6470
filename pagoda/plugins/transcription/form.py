# SPDX-License-Identifier: Apache-2.0
"""The form of a request for a transcript (https://platform.openai.com/docs/api-reference/audio)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pagoda.api.errors import ApiError
from pagoda.api.http.forms import FormReader, open_form
from pagoda.api.http.pace import Pace
from pagoda.api.http.request_context import RequestContext, take_timeout
from pagoda.errors import InvalidRequestError, refuse

MAX_FILE_BYTES = 25 * 2**20
"""Bytes of a file, as OpenAI has it."""
_MAX_FIELD_BYTES = 2**16
_LISTS = ("timestamp_granularities[]", "timestamp_granularities")

ResponseFormat = Literal["json", "text", "srt", "vtt", "verbose_json"]


class TranscriptionForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields besides the file."""

    model: Annotated[str, Meta(max_length=1024)] | None = None
    language: Annotated[str, Meta(max_length=16)] | None = None
    """ISO 639-1 code of what is spoken; it is found out where it is not given."""
    prompt: str = ""
    """Text that was said before, whose style is kept."""
    response_format: ResponseFormat = "json"
    temperature: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """Temperature of sampling; with 0, what comes out bad is tried again at higher ones."""
    timestamp_granularities: Annotated[list[Literal["segment", "word"]], Meta(max_length=2)] = []
    stream: bool = False
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    timeout: Annotated[float, Meta(gt=0.0, le=86400.0)] | None = None
    user: str | None = None
    chunking_strategy: Literal["auto"] = "auto"
    """Long audio is always cut where it is quiet."""

    def check(self) -> None:
        """Raises InvalidRequestError: fields do not go together, or ask for what there is not."""
        if self.timestamp_granularities and self.response_format != "verbose_json":
            refuse("timestamp_granularities", "needs the response_format verbose_json")
        if self.stream and self.response_format not in ("json", "text"):
            refuse("stream", "goes with the response_format json or text")

    def shows(self, granularity: Literal["segment", "word"]) -> bool:
        """True if times of these are shown; they are of segments unless others are asked for."""
        return granularity in (self.timestamp_granularities or ["segment"])

    @property
    def has_times(self) -> bool:
        return self.response_format not in ("json", "text")


async def read_form(context: RequestContext) -> tuple[TranscriptionForm, bytes]:
    """The fields of a form, and its file.
    Raises InvalidRequestError: a field is not as it must be; names it. ApiError: 408, the body does not come in
    time; 413, the file is too long; as `open_form`."""
    values, data = await _parts(context)
    if data is None:
        raise InvalidRequestError("file is missing.", param="file", kind="missing_field")
    form = _converted(values)
    form.check()
    take_timeout(context.client_request, form)
    return form, data


async def _parts(context: RequestContext) -> tuple[dict[str, Any], bytes | None]:
    pace = Pace(context.service.config.body_timeout_s)
    form = open_form(context.http, pace.wait, context.service.body_threads, context.key_name)
    values: dict[str, Any] = {}
    data: bytes | None = None
    while (part := await form.next_part()) is not None:
        if part.name == "file" and data is None:
            data = await _file(form, pace)
            continue
        value = await form.field(part.name[:64], _MAX_FIELD_BYTES)
        try:
            text = value.decode()
        except UnicodeDecodeError:
            refuse(part.name[:64], "must be text in UTF-8")
        if not text and part.name != "prompt":
            continue  # forms of web pages send fields that nobody has filled in
        if part.name in _LISTS:
            values.setdefault(_LISTS[1], []).append(text)
            if len(values[_LISTS[1]]) > 2:
                refuse(_LISTS[1], "names at most two")
        elif part.name in values or part.name == "file":
            refuse(part.name[:64], "is given twice")
        elif part.name not in TranscriptionForm.__struct_fields__:
            if not context.ignored.takes(part.name):
                refuse(part.name[:64], "is not a known field", "unknown_field")
            context.ignored.note(part.name)
        else:
            values[part.name] = text
    return values, data


async def _file(form: FormReader, pace: Pace) -> bytes:
    data = bytearray()
    async for chunk in form.chunks():
        pace.num_bytes += len(chunk)
        data += chunk
        if len(data) > MAX_FILE_BYTES:
            raise ApiError(413, f"file is longer than {MAX_FILE_BYTES} bytes.", "file")
    return bytes(data)


def _converted(values: dict[str, Any]) -> TranscriptionForm:
    """The form whose values are texts. Raises InvalidRequestError: one is not of its type; names it."""
    if isinstance(values.get("stream"), str):
        values["stream"] = {"true": True, "false": False}.get(values["stream"].lower(), "?")
    try:
        return msgspec.convert(values, TranscriptionForm, strict=False)
    except msgspec.ValidationError as error:
        rule, _, path = str(error).rpartition(" - at `$.")
        name = path.rstrip("`").partition("[")[0]
        rule = f"{rule[0].lower()}{rule[1:]}" if rule else str(error)
        raise InvalidRequestError(f"{name or 'form'}: {rule}.", param=name or None) from None
