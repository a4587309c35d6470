# SPDX-License-Identifier: Apache-2.0
"""The endpoint picker, asked by a gRPC client whose messages are made by protobuf itself."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, cast

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2
from hypothesis import given
from hypothesis import strategies as st
from linked_hosts import KEYS, Host, join_discovery, until
from operations import count_operations
from scripted_endpoint import TEXT, ScriptedEndpoint

from pagoda.errors import ConfigError
from pagoda.fleet.fleet import Fleet
from pagoda.ipc.tls import TlsFiles
from pagoda.messages.worker_config import Role
from pagoda.plugins.epp.messages import (
    DESTINATION,
    PREFILLER,
    Part,
    Processing,
    decode_processing,
)
from pagoda.plugins.epp.picker import Picker
from pagoda.plugins.epp.server import (
    HEALTH,
    PROCESSOR,
    BodyRoom,
    Exchange,
    PickerOptions,
    PickerState,
)
from pagoda.plugins.epp.wire import encode
from pagoda.plugins.router.discovery.joins import JoinDiscovery, Membership
from pagoda.plugins.router.members import HostMembers, RouterConfig
from pagoda.plugins.router.pools import PoolConfig
from pagoda.plugins.router.registry import Registry
from pagoda.text.text_generator import TextGenerator

grpc = pytest.importorskip("grpc")

NO_TLS = TlsFiles(None, None, None, ("--epp-certfile", "--epp-keyfile", "--epp-certfile"))
FIELDS = {
    "HeaderValue": {"key": (1, "string"), "raw_value": (3, "bytes")},
    "HeaderMap": {"headers": (1, "HeaderValue*")},
    "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, "int32")},
    "HeaderMutation": {
        "set_headers": (1, "HeaderValueOption*"),
        "remove_headers": (2, "string*"),
    },
    "Metadata": {"filter_metadata": (1, "Entry*")},
    "Entry": {"key": (1, "string"), "value": (2, ".google.protobuf.Struct")},
    "HttpHeaders": {"headers": (1, "HeaderMap"), "end_of_stream": (3, "bool")},
    "HttpBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "HttpTrailers": {"trailers": (1, "HeaderMap")},
    "ProtocolConfiguration": {
        "request_body_mode": (1, "int32"),
        "response_body_mode": (2, "int32"),
    },
    "ProcessingRequest": {
        "request_headers": (2, "HttpHeaders"),
        "response_headers": (3, "HttpHeaders"),
        "request_body": (4, "HttpBody"),
        "response_body": (5, "HttpBody"),
        "request_trailers": (6, "HttpTrailers"),
        "response_trailers": (7, "HttpTrailers"),
        "metadata_context": (8, "Metadata"),
        "observability_mode": (10, "bool"),
        "protocol_config": (11, "ProtocolConfiguration"),
    },
    "StreamedBodyResponse": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "BodyMutation": {"streamed_response": (3, "StreamedBodyResponse")},
    "CommonResponse": {
        "header_mutation": (2, "HeaderMutation"),
        "body_mutation": (3, "BodyMutation"),
        "clear_route_cache": (5, "bool"),
    },
    "HeadersResponse": {"response": (1, "CommonResponse")},
    "BodyResponse": {"response": (1, "CommonResponse")},
    "HttpStatus": {"code": (1, "int32")},
    "ImmediateResponse": {"status": (1, "HttpStatus"), "body": (3, "bytes")},
    "ProcessingResponse": {
        "request_headers": (1, "HeadersResponse"),
        "response_headers": (2, "HeadersResponse"),
        "request_body": (3, "BodyResponse"),
        "response_body": (4, "BodyResponse"),
        "immediate_response": (7, "ImmediateResponse"),
        "dynamic_metadata": (8, ".google.protobuf.Struct"),
    },
    "HealthCheckRequest": {"service": (1, "string")},
    "HealthCheckResponse": {"status": (1, "int32")},
}
"""Messages with the numbers of Envoy's and gRPC's files."""


def _messages() -> dict[str, Any]:
    """Classes of the messages in `FIELDS`."""
    kinds = {"string": 9, "bytes": 12, "bool": 8, "int32": 5}
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    file = descriptor_pb2.FileDescriptorProto(
        name="picker.proto",
        package="picker",
        dependency=["google/protobuf/struct.proto"],
        syntax="proto3",
    )
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            plain = kind.rstrip("*")
            added = message.field.add(
                name=field, number=number, label=3 if kind.endswith("*") else 1
            )
            added.type = kinds.get(plain, 11)
            if plain not in kinds:
                added.type_name = plain if plain.startswith(".") else f".picker.{plain}"
    pool.Add(file)
    found = {name: pool.FindMessageTypeByName(f"picker.{name}") for name in FIELDS}
    return {name: message_factory.GetMessageClass(one) for name, one in found.items()}


MESSAGES = _messages()
Request = MESSAGES["ProcessingRequest"]


class Gateway(NamedTuple):
    """A gateway, and the router that it asks."""

    channel: Any
    fleet: Fleet
    hosts: list[Host]
    address: str
    """The router's, for gateways."""

    def process(self) -> Any:
        method = self.channel.stream_stream(
            f"/{PROCESSOR}/Process",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=MESSAGES["ProcessingResponse"].FromString,
        )
        return method()

    async def health(self, service: str) -> int:
        check = self.channel.unary_unary(
            f"/{HEALTH}/Check",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=MESSAGES["HealthCheckResponse"].FromString,
        )
        return (await check(MESSAGES["HealthCheckRequest"](service=service))).status

    @property
    def pending(self) -> list[int]:
        return [slot.work.pending_tokens for slot in self.fleet.dispatcher.slots]


