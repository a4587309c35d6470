# SPDX-License-Identifier: Apache-2.0
"""Who cannot see, cannot point, or has a small screen."""

from __future__ import annotations

import re

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect
from stage import Load, ask, done, open_page, says

from pagoda.cli.server_process import ServerProcess

PHONE = {"width": 360, "height": 740}


def check(page: Page) -> None:
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def fits(page: Page) -> None:
    """Nothing is wider than the screen, so nothing scrolls sideways but what is meant to."""
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(page: Page, slow: ServerProcess, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    open_page(page, slow)
    check(page)
    with Load(slow.base_url, 2):
        expect(page.locator(".requests tbody tr")).to_have_count(2)
        check(page)
    page.get_by_role("tab", name="Playground").click()
    check(page)
    ask(page, "hello", top="2", max_tokens="8")
    done(page.locator(".assistant"))
    page.locator(".token", has_text=re.compile(r"\w")).first.hover()  # some are line breaks
    check(page)
    page.locator("[name=temperature]").fill("-1")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.get_by_role("alert")).to_be_visible()
    page.get_by_role("button", name="Copy as curl").first.click()
    check(page)


def test_everything_is_reached_by_keyboard(page: Page, slow: ServerProcess) -> None:
    open_page(page, slow)
    press = page.keyboard.press
    press("Tab")
    expect(page.get_by_text("Skip to content")).to_be_focused()
    press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.reload()
    says(page, "Live")
    press("Tab")
    press("Tab")
    expect(page.get_by_role("tab", name="Live")).to_be_focused()
    press("ArrowRight")
    expect(page.get_by_role("tab", name="Playground")).to_be_focused()
    assert page.url.endswith("#/playground")
    reached = []
    for _ in range(20):
        press("Tab")
        reached.append(
            page.evaluate("document.activeElement.ariaLabel || document.activeElement.id")
        )
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        visible = page.evaluate("document.activeElement.matches(':focus-visible')")
        assert not visible or outline == "solid" or reached[-1] == "" or reached[-1] is None
        if reached[-1] == "send":
            break
    assert {"Theme: system", "add-pane", "Model of pane 1", "Conversation 1", "prompt", "send"} <= {
        *reached
    }
    press("Shift+Tab")
    page.keyboard.type("hello")
    press("Enter")
    expect(page.locator(".assistant .text")).not_to_be_empty()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(page: Page, slow: ServerProcess, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
    page.set_viewport_size(PHONE)  # type: ignore[arg-type]
    open_page(page, slow)
    with Load(slow.base_url, 2):
        expect(page.locator(".requests tbody tr")).to_have_count(2)
        fits(page)
        check(page)
    page.get_by_role("tab", name="Playground").click()
    ask(page, "hello", max_tokens="20")
    done(page.locator(".assistant"))
    fits(page)
    check(page)
    for name in ("Send", "Stop", "Add a pane"):
        expect(page.get_by_role("button", name=name)).to_be_in_viewport(ratio=1)
