# SPDX-License-Identifier: Apache-2.0
"""`kv_transfer_params`: what proxies before prefill and decode servers send and get."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pagoda.api.bodies.body import parse_body
from pagoda.api.openai.bodies import CompletionRequest
from pagoda.errors import InvalidRequestError
from pagoda.messages.frontend import KVSource
from pagoda.messages.worker_config import Role
from pagoda.plugins.disaggregation.kv_transfer import handoff_of, transfer_fields

"""A dispatcher with room for every request."""
ASKS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""As vLLM's proxies write it."""
GIVEN = {
    "do_remote_decode": False,
    "do_remote_prefill": True,
    "remote_engine_id": "e1",
    "remote_block_ids": [7],
    "remote_host": "10.0.0.1",
    "remote_port": 5700,
    "tp_size": 1,
    "transfer_id": "t1@e1@10.0.0.1:5700",
}
ATOM_ASKS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_dp_size": 1,
    "remote_tp_size": 2,
    "remote_handshake_port": 6301,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": "10.0.0.3",
    "remote_port": "8000",
}
"""As ATOM's proxy writes it: host and port are those of the decode server's API."""
ATOM_GIVES = {
    "do_remote_decode": False,
    "do_remote_prefill": True,
    "remote_dp_size": 2,
    "remote_tp_size": 1,
    "remote_dp_rank": 1,
    "remote_handshake_port": 6301,
    "remote_engine_id": "e1",
    "remote_block_ids": [7],
    "remote_host": "10.0.0.99",
    "remote_port": "8000",
    "transfer_id": GIVEN["transfer_id"],
}
"""As ATOM's proxy hands on `GIVEN`: host and port are those of the prefill server's API."""
IPV6 = ["::1", "[::1]", "fe80::1%eth0", "[fe80::1%eth0]", "::ffff:10.0.0.1"]
SOURCE = KVSource(address="tcp://10.0.0.1:5700", engine_id="e1", transfer_id="t1")


def body_with(params: dict[str, Any]) -> CompletionRequest:
    body = {"prompt": "x", "kv_transfer_params": params}
    return parse_body(msgspec.json.encode(body), CompletionRequest)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["complete", "chat"])
@pytest.mark.parametrize("params", [ASKS, ATOM_ASKS, {"do_remote_decode": True}])
async def test_prefill_answers_with_one_token_and_says_where_the_kv_is(
    serve_api, route: str, params: dict[str, Any], stream: bool
) -> None:
    api = await serve_api("yes", role=Role.PREFILL)
    answer = await getattr(api, route)(kv_transfer_params=params, stream=stream)
    last = answer.events()[-1] if stream else answer.json()
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["kv_transfer_params"] == GIVEN
    [choice] = answer.choices()
    assert (choice["text"] if route == "complete" else choice["message"]["content"]) == "y"
    [request] = api.endpoint.requests
    assert (request.holds_kv, request.kv_source) == (True, None)


@pytest.mark.parametrize("route", ["complete", "chat"])
async def test_prefill_holds_what_is_asked_for_one_token(serve_api, route: str) -> None:
    """smg asks so, and hands on the parameters of the answer."""
    api = await serve_api("yes", role=Role.PREFILL)
    assert (await getattr(api, route)(max_tokens=1)).json()["kv_transfer_params"] == GIVEN
    for fields in ({"max_tokens": 2}, {"max_tokens": 1, "n": 2}):
        assert b"kv_transfer_params" not in (await getattr(api, route)(**fields)).body
    answer = await api.complete(prompt=["a", "b"], max_tokens=1)
    assert b"kv_transfer_params" not in answer.body
    api = await serve_api("yes", role=Role.BOTH)
    assert b"kv_transfer_params" not in (await getattr(api, route)(max_tokens=1)).body


