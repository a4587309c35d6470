# SPDX-License-Identifier: Apache-2.0
"""Names in grammars in Lark's syntax: what is refused before anything is compiled, and that nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from operations import assert_linear

from pagoda.errors import InvalidRequestError
from pagoda.text.grammars.constraints import language_grammar
from pagoda.text.grammars.lark_references import MAX_REFERENCES, check_references


def chain(length: int, end: str = '"a"') -> str:
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(length))
    return f"start: r0\n{rules}r{length}: {end}\n"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('start: "a" b\nb: foo', "names 'foo' at line 2, column 4"),
        ('start: "a" | "b: c" | b', "names 'b' at line 1, column 23"),
        ("start: /a/ NAME\n", "names 'NAME' at line 1, column 12"),
        (chain(100, "foo"), "names 'foo' at line 102, column 7"),
        (chain(9000, "foo"), "names 'foo' at line 9002, column 8"),
        (
            chain(9000, "/(/"),
            f"more than {MAX_REFERENCES} rules in a chain, at line {MAX_REFERENCES}",
        ),
        ("start: start2\n" + chain(300).replace("start", "start2"), "rules in a chain"),
    ],
    ids=range(7),
)
def test_what_is_refused(text: str, where: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^guided_grammar ") as caught:
        language_grammar(text, "guided_grammar")
    assert where in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        chain(MAX_REFERENCES - 2),
        '%llguidance {"no_forcing": true}\nstart: a | b\na: "x" // comment: c\nb: /y: z/i',
        'start: a*\na[capture, max_tokens=5]: /x/ "y"i\n# comment: d\n',
        'start[temperature=0.5]: a{2,3} | ("q" a)?\na.2: "x"\n%ignore / +/',
        "%import common.INT\nstart: INT WORD",
        'start: a::0x1\na::_: "x" b::1\nb::_: "c"',
        "start: <|im_end|> | <[4-7]> | TEXT\nTEXT: /(?s:.*)/",
        'start: expr\n?expr: expr "+" term | term\n!term: "(" expr ")" | /[0-9]+/',
        'start: tool\ntool[stop="x: y"]: /.*/\n',
        'start: tool\ntool[stop="]", suffix=/[\\]]/]: /.*/\n',
        'start: a\n  | b\na: "x" -> one\n  | "y" -> two\nb: /z/',
    ],
    ids=range(11),
)
def test_what_is_not(text: str) -> None:
    check_references(text, "guided_grammar")


def test_the_check_is_linear() -> None:
    def make(length: int) -> Callable[[], object]:
        text = chain(50) + "".join(f"x{i}: r0 x{i // 2} r1\n" for i in range(length))
        return lambda: check_references(text, "p")

    assert_linear(make, [200, 400, 2000])


@pytest.mark.parametrize(
    "part", ['\\"', "/", "[", "a[", "<", "{", "%a{", '"[', ":", "a[/", "\\/", "->"]
)
def test_damaged_texts_end(part: str) -> None:
    check_references("%lark\n" + part * (100_000 // len(part)), "p")
