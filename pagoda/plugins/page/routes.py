# SPDX-License-Identifier: Apache-2.0
"""The routes of the page."""

from __future__ import annotations

from pagoda.api.route import LOOK, OPEN, Route
from pagoda.plugins.page.handlers import docs, live, page

_page = Route(page, "A file of the page.", OPEN, content_type="text/html", statuses=(404,))

ROUTES: dict[str, dict[str, Route]] = {
    "/": {"GET": _page},
    "/ui/*": {"GET": _page},
    "/docs": {"GET": Route(docs, "A page that shows the routes.", OPEN, content_type="text/html")},
    "/v1/live": {
        "GET": Route(
            live,
            "What the page shows, every second.",
            LOOK,
            content_type="text/event-stream",
            is_polled=True,
            is_endless=True,
        )
    },
}
