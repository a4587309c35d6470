"""What may be done for a request between the choice of a replica for it and its going there."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol

from pagoda.messages.frontend import GenerateRequest
from pagoda.messages.worker_config import Role


class Place(NamedTuple):
    """The replica that will have a request."""

    role: Role
    num_cached_tokens: int
    """Leading tokens of the request that it says it has in its cache."""
    pending_tokens: int
    """The work of the other requests that it has."""
    num_streams: int
    """Requests there whose answers have begun: they stand still while it computes a prompt."""


class PrefillOffload(Protocol):
    """Makes a request ready for the replica that a `Dispatcher` chose."""

    @property
    def needs_prefixes(self) -> bool:
        """Whether it would make use of what replicas have cached, which costs a digest over the prompt."""
        ...

    def prepare(
        self, request: GenerateRequest, place: Place
    ) -> AbstractAsyncContextManager[GenerateRequest]:
        """What the replica is to be given; what was done for it lasts until the context ends.

        Never raises because something failed: then the request is as it was. Does not wait for long.
        """
        ...
