# SPDX-License-Identifier: Apache-2.0
"""The playground of the page, in Chromium."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect
from stage import ask, done, open_page, set_field

from pagoda.cli.server_process import ServerProcess

SUM = "What is 17 + 25?"


def open_playground(page: Page, server: ServerProcess) -> None:
    open_page(page, server, "#/playground")
    expect(page.locator(".pane select").first.locator("option")).to_have_count(1)


def answers(page: Page) -> Locator:
    return page.locator(".turn.assistant")


def answered(page: Page, server: ServerProcess, question: str = SUM, **fields: str) -> Locator:
    """The answer to a question that is asked first, greedily unless `fields` say otherwise."""
    open_playground(page, server)
    ask(page, question, **{"temperature": "0", **fields})
    done(answers(page).first)
    return answers(page).first


def code_of(page: Page, answer: Locator, kind: str) -> str:
    answer.get_by_role("button", name=f"Copy as {kind}").click()
    code = page.locator("#code").inner_text()
    expect(page.locator("#code-note")).to_have_text("Copied to the clipboard.")
    page.get_by_role("button", name="Close", exact=True).click()
    return code


def body_of(page: Page, answer: Locator) -> dict[str, Any]:
    """The body that is copied with an answer."""
    body: dict[str, Any] = json.loads(code_of(page, answer, "curl").split("-d '")[1][:-1])
    return body


def test_a_chat_is_answered_and_goes_on(page: Page, tiny: ServerProcess) -> None:
    first = answered(page, tiny)
    expect(first.locator(".text")).to_have_text("17 + 25 = 42")
    expect(first.locator(".meta")).to_have_text(
        re.compile(r"complete · 9 tokens · TTFT .* ms · (.* tokens/s · )?prompt 15")
    )
    ask(page, "Reverse the word lantern.")
    done(answers(page).nth(1))
    assert body_of(page, answers(page).nth(1))["messages"] == [
        {"role": "user", "content": SUM},
        {"role": "assistant", "content": "17 + 25 = 42"},
        {"role": "user", "content": "Reverse the word lantern."},
    ]


def test_an_answer_streams_and_is_stopped_and_made_again(page: Page, slow: ServerProcess) -> None:
    open_playground(page, slow)
    ask(page, "Tell me something long.", max_tokens="4000", ignore_eos="true", seed="7")
    answer = answers(page).first
    expect(answer.locator(".text")).not_to_be_empty()
    before = answer.locator(".text").inner_text()
    page.wait_for_function(
        "before => document.querySelector('.assistant .text').innerText.length > before + 20",
        arg=len(before),
    )
    page.get_by_role("button", name="Stop").click()
    done(answer)
    expect(answer.locator(".meta")).to_contain_text("stopped here")
    text = answer.locator(".text").inner_text()
    assert text.startswith(before)
    set_field(page, "max_tokens", "12")
    answer.get_by_role("button", name="Regenerate").click()
    done(answers(page).first)
    expect(answers(page)).to_have_count(1)
    expect(answers(page).first.locator(".meta")).to_contain_text("cut at max_tokens · 12 tokens")
    again = answers(page).first.locator(".text").inner_text()
    again = again.rstrip("\ufffd")  # it may end within a character
    shorter = min(len(text), len(again))
    assert shorter > 10
    assert text[:shorter] == again[:shorter]


@pytest.mark.parametrize(("after_s", "is_told"), [(0.05, False), (0.5, True)])
def test_a_speed_is_told_where_it_means_something(
    page: Page, tiny: ServerProcess, after_s: float, is_told: bool
) -> None:
    open_playground(page, tiny)
    summary = page.evaluate(
        """async seconds => {
            const { Answer } = await import("/ui/answer.js");
            const answer = new Answer("/v1/completions", {}, {});
            answer.take({ choices: [{ index: 0, text: "a", finish_reason: null }] });
            answer.take({ choices: [{ index: 0, text: "b", finish_reason: "stop" }] });
            answer.endedAt = answer.firstAt + 1000 * seconds;
            return answer.summary();
        }""",
        after_s,
    )
    assert summary.startswith("complete · 2 tokens · TTFT ")
    assert ("tokens/s" in summary) == is_told


def test_a_prompt_is_edited_and_asked_again(page: Page, tiny: ServerProcess) -> None:
    answered(page, tiny)
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the prompt").fill("What is 17 + 26?")
    page.get_by_role("button", name="Ask again").click()
    expect(answers(page).first.locator(".text")).to_have_text("17 + 26 = 43")
    expect(answers(page)).to_have_count(1)
    expect(page.locator(".turn.user .text")).to_have_text("What is 17 + 26?")


def test_how_likely_each_token_was(page: Page, tiny: ServerProcess) -> None:
    answered(page, tiny, top="3")
    tokens = page.locator(".token")
    expect(tokens).to_have_count(9)
    expect(page.locator(".token.special")).to_have_text("<|im_end|>")
    tip = page.get_by_role("tooltip")
    tokens.nth(2).hover()
    expect(tip.locator("li")).to_have_count(3)
    expect(tip).to_contain_text(re.compile(r"log-probability −?\d+\.\d{3}"))
    expect(tip.locator(".chosen .what")).to_have_text("␣+␣")
    page.mouse.move(5, 5)
    expect(tip).to_be_hidden()
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    expect(tip.locator(".chosen .what")).to_have_text("7")
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()


def test_a_completion_with_two_answers(page: Page, tiny: ServerProcess) -> None:
    open_playground(page, tiny)
    page.get_by_text("Completion").click()
    ask(page, "1 2 3", max_tokens="5", n="2", top="1", ignore_eos="true")
    done(answers(page).first)
    expect(page.locator(".choice")).to_have_count(2)
    expect(page.locator(".choice").nth(1).locator(".token")).to_have_count(5)
    expect(answers(page).locator(".meta")).to_contain_text("10 tokens")


def tool(name: str, description: str, parameter: str) -> dict[str, object]:
    parameters = {
        "type": "object",
        "properties": {parameter: {"type": "string"}},
        "required": [parameter],
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [
    tool("calculator", "Evaluate an arithmetic expression.", "expression"),
    tool("lookup", "Look up the value of a key.", "key"),
]


def test_a_tool_is_called_and_its_result_sent(page: Page, tiny: ServerProcess) -> None:
    first = answered(page, tiny, "Use the calculator: 94 * 24", tools=json.dumps(TOOLS))
    call = first.locator(".calls li")
    expect(call.locator("code")).to_have_text('calculator({"expression": "94 * 24"})')
    expect(first.locator(".meta")).to_contain_text("calls tools")
    call.get_by_label("Result").fill("2256")
    page.get_by_role("button", name="Send results").click()
    done(answers(page).nth(1))
    [_, called, result] = body_of(page, answers(page).nth(1))["messages"]
    assert result == {
        "role": "tool",
        "tool_call_id": called["tool_calls"][0]["id"],
        "content": "2256",
    }


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("schema", '{"type": "number", "multipleOf": true}', "multipleOf"),
        ("temperature", "-1", "temperature must be in [0.0, 100.0], got -1"),
        ("tools", "[{", "tools is not valid JSON"),
        ("seed", "12x", "seed must be a number, got 12x."),
        ("seed", "9007199254740993", "seed must be at most 9007199254740991 here, got 9007199"),
        ("temperature", "1e999", "temperature must be at most 9007199254740991 here, got 1e999."),
        ("temperature", "-Infinity", "temperature must be at most 9007199254740991 here"),
        ("logit_bias", '{"17": 1e999}', "logit_bias must be at most 9007199254740991 here"),
    ],
)
def test_what_is_refused_is_said(
    page: Page, tiny: ServerProcess, field: str, value: str, said: str
) -> None:
    open_playground(page, tiny)
    ask(page, "hello", **{field: value})
    expect(page.get_by_role("alert")).to_contain_text(said)


def test_an_announcement_is_repeated(page: Page, tiny: ServerProcess) -> None:
    open_playground(page, tiny)
    page.evaluate(
        "() => { window.said = []; new MutationObserver(() => window.said.push("
        "document.getElementById('announce').textContent))"
        ".observe(document.getElementById('announce'), { childList: true }); }"
    )
    for number in range(2):
        ask(page, SUM)
        done(answers(page).nth(number))
        page.wait_for_function(
            "number => window.said.filter((text) => text === 'Pane 1 has answered.').length > number",
            arg=number,
        )
    assert page.evaluate("window.said.filter((text) => text === '').length") >= 1


def test_blanks_may_end_an_answer(page: Page, tiny: ServerProcess) -> None:
    first = answered(page, tiny, stop=" = \n")
    expect(first.locator(".text")).to_have_text("17 + 25")
    assert body_of(page, first)["stop"] == [" = "]


def test_one_prompt_for_several_panes(page: Page, tiny: ServerProcess) -> None:
    open_playground(page, tiny)
    add = page.get_by_role("button", name="Add a pane")
    add.click()
    first, second = page.locator(".pane").all()
    set_field(first, "temperature", "0")
    set_field(second, "max_tokens", "3")
    ask(page, SUM)
    done(first.locator(".assistant"))
    done(second.locator(".assistant"))
    expect(first.locator(".assistant .text")).to_have_text("17 + 25 = 42")
    expect(second.locator(".meta")).to_contain_text("cut at max_tokens · 3 tokens")
    add.click()
    add.click()
    expect(add).to_be_disabled()
    page.get_by_role("button", name="Close pane 2").click()
    expect(page.locator(".pane")).to_have_count(3)


def test_what_is_copied_gives_the_same_answer(page: Page, tiny: ServerProcess) -> None:
    first = answered(page, tiny, top_k="5", system='It\'s "you" & I: $HOME `x` \\ done')
    expected = first.locator(".text").inner_text()
    curl = code_of(page, first, "curl")
    sent = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, check=True).stdout
    events = [json.loads(line[6:]) for line in sent.split("\n\n") if line.startswith("data: {")]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == expected
    python = code_of(page, first, "Python")
    said = subprocess.run(
        [sys.executable, "-c", python], capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == expected
