# SPDX-License-Identifier: Apache-2.0
"""Work of several tenants that waits for a thread: a tenant's turn comes however much others have put in line."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class Turns(Generic[Item]):
    """Items by round robin among tenants, and in the order of their coming within one. Each operation takes
    constant time."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, OrderedDict[Item, None]] = OrderedDict()
        """Lines of tenants, the one whose turn is next first; none is empty."""
        self._last: str | None = None
        """The tenant whose turn was last."""

    def __bool__(self) -> bool:
        return bool(self._lines)

    def put(self, tenant: str, item: Item) -> None:
        self._lines.setdefault(tenant, OrderedDict())[item] = None

    def pop(self) -> Item:
        """Takes the next item. Raises IndexError: there is none."""
        if not self._lines:
            raise IndexError("nothing is in line")
        tenant = next(iter(self._lines))
        if tenant == self._last and len(self._lines) > 1:  # others have come since its turn
            self._lines.move_to_end(tenant)
            tenant = next(iter(self._lines))
        item, _ = self._lines[tenant].popitem(last=False)
        self._last = tenant
        self._lines.move_to_end(tenant)
        if not self._lines[tenant]:
            del self._lines[tenant]
        return item

    def discard(self, tenant: str, item: Item) -> None:
        """Takes an item out of line, if it is there."""
        line = self._lines.get(tenant, OrderedDict())
        line.pop(item, None)
        if not line:
            self._lines.pop(tenant, None)
