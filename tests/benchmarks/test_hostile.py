"""The trial of hostile clients, in its short form: answers and good streams, not times."""

from __future__ import annotations

from benchmarks.chaos.hostile.client import attacks
from benchmarks.chaos.hostile.trial import measure_attacks


def test_attacks_are_answered_rightly_and_break_no_good_stream() -> None:
    found = measure_attacks(["--short"])
    assert len(found.rows) >= 6
    assert found.wrong == []
    assert found.broken == []


def test_attacks_have_names_of_their_own() -> None:
    names = [attack.name for attack in attacks()]
    assert len(names) == len(set(names))
    assert len(names) > 120
