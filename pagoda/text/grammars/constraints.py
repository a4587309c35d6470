# SPDX-License-Identifier: Apache-2.0
"""Grammars of answers out of what clients say: JSON schemas, regular expressions, choices, Lark and EBNF."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pagoda.errors import refuse
from pagoda.messages.frontend import Grammar
from pagoda.text.grammars.ebnf import is_lark, lark_of_ebnf
from pagoda.text.grammars.lark_references import check_references
from pagoda.text.grammars.schema_multiples import MAX_STEPS, steps_of, takes_too_much
from pagoda.text.grammars.schema_types import MAX_OPTIONAL, has_too_many_optional
from pagoda.text.grammars.tool_schemas import eased_schema
from pagoda.text.json_size import json_size

MAX_GRAMMAR_BYTES = 128 << 10
"""Bytes of the text of a grammar."""
MAX_CHOICES = 4096
_MAX_DEPTH = 100
WHITESPACE = r" ?|\r?\n[ \t]{0,32}"
"""White space between parts of a JSON value: as models write it, and never without end."""
_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
"""Formats of strings that are held. Others are annotations, which nobody checks."""
_VALUES = frozenset(("const", "enum", "default", "examples", "example"))
"""Keywords whose values are no schemas."""
_SCHEMAS_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_KINDS = ("json", "regex", "choice", "grammar", "json_object")
"""Fields of vLLM's `structured_outputs` that constrain an answer; at most one is given."""
_JSON_OPTIONS = {
    "whitespace_pattern": "whitespace",
    "disable_any_whitespace": "disable_whitespace",
}
_NEUTRAL_OPTIONS = ("disable_fallback", "disable_additional_properties", "_backend")


def json_object_grammar() -> Grammar:
    """Any JSON object."""
    return json_grammar({"type": "object"}, "response_format")


def json_grammar(
    schema: Mapping[str, Any] | bool | str,
    param: str,
    *,
    whitespace: str | None = None,
    disable_whitespace: bool = False,
    is_strict: bool = True,
) -> Grammar:
    """JSON values that a schema describes; a string holds the schema as JSON. `whitespace` is a regular expression
    for the white space between parts. If it is not strict, keywords that cannot be held are passed over.
    Raises InvalidRequestError: it is no schema, or too large; names `param`."""
    if isinstance(schema, str):
        _check_size(schema, param)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            refuse(param, f"must be a JSON schema, but it is not valid JSON: {error}")
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, Mapping):
        refuse(param, "must be a JSON schema, an object")
    if json_size(schema, MAX_GRAMMAR_BYTES) > MAX_GRAMMAR_BYTES:  # before any work on it
        refuse(param, f"has more than {MAX_GRAMMAR_BYTES} bytes")
    multiples: list[int] = []
    checked = _checked(schema, param, multiples, _MAX_DEPTH)
    if not is_strict:
        checked = eased_schema(checked)
    elif takes_too_much(multiples):
        refuse(
            param,
            f"has a multipleOf that takes too much work; at most {MAX_STEPS} steps are served",
        )
    options: dict[str, Any] = {"whitespace_flexible": not disable_whitespace}
    if not is_strict:
        options["lenient"] = True
    if not disable_whitespace:
        options["whitespace_pattern"] = WHITESPACE if whitespace is None else whitespace
    text = json.dumps({**checked, "x-guidance": options}, ensure_ascii=False)
    _check_size(text, param)
    return Grammar("json_schema", text)


