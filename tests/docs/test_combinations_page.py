# SPDX-License-Identifier: Apache-2.0
"""The page of combinations leaves no pair of features open, and names tests and sentences that are there."""

from __future__ import annotations

import re
from itertools import combinations, starmap

from tools.combinations_page import PAGE, PAIRS, ROOT, page
from tools.features import FEATURES, PROVEN, REFUSED, SETS_OF_TESTS, choice_of, pair, proof


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "make docs writes the page"


def test_every_pair_stands_once() -> None:
    pairs = [(pair.one, pair.other) for pair in PAIRS]
    assert len(pairs) == len(set(pairs))


def test_every_pair_of_features_is_proven_or_refused_or_one_choice() -> None:
    """And is one of these alone; sets ask for nothing that is refused."""
    for one, other in combinations(FEATURES, 2):
        said = bool(choice_of(one, other)), pair(one, other) in REFUSED, bool(proof(one, other))
        assert sum(said) == 1, (one, other)
    for sets in SETS_OF_TESTS.values():
        for both in (it for features in sets for it in starmap(pair, combinations(features, 2))):
            assert both not in REFUSED
            assert not choice_of(*both)
    assert not PROVEN.keys() & REFUSED.keys()


def test_every_proof_is_there() -> None:
    proofs = {(it.proof, it.sentence) for it in PAIRS}
    proofs |= {(proof(one, other), "") for one, other in combinations(FEATURES, 2)} - {("", "")}
    proofs |= {(it.module, it.sentence) for it in REFUSED.values()}
    for place, sentence in proofs:
        name, _, test = place.partition("::")
        source = (ROOT / name).read_text(encoding="utf-8")
        if sentence:
            assert sentence in source, (name, sentence)
            continue
        function, _, case = test.removesuffix("]").partition("[")
        assert re.search(rf"^(async )?(def|class) {function}\b", source, re.MULTILINE), place
        if case.isdecimal():
            sets = SETS_OF_TESTS[f"{name}::{function}"]
            named = re.search(r'parametrize\("number", range\(len\((\w+)\)\)\)', source)
            assert named is not None
            assert int(case) < len(sets)
        else:
            assert f'"{case}": (' in source or not case, place
