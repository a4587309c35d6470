# SPDX-License-Identifier: Apache-2.0
"""The environment that chat templates run in: Jinja's immutable sandbox, with bounds of work and of memory.

A template comes with a model, from whoever published it, and is rendered on an event loop. So whatever it does
costs steps of a budget, and no expression makes a text, a list or a number out of all proportion at once.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MAX_RENDERED_CHARS = 16 * 2**20
"""Characters of a rendering, and of any text on the way."""
MAX_STEPS = 1_000_000
"""Steps of one rendering: turns of loops, calls, operators; and one for each KiB of text or eight items. Templates
that look at all later messages of each one (gpt-oss) get as many steps more as there are pairs of messages."""
MAX_SECONDS = 3.0
"""Processor seconds of one rendering: for what steps do not count."""
BUDGET = "__budget__"
"""Name under which a rendering's variables hold its `Budget`; its attributes are private, so templates cannot."""

_MAX_PAIR_STEPS = 32_000_000
_STEPS_BETWEEN_LOOKS = 16
_MAX_ITEMS = 2**20
_MAX_WIDTH = 100_000
"""Highest whole number as an argument of a filter, or of a method that pads."""
_MAX_BITS = 4096
"""Bits of a whole number."""
_TEXT_FILTERS = frozenset(
    {"tojson", "string", "join", "pprint", "urlencode", "format", "xmlattr", "escape", "e"}
    | {"forceescape", "upper", "lower", "capitalize", "title", "replace", "trim", "indent"}
    | {"center", "wordwrap", "wordcount", "striptags", "urlize", "truncate", "safe"}
)
"""Filters that write a value as text, however deep it is."""
_COMPARING_FILTERS = frozenset({"unique", "sort", "groupby", "min", "max", "dictsort"})
_SPLITTING = frozenset({"split", "rsplit", "splitlines"})
_PADDING = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs"})
_NUMBER = re.compile(r"\d{1,12}")
_WIDTH_GIVEN = re.compile(r"%[-+ #0]*(\d*\.)?\*|\{[^}]*\{")
"""A width that is an argument, of `%` or of `format`."""
_WIDTH_OF_TIME = re.compile(r"%[-_0^#+]*\d")


class TemplateError(Exception):
    """A template refuses a conversation, or breaks a limit."""


class TemplateRefusalError(TemplateError):
    """A template refuses a conversation through `raise_exception`, or lacks something in it."""


class Budget:
    """Steps and processor time that are left to one rendering, which one thread does."""

    def __init__(self, num_messages: int = 0) -> None:
        """`num_messages` are those of the conversation."""
        self._steps = MAX_STEPS + min(2 * num_messages**2, _MAX_PAIR_STEPS)
        self._left = self._looked_at = self._steps
        self._deadline = time.thread_time() + MAX_SECONDS

    def _spend(self, steps: int) -> None:
        """Raises TemplateError: the rendering takes too many steps, or too long."""
        self._left -= steps
        if self._left < 0:
            raise TemplateError(f"it takes more than {self._steps} steps")
        if self._looked_at - self._left >= _STEPS_BETWEEN_LOOKS:
            self._looked_at = self._left
            if time.thread_time() > self._deadline:
                raise TemplateError(f"it takes more than {MAX_SECONDS:g} s")


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which bounds `range`; here everything else is bounded too."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _Generation],
            finalize=_finalize,
        )
        self.filters["tojson"] = _tojson
        self.filters = {name: _bounded(name, it) for name, it in self.filters.items()}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = _strftime_now

    def _generate(self, source: jinja2.nodes.Template, *args: Any, **options: Any) -> str:
        """Lets each turn of a loop cost a step, and values be looked at that are joined, compared, or keys."""
        for loop in list(source.find_all(jinja2.nodes.For)):
            loop.body.insert(0, jinja2.nodes.ExprStmt(_step(loop.lineno), lineno=loop.lineno))
            if loop.test is not None:
                loop.test = jinja2.nodes.And(_step(loop.lineno), loop.test, lineno=loop.lineno)
        _replace_concat(source)
        for compared in source.find_all(jinja2.nodes.Compare):
            compared.expr = _weighed(compared.expr)
            for operand in compared.ops:
                operand.expr = _weighed(operand.expr)
        for pair in source.find_all(jinja2.nodes.Pair):
            pair.key = _weighed(pair.key)
        return super()._generate(source, *args, **options)

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        budget: Budget = context.parent[BUDGET]
        budget._spend(1)
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if operator in ("*", "**"):
            if not numbers or (operator == "**" and abs(right) > 64):
                raise TemplateError(f"{operator} is for small numbers in a chat template")
        elif operator == "%" and isinstance(left, str | bytes):
            _check_layout(budget, left, "%", right if isinstance(right, tuple) else (right,))
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            _check_size(left, len(left) + len(right))
            _spend_items(budget, left, right)
        if numbers and (_is_huge(left) or _is_huge(right)):
            raise TemplateError("a number of a chat template has too many digits")
        return super().call_binop(context, operator, left, right)

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget: Budget = context.parent[BUDGET]
        if obj is Sandbox.weighed:
            _spend_text(budget, args[0])
            return args[0]
        budget._spend(1)
        if obj is Sandbox.step:
            return True
        _spend_items(budget, *args, *kwargs.values())
        method = getattr(obj, "__wrapped__", obj)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | bytes):
            if method.__name__ == "join" and args:
                args = (_listed(budget, args[0]), *args[1:])
            _check_method(budget, owner, method.__name__, args, kwargs)
        elif isinstance(owner, int) and method.__name__ == "to_bytes":
            raise TemplateError("to_bytes is not for chat templates")
        return super().call(context, obj, *args, **kwargs)

    @staticmethod
    def step() -> bool:
        """Does nothing, at each turn of a loop: the call costs a step."""
        return True

    @staticmethod
    def weighed(value: Any) -> Any:
        """The value, which is compared or hashed next: the call costs what it takes to walk through it."""
        return value

    @staticmethod
    @jinja2.pass_context
    def joined(context: jinja2.runtime.Context, *parts: Any) -> str:
        """The values as one text: the operator `~`."""
        budget: Budget = context.parent[BUDGET]
        for part in parts:
            _spend_text(budget, part)
        texts = [str(part) for part in parts]
        _check_size("", sum(map(len, texts)))
        return "".join(texts)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training; it renders as what it holds."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _step(line: int) -> jinja2.nodes.Call:
    return _call("step", [], line)