@asynccontextmanager
async def gateway(
    serve_api: Any, num_hosts: int = 1, roles: Sequence[Role] = ()
) -> AsyncIterator[Gateway]:
    """Hosts with `roles`, or `num_hosts` without any."""
    discoveries: list[JoinDiscovery] = []

    def discover(context: object) -> JoinDiscovery:
        discoveries.append(join_discovery(context))  # type: ignore[arg-type]
        return discoveries[0]

    api = await serve_api(loading=True)
    service = api.service
    options = {PickerOptions: PickerOptions("127.0.0.1:0", 8000, NO_TLS)}
    service.config = dataclasses.replace(service.config, options=options)
    config = RouterConfig(discover, KEYS, {"": PoolConfig("m", "1")})
    fleet = service.fleet = Fleet(HostMembers(config))
    starting = asyncio.create_task(fleet.start())
    await until(lambda: bool(discoveries))
    given = roles or [Role.NONE] * num_hosts
    hosts = [Host(ScriptedEndpoint("hello", role=role)) for role in given]
    members = [
        Membership(host.context, f"127.0.0.1:{discoveries[0].port}", KEYS, host.record)
        for host in hosts
    ]
    await starting
    registry = cast(Registry, cast(HostMembers, fleet.members).registry)
    while [host.state for host in await registry.hosts()] != ["ready"] * len(hosts):
        await asyncio.sleep(0.01)
    await until(lambda: not hosts or bool(fleet.dispatcher.slots.takers.num_takers))
    service.generator = TextGenerator(fleet.dispatcher, TEXT, service.tracker)
    state = PickerState(service, {})
    state.start()
    await until(lambda: bool(state.port))
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{state.port}") as channel:
            yield Gateway(channel, fleet, hosts, f"127.0.0.1:{state.port}")
    finally:
        await state.close()
        for member, host in zip(members, hosts, strict=True):
            await member.close()
            await host.close()
        await fleet.close()


def headers(*, is_end: bool = False, subset: list[str] | None = None, **fields: Any) -> Any:
    """The first message: headers of a client that names an endpoint of its own, and a subset of the gateway."""
    raw = [
        {"key": ":path", "raw_value": b"/v1/chat/completions"},
        {"key": DESTINATION, "raw_value": b"1.2.3.4:5"},
    ]
    message = Request(
        request_headers={"headers": {"headers": raw}, "end_of_stream": is_end}, **fields
    )
    if subset is not None:
        hint = struct_pb2.Struct()
        hint.update({"x-gateway-destination-endpoint-subset": subset})
        entry = message.metadata_context.filter_metadata.add(key="envoy.lb.subset_hint")
        entry.value.MergeFromString(hint.SerializeToString())
    return message


def body(data: bytes, *, is_end: bool) -> Any:
    return Request(request_body={"body": data, "end_of_stream": is_end})


def endpoint_of(reply: Any, kind: str) -> str:
    """The endpoint in the header of a reply, which is that of the metadata, too."""
    common = getattr(reply, kind).response
    [option] = common.header_mutation.set_headers
    assert list(common.header_mutation.remove_headers) == [PREFILLER]
    told = json.loads(_json(reply.dynamic_metadata))
    value: str = told["envoy.lb"][DESTINATION]
    assert (option.header.key, option.header.raw_value.decode()) == (DESTINATION, value)
    assert (option.append_action, common.clear_route_cache) == (2, True)
    return value


