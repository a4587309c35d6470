# SPDX-License-Identifier: Apache-2.0
"""A browser, servers for it to look at, and work for them to do."""

from __future__ import annotations

import json
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from pagoda.cli.server_process import ServerProcess

CHROMIUM = Path("/usr/bin/chromium")
SLOW = ("--executor", "sim", "--sim-base-ms", "25", "--sim-per-token-ms", "0.1")
"""A server that takes its time: forty tokens a second for each answer."""


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Debian's Chromium, without a window. As root it has no sandbox of its own."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, chromium_sandbox=False, args=["--disable-dev-shm-usage"]
        )
        try:
            yield browser
        finally:
            browser.close()


def says(page: Page, status: str, **options: float) -> None:
    expect(page.locator("#status")).to_contain_text(status, **options)


def open_page(page: Page, server: ServerProcess, view: str = "") -> None:
    page.goto(f"{server.base_url}/{view}")
    says(page, "Live")


def set_field(pane: Page | Locator, name: str, value: str) -> None:
    """Types a parameter of a pane."""
    toggle = pane.get_by_role("button", name="Parameters")
    if toggle.get_attribute("aria-expanded") == "false":
        toggle.click()
    field = pane.locator(f"[name={name}]")
    if field.evaluate("element => element.tagName") == "SELECT":
        field.select_option(value)
    else:
        field.fill(value)


def ask(page: Page, question: str, **fields: str) -> None:
    """Sends a question from the playground, with parameters of its only pane."""
    for name, value in fields.items():
        set_field(page, name, value)
    page.get_by_label("Prompt for all panes").fill(question)
    page.keyboard.press("Enter")


def done(answer: Locator) -> None:
    expect(answer).to_have_attribute("aria-busy", "false")


class Load:
    """Requests, several at a time, for as long as the context lasts."""

    def __init__(self, base_url: str, num_clients: int, *, num_tokens: int = 400) -> None:
        self._url = f"{base_url}/v1/completions"
        self._num_tokens = num_tokens
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(num_clients)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        dice = random.Random(number)
        shared = list(range(100, 260))
        while not self._ended.is_set():
            prompt = shared[: dice.choice([0, 48, 160])] + dice.choices(range(90), k=80)
            num_tokens = dice.choice([self._num_tokens // 4, self._num_tokens])
            self._ask(f"client-{number}", prompt, num_tokens)
            self._ended.wait(dice.random())

    def _ask(self, name: str, prompt: list[int], num_tokens: int) -> None:
        body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        headers = {"Content-Type": "application/json", "X-Request-Id": name}
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=30) as response:
            for _ in response:
                if self._ended.is_set():
                    return