@pytest.mark.parametrize("role", list(Role))
async def test_routers_are_told_the_role(serve_api, role: Role) -> None:
    api = await serve_api(role=role)
    facts = (await api.get("/server_info")).json()
    assert facts["served_model_name"] == "tiny"
    assert (facts["kv_connector"] is None) == (role in (Role.NONE, Role.STANDBY))
    assert facts == (await api.get("/get_server_info")).json()


@pytest.mark.parametrize("params", [GIVEN, ATOM_GIVES, {**ATOM_GIVES, "first_token_id": 7}])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["complete", "chat"])
async def test_decode_is_told_where_the_kv_is(
    serve_api, route: str, stream: bool, params: dict[str, Any]
) -> None:
    api = await serve_api("yes", role=Role.DECODE)
    answer = await getattr(api, route)(kv_transfer_params=params, stream=stream)
    assert answer.status == 200
    assert b"kv_transfer_params" not in answer.body
    [request] = api.endpoint.requests
    assert (request.holds_kv, request.kv_source) == (False, SOURCE)


@pytest.mark.parametrize(
    "params",
    [None, {}, {"do_remote_decode": False}, {"do_remote_decode": None, "remote_port": None}],
)
async def test_parameters_that_ask_for_nothing_change_nothing(api, params: Any) -> None:
    answer = (await api.complete(prompt=["a", "b"], n=2, kv_transfer_params=params)).json()
    assert [choice["text"] for choice in answer["choices"]] == ["ok"] * 4
    assert "kv_transfer_params" not in answer


def test_names_of_hosts_are_addresses_too() -> None:
    body = body_with({**GIVEN, "remote_host": "prefill-0.pods"})
    source = handoff_of(body, Role.DECODE).kv_source
    assert source is not None
    assert source.address == "tcp://prefill-0.pods:5700"
    for host in IPV6:
        source = handoff_of(body_with({**GIVEN, "remote_host": host}), Role.DECODE).kv_source
        assert source is not None
        assert source.address == f"tcp://[{host.strip('[]')}]:5700"


def test_a_place_with_an_ipv6_address_goes_and_comes() -> None:
    source = KVSource(address="tcp://[fd00::2]:5700", engine_id="e1", transfer_id="t1")
    fields = transfer_fields(source)["kv_transfer_params"]
    assert fields["remote_host"] == "fd00::2"
    for params in (fields, {**fields, "remote_handshake_port": 1, "remote_host": "10.0.0.9"}):
        assert handoff_of(body_with(params), Role.DECODE).kv_source == source


@pytest.mark.parametrize("max_tokens", [None, 1, 7])
async def test_length_and_min_tokens_are_the_clients_whatever_the_proxy_asks_of_prefill(
    serve_api, max_tokens: int | None
) -> None:
    api = await serve_api("yes", role=Role.BOTH)
    asked = {"min_tokens": 5, "max_tokens": max_tokens}
    assert (await api.complete(kv_transfer_params=ASKS, **asked)).status == 200
    assert (api.endpoint.requests[0].work.sampling.min_tokens >= 1) is True
    if max_tokens != 1:
        assert (await api.complete(kv_transfer_params=GIVEN, **asked)).status == 200
        assert api.endpoint.requests[1].work.sampling.min_tokens == 5