def _checked(schema: Any, param: str, multiples: list[int], depth: int) -> Any:
    """The schema without formats that nobody checks. `multiples` gets the steps of each `multipleOf`."""
    if not depth:
        refuse(param, f"is nested more than {_MAX_DEPTH} levels deep")
    if isinstance(schema, list):
        return [_checked(item, param, multiples, depth - 1) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    if has_too_many_optional(schema):
        rule = f"has an object with more than {MAX_OPTIONAL} properties that may be left out"
        refuse(param, rule)
    checked: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _VALUES:
            checked[name] = value
        elif name in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            checked[name] = {
                key: _checked(part, param, multiples, depth - 1) for key, part in value.items()
            }
        elif name == "format" and isinstance(value, str):
            if value in _FORMATS:
                checked[name] = value
        else:
            if name == "multipleOf" and (steps := steps_of(value)) is not None:
                multiples.append(steps)
            checked[name] = _checked(value, param, multiples, depth - 1)
    return checked


def regex_grammar(pattern: object, param: str) -> Grammar:
    """Texts that a regular expression matches as a whole. Raises InvalidRequestError: names `param`."""
    if not isinstance(pattern, str):
        refuse(param, "must be a regular expression, a string")
    _check_size(pattern, param)
    return Grammar("regex", pattern)


def choice_grammar(choices: object, param: str) -> Grammar:
    """One of some texts. Raises InvalidRequestError: they are not some strings; names `param`."""
    if not isinstance(choices, Sequence) or isinstance(choices, str) or not choices:
        refuse(param, "must be a list of at least one string")
    if len(choices) > MAX_CHOICES:
        refuse(param, f"takes at most {MAX_CHOICES} strings")
    if not all(isinstance(choice, str) for choice in choices):
        refuse(param, "must be a list of strings")
    if sum(map(len, choices)) > MAX_GRAMMAR_BYTES:
        refuse(param, f"has more than {MAX_GRAMMAR_BYTES} bytes")
    # One terminal, whose automaton is followed much faster than as many alternatives of a rule.
    spelled = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    text = f"start: CHOICE\nCHOICE: {spelled}"
    text = text.replace("\x7f", r"\u007f")  # the one character that JSON has bare, and Lark has not
    _check_size(text, param)
    return Grammar("lark", text)


def language_grammar(text: object, param: str) -> Grammar:
    """The language of a grammar in Lark's syntax, or in EBNF as llama.cpp and vLLM write it.
    Raises InvalidRequestError: it is neither; names `param`."""
    if not isinstance(text, str) or not text.strip():
        refuse(param, "must be a grammar in Lark's syntax or in EBNF")
    _check_size(text, param)
    if not is_lark(text):
        return Grammar("lark", lark_of_ebnf(text, param))
    check_references(text, param)
    if "%json" in text:
        refuse(param, "has %json, which is not served in grammars; ask for the JSON schema itself")
    return Grammar("lark", text)


def grammar_of(kind: str, value: Any, param: str, options: Mapping[str, Any]) -> Grammar:
    """The grammar of a constraint named as in `structured_outputs`; `options` are arguments of `json_grammar`.
    Raises InvalidRequestError: the value is wrong; names `param`."""
    match kind:
        case "json":
            if not isinstance(value, dict | str | bool):
                refuse(param, "must be a JSON schema, as an object or as its text")
            return json_grammar(value, param, **options)
        case "regex":
            return regex_grammar(value, param)
        case "choice":
            return choice_grammar(value, param)
    return language_grammar(value, param)


def structured_grammar(value: Any, param: str) -> Grammar | None:
    """The grammar of vLLM's `structured_outputs`; None if nothing in it constrains the answer.
    Raises InvalidRequestError: a field is wrong, or there are two constraints; names a field of `param`."""
    if not isinstance(value, dict):
        refuse(param, f"must be an object with one of {', '.join(_KINDS)}")
    given = {name: part for name, part in value.items() if part is not None}
    if "structural_tag" in given:
        refuse(f"{param}.structural_tag", "is not supported", "not_supported")
    check_names(given, {*_KINDS, *_JSON_OPTIONS, *_NEUTRAL_OPTIONS}, param)
    if given.get("disable_additional_properties"):
        refuse(f"{param}.disable_additional_properties", "is not supported", "not_supported")
    kinds = [name for name in _KINDS if given.get(name, False) is not False]
    if len(kinds) > 1:
        refuse(f"{param}.{kinds[1]}", f"and {kinds[0]} both constrain the answer; give one of them")
    options = {theirs: given[ours] for ours, theirs in _JSON_OPTIONS.items() if ours in given}
    if not isinstance(options.get("whitespace"), str | None):
        refuse(f"{param}.whitespace_pattern", "must be a regular expression, a string")
    if not kinds:
        return None
    (kind,) = kinds
    if kind == "json_object":
        return json_grammar({"type": "object"}, f"{param}.json_object", **options)
    return grammar_of(kind, given[kind], f"{param}.{kind}", options)


def check_names(value: Mapping[str, Any], known: set[str], param: str) -> None:
    """Raises InvalidRequestError: an object has a field that is not known; names it as one of `param`."""
    for name, part in value.items():
        if name not in known and part is not None:
            refuse(f"{param}.{str(name)[:64]}", "is not a known field", "unknown_field")


def _check_size(text: str, param: str) -> None:
    if (
        len(text) > MAX_GRAMMAR_BYTES
        or len(text.encode("utf-8", "surrogatepass")) > MAX_GRAMMAR_BYTES
    ):
        refuse(param, f"has more than {MAX_GRAMMAR_BYTES} bytes")
    if re.search("[\ud800-\udfff]", text):
        refuse(param, "holds half of a surrogate pair, which is not valid Unicode")
