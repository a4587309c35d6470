from __future__ import annotations

from pagoda.cli.options import SamplingOptions


def test_a_body_holds_only_what_was_given() -> None:
    assert SamplingOptions().body(None) == {}
    options = SamplingOptions(temperature=0.0, max_tokens=5, stop=("a", "b"))
    assert options.body(3) == {"temperature": 0.0, "max_tokens": 5, "stop": ["a", "b"], "seed": 3}
