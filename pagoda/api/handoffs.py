# SPDX-License-Identifier: Apache-2.0
"""The seam for handoffs that clients arrange: a plugin says which part of a prompt's KV a body asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from pagoda.api.bodies.fields import GenerationFields
from pagoda.errors import refuse
from pagoda.messages.frontend import KVSource
from pagoda.messages.worker_config import Role


class RequestHandoff(NamedTuple):
    """The part of a request in a handoff; by default none."""

    holds_kv: bool = False
    kv_source: KVSource | None = None
    on_kv_source: Callable[[KVSource], None] | None = None
    """A function that is told where the KV of the prompt will be."""


class Asked(NamedTuple):
    """A body, and who asks whom."""

    body: GenerationFields
    num_prompts: int
    max_tokens: int | None
    role: Role
    """The role of the server."""
    authorization: str
    """The header by which the client shows its key; empty without one."""


class Handoffs(Protocol):
    """Fields of bodies and of answers by which KV goes from server to server."""

    async def handoff(self, asked: Asked) -> RequestHandoff:
        """The handoff that a body asks for.

        Raises InvalidRequestError: a field is wrong, or the role of the server does not allow it; names the field.
        """

    def fields(self, source: KVSource | None) -> dict[str, Any]:
        """The fields of a response that name the source; empty unless KV is held at `source`."""


class NoHandoffs:
    """Refuses bodies that ask for a handoff."""

    async def handoff(self, asked: Asked) -> RequestHandoff:
        """Raises InvalidRequestError: the body asks for a handoff."""
        params = asked.body.kv_transfer_params
        if params is not None and (params.do_remote_decode or params.do_remote_prefill):
            refuse("kv_transfer_params", "needs a server with the plugin disaggregation")
        if asked.body.bootstrap_room is not None:
            refuse("bootstrap_room", "needs a server with the plugin disaggregation")
        return RequestHandoff()

    def fields(self, source: KVSource | None) -> dict[str, Any]:  # noqa: ARG002 - there is none
        return {}