def _weighed(expression: jinja2.nodes.Expr) -> jinja2.nodes.Expr:
    if isinstance(expression, jinja2.nodes.Const):
        return expression
    return _call("weighed", [expression], expression.lineno)


def _call(name: str, arguments: list[jinja2.nodes.Expr], line: int) -> jinja2.nodes.Call:
    function = jinja2.nodes.EnvironmentAttribute(name, lineno=line)
    return jinja2.nodes.Call(function, arguments, [], None, None, lineno=line)


def _replace_concat(node: jinja2.nodes.Node) -> None:
    """Puts calls of `Sandbox.joined` in the place of `~`, everywhere below the node."""

    def changed(value: Any) -> Any:
        if isinstance(value, jinja2.nodes.Node):
            _replace_concat(value)
        if isinstance(value, jinja2.nodes.Concat):
            return _call("joined", value.nodes, value.lineno)
        return value

    for name, value in list(node.iter_fields()):
        if isinstance(value, list):
            value[:] = map(changed, value)
        else:
            setattr(node, name, changed(value))


@jinja2.pass_context
def _finalize(context: jinja2.runtime.Context, value: Any) -> Any:
    """Looks at each value that is written out."""
    _spend_text(context.parent[BUDGET], value)
    return value


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, which spends steps and refuses arguments that make too much of a value."""
    passed = getattr(getattr(function, "jinja_pass_arg", None), "name", "")

    @jinja2.pass_context
    def bounded(context: jinja2.runtime.Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget: Budget = context.parent[BUDGET]
        budget._spend(1)
        given = (*args, *kwargs.values())
        if any(isinstance(it, int) and abs(it) > _MAX_WIDTH for it in given):
            raise TemplateError(f"{name} is for small numbers in a chat template")
        if name == "join":
            value = _listed(budget, value)
        _spend_items(budget, value)
        if name in _COMPARING_FILTERS:
            _spend_text(budget, value)
        if name in _TEXT_FILTERS:
            for part in (value, *given):
                _spend_text(budget, part)
            _check_growth(budget, name, value, given)
        elif name == "sum" and not all(isinstance(it, int | float | str) for it in given):
            raise TemplateError("sum is for numbers in a chat template")
        first = {
            "context": (context,),
            "eval_context": (context.eval_ctx,),
            "environment": (context.environment,),
        }.get(passed, ())
        made = function(*first, value, *args, **kwargs)
        if isinstance(made, str | list):
            _check_size(made, len(made))
        return made

    return bounded


def _check_growth(budget: Budget, name: str, value: Any, given: Sequence[Any]) -> None:
    """Raises TemplateError: the filter would make a far longer text of the value."""
    longest = max((len(it) for it in given if isinstance(it, str)), default=0)
    if name == "format":
        _check_layout(budget, str(value), "%", given)
    elif name == "join":
        _check_size("", len(value) * longest)
    elif name in ("replace", "wordwrap") and longest > 1:
        text = str(value)
        times = text.count(str(given[0])) if name == "replace" else len(text)
        _check_size("", times * longest)
    elif name == "indent":
        widths = [it for it in given if isinstance(it, int)]
        _check_size("", (str(value).count("\n") + 1) * max([longest, 4, *widths]))


def _check_method(
    budget: Budget,
    owner: str | bytes,
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Raises TemplateError: the method of a text would make a far longer one."""
    _spend_items(budget, owner)
    given = (*args, *kwargs.values())
    if name in _PADDING:
        if any(isinstance(it, int) and it > _MAX_WIDTH for it in given):
            raise TemplateError(f"{name} is for small numbers in a chat template")
        if name == "expandtabs":
            widths = [it for it in given if isinstance(it, int)]
            _check_size("", len(owner) * max([1, *widths]))
    elif name == "replace" and len(args) > 1 and isinstance(args[1], str | bytes):
        _check_size("", owner.count(args[0]) * len(args[1]))
    elif name == "join":
        for part in given:
            _spend_text(budget, part)
            _check_size("", len(part) * len(owner))
    elif name in _SPLITTING:
        separators: list[Any] = [it for it in given if isinstance(it, type(owner)) and it]
        if isinstance(owner, str) and not separators:
            separators = [" ", "\n"]
        _check_size(separators, sum(owner.count(it) for it in separators))
    elif name == "translate":
        raise TemplateError("translate is not for chat templates")
    elif name in ("format", "format_map") and isinstance(owner, str):
        _check_layout(budget, owner, "{", given)


