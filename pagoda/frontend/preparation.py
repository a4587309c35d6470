"""What may be done for a request between the choice of a replica for it and its going there."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from pagoda.engine.messages import GenerateRequest, Role


class Preparation(Protocol):
    """Makes a request ready for the replica that a `Dispatcher` chose."""

    @property
    def needs_prefixes(self) -> bool:
        """Whether it would make use of what replicas have cached, which costs a digest over the prompt."""
        ...

    def prepare(
        self, request: GenerateRequest, role: Role, num_cached_tokens: int
    ) -> AbstractAsyncContextManager[GenerateRequest]:
        """What the replica is to be given; what was done for it lasts until the context ends.

        `role` is the replica's, which says that it has `num_cached_tokens` leading tokens in its cache. Never
        raises because something failed: then the request is as it was. Does not wait for long.
        """
        ...
