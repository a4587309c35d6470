# SPDX-License-Identifier: Apache-2.0
"""The page of combinations names tests and sentences that are there."""

from __future__ import annotations

import re

from tools.combinations_page import PAGE, PAIRS, ROOT, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "make docs writes the page"


def test_every_pair_stands_once() -> None:
    pairs = [(pair.one, pair.other) for pair in PAIRS]
    assert len(pairs) == len(set(pairs))


def test_every_proof_is_there() -> None:
    for pair in PAIRS:
        name, _, test = pair.proof.partition("::")
        source = (ROOT / name).read_text(encoding="utf-8")
        if pair.sentence:
            assert pair.sentence in source, pair
            continue
        function, _, case = test.removesuffix("]").partition("[")
        assert re.search(rf"^(async )?(def|class) {function}\b", source, re.MULTILINE), pair
        assert f'"{case}": (' in source or not case, pair