def _json(struct: Any) -> str:
    plain = struct_pb2.Struct.FromString(struct.SerializeToString())
    return json.dumps({key: dict(value.items()) for key, value in plain.items()})


CHAT = json.dumps(
    {"messages": [{"role": "user", "content": "hello " * 30}], "max_tokens": 7}
).encode()


async def test_a_gateway_is_told_a_host_which_has_the_work_until_the_answer_ends(
    serve_api: Any,
) -> None:
    async with gateway(serve_api) as asked:
        call = asked.process()
        await call.write(headers())
        await call.write(body(CHAT[:50], is_end=False))
        await call.write(body(CHAT[50:], is_end=True))
        assert endpoint_of(await call.read(), "request_headers") == "127.0.0.1:8000"
        streamed = (await call.read()).request_body.response.body_mutation.streamed_response
        assert (streamed.body, streamed.end_of_stream) == (CHAT, True)
        [before] = asked.pending
        assert before > 30
        await call.write(Request(response_headers={}))
        assert (await call.read()).HasField("response_headers")
        assert asked.pending == [7]
        for piece, is_end in ((b"data: 1\n\n", False), (b"x" * 100_000, True)):
            await call.write(Request(response_body={"body": piece, "end_of_stream": is_end}))
            back, ended = b"", False
            while len(back) < len(piece):
                one = (await call.read()).response_body.response.body_mutation.streamed_response
                back, ended = back + one.body, one.end_of_stream
                assert len(one.body) < 65_536
            assert (back, ended) == (piece, is_end)
        assert asked.pending == [0]
        await call.done_writing()
        assert await call.read() == grpc.aio.EOF


async def test_a_long_prompt_has_a_prefill_host_which_has_its_work(serve_api: Any) -> None:
    """A header that the client sent is overwritten, or removed."""
    long = json.dumps({"prompt": [1] * 300, "max_tokens": 7}).encode()
    async with gateway(serve_api, roles=[Role.PREFILL, Role.DECODE]) as asked:
        call = asked.process()
        await call.write(headers())
        await call.write(body(long, is_end=True))
        reply = await call.read()
        assert reply.HasField("request_headers"), reply
        told = reply.request_headers.response.header_mutation
        headers_told = [
            (option.header.key, option.header.raw_value.decode()) for option in told.set_headers
        ]
        endpoint = "127.0.0.1:8000"
        assert headers_told == [(DESTINATION, endpoint), (PREFILLER, endpoint)]
        assert (sum(asked.pending), list(told.remove_headers)) == (7, [])
        call = asked.process()
        await call.write(headers())
        await call.write(body(CHAT, is_end=True))
        assert endpoint_of(await call.read(), "request_headers") == endpoint


async def test_work_is_spread_and_ends_with_the_stream(serve_api: Any) -> None:
    async with gateway(serve_api, num_hosts=2) as asked:
        calls = [asked.process() for _ in range(4)]
        for number, call in enumerate(calls):
            await call.write(headers())
            await call.write(body(json.dumps({"prompt": str(number) * 60}).encode(), is_end=True))
            endpoint_of(await call.read(), "request_headers")
        assert len(set(asked.pending)) == 1
        for call in calls:
            call.cancel()
        await until(lambda: asked.pending == [0, 0])


async def test_a_gateway_that_buffers_gets_one_reply_for_each_message(serve_api: Any) -> None:
    async with gateway(serve_api) as asked:
        call = asked.process()
        modes = {"request_body_mode": 2, "response_body_mode": 1}
        await call.write(headers(protocol_config=modes))
        first = await call.read()
        assert not first.request_headers.response.header_mutation.set_headers
        await call.write(body(CHAT, is_end=True))
        assert endpoint_of(await call.read(), "request_body") == "127.0.0.1:8000"
        await call.write(Request(response_body={"body": b"all", "end_of_stream": True}))
        assert not (await call.read()).response_body.response.HasField("body_mutation")
        assert asked.pending == [0]


@pytest.mark.parametrize(
    ("data", "is_end"),
    [
        (b"", True),
        (b"no JSON", False),
        (b'{"prompt": [1, 2, 3]}', False),
        (b'{"prompt": {}}', False),
        (b'{"messages": 5}', False),
        (b'{"prompt": ' + b"[" * 100_000, False),
    ],
)
async def test_what_is_no_body_has_a_host_too_which_refuses_it(
    serve_api: Any, data: bytes, is_end: bool
) -> None:
    async with gateway(serve_api) as asked:
        call = asked.process()
        await call.write(headers(is_end=is_end))
        if not is_end:
            await call.write(body(data, is_end=True))
        assert endpoint_of(await call.read(), "request_headers") == "127.0.0.1:8000"


