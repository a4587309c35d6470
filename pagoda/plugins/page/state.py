# SPDX-License-Identifier: Apache-2.0
"""State of a server's page."""

from __future__ import annotations

from collections.abc import Mapping

from pagoda.api.plugin import ApiPlugin
from pagoda.api.service import Service
from pagoda.plugins.page.live_stats import LiveStats, Watched


class PageState:
    """The last minutes of a server's figures."""

    def __init__(self, service: Service, plugins: Mapping[str, ApiPlugin]) -> None:  # noqa: ARG002
        self._service = service
        self.live_stats = LiveStats(service.tracker)

    def start(self) -> None:
        """Begins to keep figures, also while nobody watches."""
        if self._service.generator is not None:
            self.live_stats.begin(self.watched)

    @property
    def watched(self) -> Watched:
        """The model that is served, or all of them. Raises ApiError: as `Service.ready_generator`."""
        service = self._service
        generator = service.ready_generator()
        if service.catalogue is None or service.fleet is None:
            return generator.endpoint
        return service.fleet

    async def stop(self) -> None:
        """Pages see how the server drains."""

    async def close(self) -> None:
        """Ends the streams of pages."""
        self.live_stats.close()