BAD: list[tuple[dict[str, Any], str]] = [
    *((GIVEN | {name: value}, name) for name, values in {
        "do_remote_decode": ["yes", 1, 0, [], {}],
        "do_remote_prefill": ["true", 1, 0.0, []],
        "remote_engine_id": ["", 7, True, "x" * 513, "a\0b", ["e1"], {}],
        "remote_block_ids": ["1", 7, {}, [-1], [1.5], ["1"], [True], [2**31], [[1]], [None]],
        "remote_host": ["[a]", "[::1", "::1]", "", 7, "a b", "tcp://a", "a/b", "a:b", "*", "x" * 300, "-a", "ä"],
        "remote_port": [0, -1, 65536, 2**70, "0", "65536", "-1", "5700 ", "", 5.5, True, [5700], {}],
        "tp_size": [0, -1, 2**17, 2**70, "1", 1.5, True],
        "dp_rank": [-1, 2**17, "0", 0.5, False],
        "transfer_id": ["", 7, "x" * 513, "\n", None],
        "remote_handshake_port": [0, 65536, "x", "65536", 1.5, True],
        "remote_dp_size": [0, "1", 2**17], "remote_tp_size": [0, -1, 1.5],
        "remote_dp_rank": [-1, "0", True], "first_token_id": [-1, "7", 0.5],
    }.items() for value in values),
    *((GIVEN | {name: None}, name) for name in ("remote_engine_id", "remote_host", "remote_port")),
    ({"do_remote_prefill": True}, "remote_engine_id"),
    (GIVEN | {"do_remote_decode": True}, "do_remote_prefill"),
    (GIVEN | {"remote_block": "x"}, "remote_block"),
    (GIVEN | {"x" * 1000: 1}, "x" * 256),
]  # fmt: skip


@pytest.mark.parametrize(("params", "name"), BAD)
async def test_a_wrong_field_is_refused_by_name(
    serve_api, params: dict[str, Any], name: str
) -> None:
    api = await serve_api(role=Role.BOTH)
    for answer in [
        await api.complete(kv_transfer_params=params),
        await api.chat(kv_transfer_params=params, stream=True),
    ]:
        assert answer.status == 400
        error = answer.error()
        assert error["param"].startswith(f"kv_transfer_params.{name}")
        assert error["message"].startswith(error["param"])
        assert len(error["message"]) < 500
    assert api.endpoint.requests == []


@pytest.mark.parametrize("path", ["complete", "chat"])
@pytest.mark.parametrize(
    ("role", "is_router", "params", "sentence"),
    [
        (Role.NONE, False, ASKS, "--role none"),
        (Role.DECODE, False, ASKS, "--role decode"),
        (Role.NONE, False, GIVEN, "--role none"),
        (Role.PREFILL, False, GIVEN, "--role prefill"),
        (Role.BOTH, True, ASKS, "pagoda route"),
        (Role.BOTH, True, GIVEN, "pagoda route"),
    ],
)
async def test_a_server_that_is_not_for_it_says_so(
    serve_api, path: str, role: Role, is_router: bool, params: dict[str, Any], sentence: str
) -> None:
    api = await serve_api("yes", role=role)
    api.service.fleet = SimpleNamespace(
        is_router=is_router, registry=None, check_room=lambda *_: None
    )
    ask = getattr(api, path)
    error = (await ask(kv_transfer_params=params)).error()
    name = "do_remote_decode" if params is ASKS else "do_remote_prefill"
    assert error["param"] == f"kv_transfer_params.{name}"
    assert sentence in error["message"]
    assert not api.endpoint.requests
    nothing = {"do_remote_decode": False, "do_remote_prefill": False}
    assert (await ask(kv_transfer_params=nothing)).status == 200


@pytest.mark.parametrize("params", [ASKS, GIVEN])
async def test_one_prompt_and_one_answer_at_a_time(serve_api, params: dict[str, Any]) -> None:
    api = await serve_api(role=Role.BOTH)
    assert (await api.complete(kv_transfer_params=params, n=2)).error()["param"] == "n"
    assert (await api.chat(kv_transfer_params=params, n=2)).error()["param"] == "n"
    answer = await api.complete(prompt=["a", "b"], kv_transfer_params=params)
    assert answer.error()["param"] == "prompt"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.dictionaries(st.sampled_from([*GIVEN, "dp_rank", "other"]), JSON, max_size=9))
@example({**GIVEN, "remote_port": 1.0})
def test_any_parameters_give_a_handoff_or_a_sentence(params: dict[str, Any]) -> None:
    with suppress(InvalidRequestError):
        body = body_with(params)
        source = handoff_of(body, Role.BOTH).kv_source
        if params.get("do_remote_prefill"):
            assert source is not None
            assert source.address.endswith(f":{int(params['remote_port'])}")
