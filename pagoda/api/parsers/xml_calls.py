"""Tool calls as tags around names and values: Qwen3-Coder and GLM-4.5."""

from __future__ import annotations

from pagoda.api.parsers.deltas import AnswerBuilder
from pagoda.api.parsers.json_calls import MAX_HEAD_CHARS
from pagoda.api.parsers.schemas import ToolSchemas, quoted
from pagoda.api.parsers.source import Emit, Steps, Tags, TextSource, ignore

_QWEN = Tags("<tool_call>", "<function=")
_NAME_END = Tags(">")
_PARAMETER, _FUNCTION_END, _CALL_END = "<parameter=", "</function>", "</tool_call>"
_QWEN_NEXT = Tags(_PARAMETER, _FUNCTION_END, _CALL_END)
_VALUE_END = "</parameter>"
_QWEN_VALUE_ENDS = Tags("\n" + _VALUE_END, _VALUE_END, _PARAMETER, _FUNCTION_END)

_GLM = Tags("<tool_call>")
_KEY, _KEY_END, _VALUE = "<arg_key>", "</arg_key>", "<arg_value>"
_GLM_NAME_ENDS = Tags(_KEY, _CALL_END)
_GLM_NEXT = Tags(_KEY, _CALL_END)
_GLM_KEY_ENDS = Tags(_KEY_END)
_GLM_VALUE_BEGINS = Tags(_VALUE, _CALL_END)
_GLM_VALUE_ENDS = Tags("</arg_value>")


class _Arguments:
    """The arguments of one call as JSON text. Values of strings are added as they come."""

    def __init__(self, answer: AnswerBuilder, tools: ToolSchemas, tool: str) -> None:
        self._answer = answer
        self._tools = tools
        self._tool = tool
        self._separator = ""
        answer.begin_call(tool)
        answer.add_arguments("{")

    def read_value(self, source: TextSource, name: str, ends: Tags) -> Steps[str | None]:
        """Reads the value of argument `name` up to one of `ends`, which is returned."""
        self._answer.add_arguments(f"{self._separator}{quoted(name)}: ")
        self._separator = ", "
        if self._tools.is_string(self._tool, name):
            self._answer.add_arguments('"')
            tag = yield from source.until(ends, self._add_escaped)
            if tag is not None:
                self._answer.add_arguments('"')
            return tag
        text, tag = yield from source.collect(ends)
        if tag is not None:
            self._answer.add_arguments(self._tools.value(self._tool, name, text))
        return tag

    def _add_escaped(self, text: str) -> None:
        self._answer.add_arguments(quoted(text)[1:-1])

    def end(self) -> None:
        self._answer.add_arguments("}")
        self._answer.end_call()


def read_qwen3_coder(source: TextSource, answer: AnswerBuilder, tools: ToolSchemas) -> Steps[None]:
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`; some models leave out
    the outer tag, or closing tags of parameters."""
    while (tag := (yield from source.until(_QWEN, answer.add_content))) is not None:
        taken = tag
        if tag == "<tool_call>":
            taken += yield from source.spaces()
            if not (yield from source.accept("<function=")):
                answer.add_content(taken)
                continue
            taken += "<function="
        name, tag = yield from source.collect(_NAME_END, limit=MAX_HEAD_CHARS)
        if tag is None or not name.strip():
            answer.add_content(taken + name + (tag or ""))
            continue
        yield from _read_parameters(source, _Arguments(answer, tools, name.strip()), ignore)
        yield from source.spaces()
        yield from source.accept(_CALL_END)


def _read_parameters(source: TextSource, arguments: _Arguments, emit: Emit) -> Steps[None]:
    tag = yield from source.until(_QWEN_NEXT, emit)
    while tag is not None:
        if tag == _CALL_END:
            source.put_back(tag)
        if tag != _PARAMETER:
            arguments.end()
            return
        name, end = yield from source.collect(_NAME_END)
        if end is None:
            return
        yield from source.accept("\n")
        tag = yield from arguments.read_value(source, name.strip(), _QWEN_VALUE_ENDS)
        if tag is not None and tag.endswith(_VALUE_END):
            tag = yield from source.until(_QWEN_NEXT, emit)


def read_glm45(source: TextSource, answer: AnswerBuilder, tools: ToolSchemas) -> Steps[None]:
    """`<tool_call>name`, then `<arg_key>key</arg_key><arg_value>value</arg_value>` for each argument,
    `</tool_call>`."""
    while (opening := (yield from source.until(_GLM, answer.add_content))) is not None:
        head, tag = yield from source.collect(_GLM_NAME_ENDS, limit=MAX_HEAD_CHARS)
        name = head.strip()
        if tag is None or not name or any(c.isspace() or c in "{<" for c in name):
            answer.add_content(opening + head + (tag or ""))
            continue
        arguments = _Arguments(answer, tools, name)
        while tag == _KEY:
            key, tag = yield from source.collect(_GLM_KEY_ENDS)
            if tag is not None:
                tag = yield from source.until(_GLM_VALUE_BEGINS, ignore)
            if tag == _VALUE:
                tag = yield from arguments.read_value(source, key.strip(), _GLM_VALUE_ENDS)
                if tag is not None:
                    tag = yield from source.until(_GLM_NEXT, ignore)
        if tag is not None:
            arguments.end()
