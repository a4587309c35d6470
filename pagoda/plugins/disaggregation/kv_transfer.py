# SPDX-License-Identifier: Apache-2.0
"""`kv_transfer_params`: handoffs that a proxy before prefill and decode servers arranges (vLLM, ATOM).

The proxy sends a request with `do_remote_decode` to a prefill server. The answer has one token, and parameters
with which the proxy sends the whole request to a decode server. The decode server fetches the KV of the prompt and
goes on after the token.
"""

from __future__ import annotations

from typing import Any, NoReturn

from pagoda.api.bodies.fields import GenerationFields, KVTransferParams
from pagoda.api.handoffs import RequestHandoff
from pagoda.errors import refuse
from pagoda.ipc.addresses import bracketed
from pagoda.messages.frontend import KVSource
from pagoda.messages.worker_config import Role


def handoff_of(
    body: GenerationFields, role: Role, *, max_tokens: int | None = None, is_router: bool = False
) -> RequestHandoff:
    """The handoff that a body's `kv_transfer_params` ask for. A router arranges handoffs itself and refuses them.

    smg asks a server of vLLM's kind for one token without any parameters, and hands on those of the answer. So a
    prefill server holds the KV of a request for a single token; whoever does not want it costs nobody its room.

    Raises InvalidRequestError: a field is wrong, or the role of the server does not allow it; names the field.
    """
    params = body.kv_transfer_params
    if params is None and role is Role.PREFILL and not is_router:
        return RequestHandoff(holds_kv=max_tokens == 1 and (body.n or 1) == 1)
    if params is None or not (params.do_remote_decode or params.do_remote_prefill):
        return RequestHandoff()
    holds = params.do_remote_decode
    name, wanted = ("do_remote_decode", "prefill") if holds else ("do_remote_prefill", "decode")
    if is_router:
        rule = (
            "must be false: a router (pagoda route) arranges handoffs itself; "
            "send it the request without kv_transfer_params"
        )
        _refuse(name, rule)
    if holds and params.do_remote_prefill:
        _refuse("do_remote_prefill", "must be false where do_remote_decode is true")
    if (body.n or 1) != 1:
        refuse("n", "must be 1 with kv_transfer_params")
    if not (role.holds_kv if holds else role.fetches_kv):
        rule = f"must be false: this server runs with --role {role}, not {wanted} or both"
        _refuse(name, rule)
    return RequestHandoff(holds_kv=True) if holds else RequestHandoff(kv_source=_source(params))


def transfer_fields(source: KVSource | None) -> dict[str, Any]:
    """The fields of a response for the decode server; empty unless KV is held at `source`.

    The transfer id ends with the place of the KV: ATOM's proxy hands that on, and writes the address of the
    server's API over the others.
    """
    if source is None:
        return {}
    address = source.address.removeprefix("tcp://")
    host, _, port = address.rpartition(":")
    params = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": source.engine_id,
        "remote_block_ids": source.block_ids,
        "remote_host": host.strip("[]"),
        "remote_port": int(port),
        "tp_size": source.tp_size,
        "transfer_id": f"{source.transfer_id}@{source.engine_id}@{address}",
    }
    return {"kv_transfer_params": params}


def _source(params: KVTransferParams) -> KVSource:
    """The source that parameters name. A transfer id is authenticated together with its place, wherever that was
    read, so that a wrong one is no source."""
    for name in ("remote_port", "remote_handshake_port"):
        if int(getattr(params, name) or 1) > 65535:
            _refuse(name, f"must be from 1 to 65535, got {getattr(params, name)!r}")
    transfer_id, _, place = (params.transfer_id or "").partition("@")
    if place and params.remote_handshake_port is not None:
        engine_id, _, address = place.partition("@")
        return KVSource(
            address=f"tcp://{address}",
            engine_id=engine_id,
            transfer_id=transfer_id,
            tp_size=params.remote_tp_size or 1,
        )
    for name in ("remote_engine_id", "remote_host", "remote_port", "transfer_id"):
        if getattr(params, name) is None:
            _refuse(name, "must be given where do_remote_prefill is true")
    return KVSource(
        address=f"tcp://{bracketed(params.remote_host or '')}:{params.remote_port}",
        engine_id=params.remote_engine_id or "",
        transfer_id=transfer_id,
        tp_size=params.tp_size or 1,
    )


def _refuse(name: str, rule: str) -> NoReturn:
    refuse(f"kv_transfer_params.{name}", rule)
