"""`kv_transfer_params`: what proxies before prefill and decode servers say, as those of vLLM and ATOM spell it.

A proxy sends a request with `do_remote_decode` to one server. The answer is one token, and parameters with which
the proxy sends the whole request to another server; that one fetches the KV of the prompt, and goes on behind
the token. Every field is checked, also those that have no effect here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pagoda.api.protocol import MAX_TOKEN_IDS, GenerationFields
from pagoda.errors import InvalidRequestError
from pagoda.frontend.text_generator import TextDelta
from pagoda.messages.frontend import KVSource
from pagoda.messages.worker_config import Role

MAX_ID_CHARS = 256
_MAX_RANKS = 2**16
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?\Z")


class Handoff(NamedTuple):
    """One request's part in a handoff; by default none."""

    holds_kv: bool = False
    kv_source: KVSource | None = None


def handoff_of(body: GenerationFields, role: Role, *, is_router: bool = False) -> Handoff:
    """What a body's `kv_transfer_params` ask a server of this role for. A router's hosts do as it says, so it
    says nothing for others.

    Raises:
        InvalidRequestError: a field is not what it must be, or the server is not for that; names the field.
    """
    params = body.kv_transfer_params
    if params is None:
        return Handoff()
    for name, value in params.items():
        _check(name, value)
    holds, fetches = params.get("do_remote_decode"), params.get("do_remote_prefill")
    if not (holds or fetches):
        return Handoff()
    if is_router:
        raise _refusal(
            "do_remote_decode" if holds else "do_remote_prefill",
            "must be false: a router (pagoda route) arranges handoffs itself; "
            "send it the request without kv_transfer_params",
        )
    if holds and fetches:
        raise _refusal("do_remote_prefill", "must be false where do_remote_decode is true")
    if (body.n or 1) != 1:
        raise InvalidRequestError("n must be 1 with kv_transfer_params.", param="n")
    if holds:
        if not role.holds_kv:
            raise _refusal("do_remote_decode", _not_for("prefill", role))
        return Handoff(holds_kv=True)
    if not role.fetches_kv:
        raise _refusal("do_remote_prefill", _not_for("decode", role))
    return Handoff(kv_source=_source(params))


def transfer_fields(delta: TextDelta) -> dict[str, Any]:
    """What the last delta adds to the object of an answer for the server that goes on, if there is one."""
    source = delta.kv_source
    if source is None:
        return {}
    host, _, port = source.address.removeprefix("tcp://").rpartition(":")
    params = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": source.engine_id,
        "remote_block_ids": source.block_ids,
        "remote_host": host,
        "remote_port": int(port),
        "tp_size": source.tp_size,
        "transfer_id": source.transfer_id,
    }
    return {"kv_transfer_params": params}


def _source(params: Mapping[str, Any]) -> KVSource:
    for name in ("remote_engine_id", "remote_host", "remote_port", "transfer_id"):
        if params.get(name) is None:
            raise _refusal(name, "must be given where do_remote_prefill is true")
    return KVSource(
        address=f"tcp://{params['remote_host']}:{params['remote_port']}",
        engine_id=params["remote_engine_id"],
        transfer_id=params["transfer_id"],
        tp_size=params.get("tp_size") or 1,
    )


def _check(name: str, value: object) -> None:
    rule = _RULES.get(name)
    if rule is None:
        raise _refusal(name[:MAX_ID_CHARS], "is not a known field")
    if value is not None and not rule.accepts(value):
        raise _refusal(name, f"must be {rule.wanted}, got {_shown(value)}")


def _refusal(name: str, problem: str) -> InvalidRequestError:
    param = f"kv_transfer_params.{name}"
    return InvalidRequestError(f"{param} {problem}.", param=param)


def _not_for(wanted: str, role: Role) -> str:
    return f"must be false: this server runs with --role {role}, not {wanted} or both"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_integer(value: object, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_id(value: object) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= MAX_ID_CHARS and value.isprintable()


def _is_host(value: object) -> bool:
    return isinstance(value, str) and _HOST_NAME.match(value) is not None


def _is_list_of_blocks(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= MAX_TOKEN_IDS
        and all(_is_integer(item, 0, 2**31 - 1) for item in value)
    )


class _Rule(NamedTuple):
    wanted: str
    accepts: Callable[[object], bool]


_ID = _Rule(f"a string of 1 to {MAX_ID_CHARS} printable characters", _is_id)
_FLAG = _Rule("true or false", _is_flag)
_RULES: Mapping[str, _Rule] = {
    "do_remote_decode": _FLAG,
    "do_remote_prefill": _FLAG,
    "remote_engine_id": _ID,
    "remote_block_ids": _Rule("a list of block numbers", _is_list_of_blocks),
    "remote_host": _Rule("a host name or an IPv4 address", _is_host),
    "remote_port": _Rule("a port from 1 to 65535", lambda value: _is_integer(value, 1, 65535)),
    "tp_size": _Rule(
        f"a number from 1 to {_MAX_RANKS}", lambda value: _is_integer(value, 1, _MAX_RANKS)
    ),
    "dp_rank": _Rule(
        f"a number from 0 to {_MAX_RANKS}", lambda value: _is_integer(value, 0, _MAX_RANKS)
    ),
    "transfer_id": _ID,
}
"""Any of them may be null, which is the same as leaving it out."""