async def test_a_subset_is_kept_to(serve_api: Any) -> None:
    async with gateway(serve_api) as asked:
        for subset, is_there in (
            (["127.0.0.1:8000"], True),
            (["10.0.0.1:8000"], False),
            ([], False),
        ):
            call = asked.process()
            await call.write(headers(is_end=True, subset=subset))
            reply = await call.read()
            if is_there:
                assert endpoint_of(reply, "request_headers") == "127.0.0.1:8000"
            else:
                assert reply.immediate_response.status.code == 503
                assert b"No host" in reply.immediate_response.body


async def test_a_body_without_end_is_refused(serve_api: Any) -> None:
    async with gateway(serve_api) as asked:
        call = asked.process()
        await call.write(headers())
        for _ in range(3):
            await call.write(body(bytes(3 * 2**20), is_end=False))
        assert (await call.read()).immediate_response.status.code == 413


async def test_what_is_no_message_ends_its_stream_alone(serve_api: Any) -> None:
    async with gateway(serve_api) as asked:
        for data in (b"\xff", encode(2, b"") + encode(10, 1) * 100, encode(99, b"")):
            call = asked.channel.stream_stream(f"/{PROCESSOR}/Process")()
            await call.write(data)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        call = asked.process()
        await call.write(headers(is_end=True))
        endpoint_of(await call.read(), "request_headers")
        assert asked.pending[0] > 0
        await call.write(headers(is_end=True))
        with pytest.raises(grpc.aio.AioRpcError, match="goes on behind its end"):
            await call.read()
        await until(lambda: asked.pending == [0])


def test_bodies_that_are_on_their_way_have_room_together() -> None:
    room, stacks = BodyRoom(100, 150), [contextlib.ExitStack() for _ in range(3)]
    picker = cast(Picker, None)
    exchanges = [Exchange(picker, stack, room) for stack in stacks]

    def send(exchange: Exchange, size: int) -> bytes:
        """The status of a refusal; empty without one."""
        part = Processing(Part.REQUEST_BODY, body=bytes(size))
        replies = asyncio.run(exchange.take(part))
        return b"".join(replies)

    assert [send(exchange, 70) for exchange in exchanges[:2]] == [b"", b""]
    assert b"Too many bodies" in send(exchanges[2], 20)
    assert exchanges[2].is_over
    stacks[0].close()
    stacks[2].close()
    assert send(Exchange(picker, stacks[0], room), 70) == b""
    assert b"at most 100 bytes" in send(exchanges[1], 40)


async def test_health_is_that_of_the_router(serve_api: Any) -> None:
    async with gateway(serve_api) as asked:
        for service in ("", "liveness", "readiness", PROCESSOR):
            assert await asked.health(service) == 1
        with pytest.raises(grpc.aio.AioRpcError):
            await asked.health("else")
        dispatcher = asked.fleet.dispatcher
        dispatcher.set_leaving(dispatcher.replicas[0], True)
        assert (await asked.health("readiness"), await asked.health("liveness")) == (2, 1)


async def test_an_address_that_is_taken_is_told(serve_api: Any) -> None:
    async with gateway(serve_api) as asked:
        api = await serve_api()
        api.service.fleet = asked.fleet
        options = {PickerOptions: PickerOptions(asked.address, 8000, NO_TLS)}
        api.service.config = dataclasses.replace(api.service.config, options=options)
        with pytest.raises(ConfigError, match=f"--epp-listen: {asked.address} cannot be listened"):
            PickerState(api.service, {}).start()


async def test_a_server_without_hosts_picks_none(serve_api: Any) -> None:
    api = await serve_api()
    options = {PickerOptions: PickerOptions("127.0.0.1:0", 8000, NO_TLS)}
    api.service.config = dataclasses.replace(api.service.config, options=options)
    with pytest.raises(ConfigError, match="--epp-listen is for pagoda route"):
        PickerState(api.service, {}).start()


@given(st.binary(max_size=60))
def test_messages_that_are_none_are_refused(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert decode_processing(data).part in Part


def test_a_message_of_millions_of_fields_is_not_read_to_its_end() -> None:
    many = encode(1, 1) * 10**6
    for data in (many, encode(2, encode(1, encode(1, many))), encode(2, b"") + encode(8, many)):
        assert count_operations(lambda data=data: suppressed(data)) < 200_000


def suppressed(data: bytes) -> None:
    with pytest.raises(ValueError, match="more than"):
        decode_processing(data)
