# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from published_templates import published

from pagoda.text.templates.chat_template import ChatTemplate


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("deepseek-v3.1:latest", "arguments as text"),
        ("deepseek-r1:8b", "content null beside calls; content and calls apart"),
        (
            "qwen3-coder:30b",
            "tools shown; calls shown; system messages anywhere; arguments as object",
        ),
        ("gemma3:1b", "parts for assistant, user; one part for system"),
        ("llama3.1:8b", "one call a message"),
        ("mistralai-Mistral-Nemo-Instruct-2407.jinja", "short ids of calls"),
        ("Qwen3.5-4B.jinja", "system messages first"),
        ("gemma2:2b", "system messages not shown"),
        ("phi4-mini:3.8b", "tools in the system message"),
        ("smollm2:135m", "tools not shown; calls not shown"),
    ],
)
def test_traits_in_words(name: str, said: str) -> None:
    assert said in str(published(name).tool_traits)


def test_tools_change_what_a_template_takes() -> None:
    """That of Llama 4 puts tools into the user's first message, which must be a text then."""
    template = published("llama4:latest")
    assert "user" in template.traits.parts
    assert "user" not in template.tool_traits.parts


def test_roles_of_results() -> None:
    source = (
        "{% for m in messages %}{% if m.role in ['user', 'observation'] %}{{ m.content }}"
        "{% elif m.role == 'assistant' %}{{ m.tool_calls | tojson }}"
        "{% else %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    )
    traits = ChatTemplate(source, special_tokens={}).traits
    assert (traits.calls, traits.result_role, traits.system) == (True, "observation", "none")


def test_a_template_that_runs_long_ends_its_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All probes have one budget: a template cannot keep a server from its start for dozens of times as long."""
    monkeypatch.setattr("pagoda.text.templates.template_sandbox.MAX_STEPS", 10_000)
    loop = "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate(loop + "{{ messages[0].content }}", special_tokens={})
    assert not template.traits.calls
    assert template.traits.system == "none"
