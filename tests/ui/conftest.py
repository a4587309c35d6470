# SPDX-License-Identifier: Apache-2.0
"""A page that must make no error and ask no other host, whatever a test does with it."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect
from stage import SLOW, open_browser

from pagoda.cli.server_process import ServerProcess, server_process

expect.set_options(timeout=20_000)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="session")
def tiny() -> Iterator[ServerProcess]:
    """A server of pagoda-tiny."""
    with server_process([]) as server:
        yield server


@pytest.fixture(scope="session")
def slow() -> Iterator[ServerProcess]:
    """A server whose answers take seconds."""
    with server_process(SLOW) as server:
        yield server


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(
        viewport={"width": 1280, "height": 860}, permissions=["clipboard-write"]
    )
    context.set_default_timeout(20_000)
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("console", lambda message: wrong.append(message.text) if _is_wrong(message) else None)
    page.on("request", lambda request: wrong.append(request.url) if _is_far(request.url) else None)
    yield page
    context.close()
    assert wrong == []


def _is_wrong(message: ConsoleMessage) -> bool:
    """Chromium itself reports every answer that is not a success, and every server that is gone."""
    expected = message.text.startswith("Failed to load resource")
    return message.type in ("error", "warning") and not expected


def _is_far(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme not in ("data", "blob") and parts.hostname != "127.0.0.1"
