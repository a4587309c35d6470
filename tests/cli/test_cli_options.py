from __future__ import annotations

from pagoda.cli.options import AnswerOptions, SamplingOptions


def test_a_body_holds_only_what_was_given() -> None:
    assert SamplingOptions().body() == {}
    assert AnswerOptions().body(None) == {}
    assert SamplingOptions(temperature=0.0, top_k=3).body() == {"temperature": 0.0, "top_k": 3}
    options = AnswerOptions(max_tokens=5, stop=("a", "b"))
    assert options.body(3) == {"max_tokens": 5, "stop": ["a", "b"], "seed": 3}
