# SPDX-License-Identifier: Apache-2.0
"""The live view of the page, in Chromium."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import openai
import pytest
from playwright.sync_api import Locator, Page, expect
from stage import SLOW, Load, ask, done, open_page, says

from pagoda.cli.server_process import ServerProcess, server_process


def tile(page: Page, name: str) -> Locator:
    return page.locator(".tile", has=page.get_by_text(name, exact=True)).locator(".big")


def until(page: Page, condition: str) -> None:
    page.wait_for_function(condition, timeout=20_000)


def test_an_idle_server_looks_idle(page: Page, slow: ServerProcess) -> None:
    open_page(page, slow)
    expect(tile(page, "Running")).to_have_text("0")
    expect(page.get_by_text("Nothing is running.")).to_be_visible()
    expect(page.locator(".replicas li")).to_have_count(1)
    expect(page.locator(".replicas .badge")).to_have_text("ready")
    expect(page.locator("#model")).to_have_text("synthetic")


def test_everything_moves_under_load(page: Page, slow: ServerProcess) -> None:
    open_page(page, slow)
    picture = page.locator(".field")
    expect(picture).to_have_attribute("aria-label", re.compile("8192 KV blocks .* 0 are in use"))
    with Load(slow.base_url, 6):
        expect(tile(page, "Running")).to_have_text(re.compile(r"[1-6]"))
        expect(tile(page, "Generated")).to_have_text(re.compile(r"[1-9]\d+"))
        expect(tile(page, "TTFT p50")).to_have_text(re.compile(r"\d+ (ms|s)|\d+\.\d+ (ms|s)"))
        expect(tile(page, "ITL p50")).to_have_text(re.compile(r"\d.* m?s"))
        expect(picture).not_to_have_attribute("aria-label", re.compile("0 are in use"))
        expect(page.locator(".requests tbody tr").first).to_be_visible()
        before = page.locator(".line.decode").first.get_attribute("d")
        until(
            page,
            "() => document.querySelector('path.decode:not(.line)').getAttribute('d').length > 300",
        )
        expect(page.locator(".line.decode").first).not_to_have_attribute("d", str(before))
        chart = page.get_by_role("slider", name="Tokens per second")
        told = re.compile(r"^now: generated [\d.]+ ?k?/s, prompts [\d.]+ ?k?/s$")
        expect(chart).to_have_attribute("aria-valuetext", told)
        bar = page.locator(".requests progress").first
        value = bar.get_attribute("value")
        expect(bar).not_to_have_attribute("value", str(value))
    expect(page.get_by_text("Nothing is running.")).to_be_visible()
    expect(picture).to_have_attribute("aria-label", re.compile(r" 0 are in use, [1-9]\d* cached"))


def test_steps_are_told_by_keyboard_and_pointer(page: Page, slow: ServerProcess) -> None:
    open_page(page, slow)
    timeline = page.get_by_role("slider", name="Steps of the last minute")
    with Load(slow.base_url, 2):
        until(page, "() => document.querySelector('.frame.steps').ariaValueMax > 20")
        timeline.focus()
        page.keyboard.press("End")
        which = r"(step \d+|\d+ steps up to number \d+, the longest)"
        told = rf"s ago: {which} .* ms; \d+ prompt tokens?, \d+ decoding, \d+ sequences?"
        expect(timeline).to_have_attribute("aria-valuetext", re.compile(told))
        expect(page.locator(".readout")).to_have_text(re.compile(told))
        page.keyboard.press("Home")
        expect(timeline).to_have_attribute("aria-valuenow", "0")
        page.keyboard.press("Escape")
        expect(page.locator(".readout")).to_contain_text("the longest")
        box = timeline.bounding_box()
        assert box is not None
        for turn in range(200):  # until steps of this load have come to that place
            page.mouse.move(box["x"] + box["width"] - 40 - turn % 2, box["y"] + 60)
            if re.search(told, page.locator(".readout").inner_text()):
                break
            page.wait_for_timeout(100)
        expect(page.locator(".readout")).to_have_text(re.compile(told))


def test_a_full_replica_is_told_from_an_empty_one(page: Page) -> None:
    arguments = (*SLOW, "--data-parallel-size", "2", "--num-kv-blocks", "100")
    with server_process(arguments) as server:
        open_page(page, server)
        rows = page.locator(".of-replicas li")
        idle = "0 in use, 0 cached of 100"
        expect(rows).to_have_text([f"0{idle}", f"1{idle}"])
        expect(page.locator(".field")).to_be_hidden()
        with Load(server.base_url, 1):
            until(
                page,
                "() => { const bars = [...document.querySelectorAll('.of-replicas path.used')];"
                "const empty = bars.filter((bar) => bar.getAttribute('d').startsWith('M0 0h0v'));"
                "return bars.length === 2 && empty.length === 1; }",
            )


def test_a_chart_is_read_by_keyboard(page: Page, slow: ServerProcess) -> None:
    open_page(page, slow)
    chart = page.get_by_role("slider", name="Requests")
    until(page, "() => document.querySelector('.chart .frame').ariaValueMax > 1")
    chart.focus()
    page.keyboard.press("Home")
    expect(chart).to_have_attribute("aria-valuenow", "0")
    told = re.compile(r"^\d+ s ago: running 0, waiting 0$")
    expect(chart).to_have_attribute("aria-valuetext", told)
    page.keyboard.press("ArrowRight")
    expect(chart).to_have_attribute("aria-valuenow", "1")
    # Without an answer there is no time to its first token: it is unknown, and not 0.
    times = page.get_by_role("slider", name="Time to first token")
    times.focus()
    page.keyboard.press("Home")
    text = re.compile(r"^\d+ s ago: p50 unknown, p90 unknown, p99 unknown$")
    expect(times).to_have_attribute("aria-valuetext", text)


def test_charts_are_full_when_the_page_is_opened(page: Page) -> None:
    """Of what went on while nobody watched."""
    with server_process(SLOW) as server:
        client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none")
        client.completions.create(
            model="synthetic", prompt="hi", max_tokens=150, extra_body={"ignore_eos": True}
        )
        open_page(page, server)
        chart = page.get_by_role("slider", name="Tokens per second")
        until(page, "() => document.querySelector('.chart .frame').ariaValueMax >= 3")
        until(page, "() => document.querySelector('.frame.steps').ariaValueMax > 20")
        chart.focus()
        told = []
        page.keyboard.press("End")
        for _ in range(8):
            page.keyboard.press("ArrowLeft")
            told.append(chart.get_attribute("aria-valuetext"))
        assert any(re.search(r"generated [1-9]", text or "") for text in told)


def test_what_has_the_focus_does_not_speak_by_itself(page: Page, slow: ServerProcess) -> None:
    open_page(page, slow)
    timeline = page.get_by_role("slider", name="Steps of the last minute")
    with Load(slow.base_url, 2):
        until(page, "() => document.querySelector('.frame.steps').ariaValueMax > 20")
        timeline.focus()
        page.keyboard.press("End")
        said = timeline.get_attribute("aria-valuetext")
        shown = page.locator(".readout").inner_text()
        expect(page.locator(".readout")).not_to_have_text(shown)
        assert timeline.get_attribute("aria-valuetext") == said
        page.get_by_role("slider", name="Requests").focus()
        expect(timeline).not_to_have_attribute("aria-valuetext", str(said))


def test_an_answer_is_cancelled_from_the_table(page: Page, slow: ServerProcess) -> None:
    open_page(page, slow)
    with openai.OpenAI(base_url=f"{slow.base_url}/v1", api_key="x", max_retries=0) as client:
        stream = client.completions.create(
            model="synthetic",
            prompt="on and on",
            max_tokens=20_000,
            stream=True,
            extra_body={"ignore_eos": True},
            extra_headers={"X-Request-Id": "endless"},
        )
        row = page.locator("tr", has=page.locator("th[title^='endless-']"))
        expect(row).to_contain_text("generating")
        expect(row).to_contain_text("/ 20.0 k")
        row.get_by_role("button", name="Cancel endless-").click()
        expect(row).to_have_count(0)
        expect(page.locator("#announce")).to_have_text(
            re.compile("Request endless-.* was cancelled")
        )
        assert list(stream)[-1].choices[0].finish_reason == "abort"


def test_the_key_is_asked_for_and_kept(page: Page) -> None:
    with server_process([*SLOW, "--api-key", "open sesame"]) as server:
        page.goto(server.base_url)
        dialog = page.get_by_role("dialog", name="API key")
        expect(dialog).to_be_visible()
        dialog.get_by_label("Key").fill("wrong")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("does not accept this key")
        dialog.get_by_label("Key").fill("open sesame")
        dialog.get_by_role("button", name="Use this key").click()
        says(page, "Live")
        expect(page.locator("#model")).to_have_text("synthetic")
        page.reload()
        says(page, "Live")
        expect(dialog).to_be_hidden()
        page.get_by_role("tab", name="Playground").click()
        ask(page, "hello", max_tokens="5")
        expect(page.locator(".meta")).to_contain_text("tokens")
        page.get_by_role("button", name="Copy as curl").click()
        expect(page.locator("#code")).to_contain_text("Bearer $PAGODA_API_KEY")
        assert "sesame" not in page.content()


def test_the_page_reconnects_to_a_server_that_was_started_again(page: Page) -> None:
    # `server_process` waits for the end: an open page that held it up would be cut off with an error in the log.
    with server_process(SLOW) as server:
        open_page(page, server)
        port = server.base_url.rpartition(":")[2]
    says(page, "Reconnecting")
    expect(page.locator("#notice")).to_contain_text("reconnects when the server is back")
    command = [sys.executable, "-m", "pagoda", "serve", *SLOW, "--port", port]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as again:
        says(page, "Live", timeout=20_000)
        expect(page.locator("#notice")).to_contain_text("The server was started again")
        again.terminate()


def test_the_page_does_without_storage(page: Page, slow: ServerProcess) -> None:
    page.add_init_script(
        "for (const area of ['localStorage', 'sessionStorage']) Object.defineProperty(window, area, "
        "{ get() { throw new DOMException('not here', 'SecurityError'); } });"
    )
    open_page(page, slow)
    button = page.get_by_role("button", name="Theme")
    button.click()
    button.click()
    expect(button).to_have_accessible_name("Theme: dark")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def test_the_page_says_when_the_server_is_silent(page: Page) -> None:
    with server_process(SLOW) as server:
        open_page(page, server)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            says(page, "Reconnecting")
            expect(page.locator("#notice")).to_contain_text("has said nothing for 5 s. This page")
        finally:
            os.kill(server.pid, signal.SIGCONT)
        says(page, "Live")
        expect(page.locator("#notice")).to_be_hidden()


SET_HIDDEN = """hidden => {
    Object.defineProperty(document, "hidden", { get: () => hidden, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
}"""


def test_a_page_that_nobody_sees_asks_nothing(page: Page, slow: ServerProcess) -> None:
    open_page(page, slow)
    closed = lambda request: request.url.endswith("/v1/live")  # noqa: E731
    with page.expect_event("requestfailed", closed):
        page.evaluate(SET_HIDDEN, True)
    says(page, "Paused")
    with page.expect_request("**/v1/live"):
        page.evaluate(SET_HIDDEN, False)
    says(page, "Live")


def test_only_the_view_that_is_there_is_drawn(page: Page, slow: ServerProcess) -> None:
    open_page(page, slow)
    expect(page.locator(".line.decode").first).to_have_attribute("d", re.compile("L"))
    page.get_by_role("tab", name="Playground").click()
    expect(page.locator("#live")).to_be_hidden()
    page.evaluate(
        "() => { window.drawn = 0; new MutationObserver(() => window.drawn++)"
        ".observe(document.getElementById('live'), { childList: true, subtree: true }); }"
    )
    ask(page, "on and on", max_tokens="60", ignore_eos="true")  # longer than a snapshot
    done(page.locator(".assistant"))
    assert page.evaluate("window.drawn") == 0
    page.get_by_role("tab", name="Live").click()
    assert page.evaluate("() => new Promise(r => setTimeout(() => r(window.drawn)))") > 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_follows_the_system_or_the_button(
    page: Page, slow: ServerProcess, scheme: str
) -> None:
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    open_page(page, slow)
    dark, light = "rgb(14, 18, 23)", "rgb(244, 246, 248)"
    expect(page.locator("body")).to_have_css(
        "background-color", dark if scheme == "dark" else light
    )
    button = page.get_by_role("button", name="Theme")
    button.click()
    expect(page.locator("body")).to_have_css("background-color", light)
    button.click()
    expect(page.locator("body")).to_have_css("background-color", dark)
    page.reload()
    expect(page.locator("body")).to_have_css("background-color", dark)