def _check_layout(budget: Budget, layout: str | bytes, sign: str, values: Sequence[Any]) -> None:
    """Raises TemplateError: with the values in it, the layout would be far longer than both."""
    text = layout if isinstance(layout, str) else layout.decode("latin-1")
    if _WIDTH_GIVEN.search(text):
        raise TemplateError("widths in a chat template must be numbers")
    for value in values:
        _spend_text(budget, value)
    longest = max((len(it) for it in values if isinstance(it, Sized)), default=0)
    widths = sum(map(int, _NUMBER.findall(text)))
    _check_size("", text.count(sign) * longest + widths)


def _check_size(kind: object, size: int) -> None:
    """Raises TemplateError: so many characters, or items of what is no text, are too many."""
    if isinstance(kind, str | bytes) and size > MAX_RENDERED_CHARS:
        raise TemplateError(f"the prompt grows beyond {MAX_RENDERED_CHARS} characters")
    if not isinstance(kind, str | bytes) and size > _MAX_ITEMS:
        raise TemplateError(f"a list grows beyond {_MAX_ITEMS} items")


def _is_huge(number: float) -> bool:
    return isinstance(number, int) and number.bit_length() > _MAX_BITS


def _spend_items(budget: Budget, *values: Any) -> None:
    for value in values:
        if isinstance(value, str | bytes):
            budget._spend(len(value) >> 10)
        elif isinstance(value, Sized):
            budget._spend(len(value) >> 3)


def _listed(budget: Budget, values: Any) -> Any:
    """The values as something that has a length; each of a generator costs a step."""
    if isinstance(values, Sized):
        return values
    listed = []
    for value in values:
        budget._spend(1)
        listed.append(value)
        _check_size(listed, len(listed))
    return listed


def _spend_text(budget: Budget, value: Any) -> None:
    """Spends what it takes to write the value as text, with all that is in it."""
    if isinstance(value, str | bytes):
        budget._spend(len(value) >> 10)
    if not isinstance(value, list | tuple | dict | set):
        return
    rest: list[Any] = [value]
    size = 0
    while rest:
        part = rest.pop()
        if isinstance(part, str | bytes):
            size += len(part) >> 7
        elif isinstance(part, dict):
            rest += part.keys()
            rest += part.values()
        elif isinstance(part, list | tuple | set):
            rest += part
        size += 1
        if size >= 1024:
            budget._spend(size >> 1)
            size = 0
    budget._spend(size >> 1)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON that, unlike that of Jinja's own filter, leaves `<` and friends as they are."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> NoReturn:
    raise TemplateRefusalError(message)


def _strftime_now(layout: str) -> str:
    if _WIDTH_OF_TIME.search(layout):
        raise TemplateError("strftime_now takes no widths")
    return datetime.now().strftime(layout)
