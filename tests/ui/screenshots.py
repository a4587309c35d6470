# SPDX-License-Identifier: Apache-2.0
"""`make screenshots`: the pictures of the page in the documents. Views are at work when they are taken."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from playwright.sync_api import Browser, expect
from stage import Load, ask, done, open_browser, open_page, set_field

from pagoda.cli.server_process import server_process

BUSY = (
    *("--executor", "sim", "--sim-base-ms", "14", "--sim-per-token-ms", "0.08"),
    *("--num-kv-blocks", "1200", "--max-num-batched-tokens", "256", "--data-parallel-size", "2"),
)
ANSWERED = {
    "Sort the numbers 31, 7, 19.": "7, 19, 31",
    "What is 17 + 25?": "17 + 25 = 42",
}
CROWDS = ((0, 90), (10, 60), (2, 70), (18, 45), (4, 45))
"""Clients besides the first ones, and for how many seconds: five minutes in all."""
WIDE = {"width": 1360, "height": 1010}
PHONE = {"width": 360, "height": 760}


def take_live(browser: Browser, directory: Path) -> None:
    """Both themes, under load, and on a phone."""
    with server_process(BUSY) as server, Load(server.base_url, 8, num_tokens=500):
        for num_more, seconds in CROWDS:  # nobody watches: the server keeps the figures
            with Load(server.base_url, num_more, num_tokens=500):
                time.sleep(seconds)
        page = browser.new_page(viewport=WIDE, reduced_motion="reduce")  # type: ignore[arg-type]
        page.goto(server.base_url)
        page.wait_for_timeout(2500)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            page.screenshot(path=directory / f"live-{scheme}.png", full_page=True)
        page.set_viewport_size(PHONE)  # type: ignore[arg-type]
        page.wait_for_timeout(1500)
        page.screenshot(path=directory / "live-phone.png")
        page.close()


def take_playground(browser: Browser, directory: Path) -> None:
    """Two panes, one of them with the probabilities of a token. The questions are some that it answers right."""
    with server_process([]) as server:
        page = browser.new_page(
            viewport={"width": 1360, "height": 760},
            reduced_motion="reduce",
        )
        open_page(page, server, "#/playground")
        page.get_by_role("button", name="Add a pane").click()
        left, right = page.locator(".pane").all()
        set_field(right, "top", "5")
        for pane in (left, right):
            set_field(pane, "temperature", "0")
            pane.get_by_role("button", name="Parameters").click()
        for question, answer in ANSWERED.items():
            ask(page, question)
            for answered in page.locator(".assistant").all():
                done(answered)
            expect(left.locator(".assistant .text").last).to_have_text(answer)
        right.locator(".assistant").last.locator(".token").nth(-2).hover()
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            page.screenshot(path=directory / f"playground-{scheme}.png")
        page.set_viewport_size(PHONE)  # type: ignore[arg-type]
        page.mouse.move(5, 5)
        page.wait_for_timeout(300)
        page.screenshot(path=directory / "playground-phone.png")
        page.close()


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with open_browser() as browser:
        take_playground(browser, directory)
        take_live(browser, directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
