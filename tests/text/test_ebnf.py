# SPDX-License-Identifier: Apache-2.0
"""EBNF as clients write it, compared with what llguidance then accepts."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher, LLTokenizer

from pagoda.engine.structured_output.vocabulary import TokenTextsOrder
from pagoda.errors import InvalidRequestError
from pagoda.text.grammars.ebnf import is_lark, lark_of_ebnf
from pagoda.text.token_texts import token_texts

TEXTS = token_texts(TokenTextsOrder("tiny", "dummy", simulated=True))
TOKENIZER = LLTokenizer(TEXTS.tokenizer, eos_token=list(TEXTS.eos_token_ids))

SQL = """
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
"""
LIST = r"""
# a list of words, and lists in it
root  ::= item ("," ws item)*   # at least one
item  ::= word | "[" root "]"
word  ::= [a-z_\-]{1,4} | '"' [^"\\]* '"'
ws    ::= [ \t\n]?
"""
ARITHMETIC = """root ::= (expr "=" term "\\n")+
expr ::= term ([-+*/] term)*
term ::= [0-9]+ | "(" expr ")"
"""


def accepts(lark: str, text: str) -> bool:
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(lark), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = TOKENIZER.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "inside", "outside"),
    [
        (
            SQL,
            ["SELECT col_1  from table_2  where col_2 = 1 "],
            ["SELECT col_3  from table_2  where col_2 = 1 ", ""],
        ),
        (LIST, ["ab", "a, b", "[a,b],c", '"x/y]"', "a-_b", "[[a]]"], ["A", "abcde", "[a", "a,"]),
        (ARITHMETIC, ["1+2=3\n", "(1-2)*3/4=7\n1=1\n"], ["1+=3\n", "1+2"]),
        ('root ::= "\\u00e9\\x41\\"" . [^\\]a]?', ['éA"xb', 'éA"x'], ['éA"x]', 'éA"xa']),
        ('start ::= "a"? "b"* ("c" | "")', ["", "abbb", "c"], ["ac ", "ba"]),
    ],
)
def test_languages(grammar: str, inside: list[str], outside: list[str]) -> None:
    assert not is_lark(grammar)
    lark = lark_of_ebnf(grammar, "g")
    assert is_lark(lark)
    for text in inside:
        assert accepts(lark, text), text
    for text in outside:
        assert not accepts(lark, text), text


@pytest.mark.parametrize(
    ("grammar", "fault"),
    [
        ('root ::= "a" foo', "no rule 'foo'"),
        ('a ::= "a"', "no rule named root"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1"),
        ('root ::= ("a"\nb ::= "c"', "lacks a closing parenthesis at line 2"),
        ('root ::= "a")', "parenthesis too many at line 1, column 13"),
        ('root ::= "a', "is not EBNF at line 1, column 10"),
        ("hello", "is not EBNF at line 1, column 1"),
        ('root ::= "\\ud800"', "which is no character"),
    ],
)
def test_faults_are_named(grammar: str, fault: str) -> None:
    with pytest.raises(InvalidRequestError, match=fault) as caught:
        lark_of_ebnf(grammar, "structured_outputs.grammar")
    assert caught.value.param == "structured_outputs.grammar"
