# SPDX-License-Identifier: Apache-2.0
"""`pagoda chat`: a conversation in the terminal, with a model of this machine or of a server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress

from rich.style import Style

from pagoda.cli import output
from pagoda.cli.answer import AnswerPrinter, RequestTimes, ask
from pagoda.cli.local_server import Connection, connect
from pagoda.cli.openai_client import PATHS
from pagoda.cli.options import AnswerOptions, GeneralOptions, SamplingOptions, TrustOptions
from pagoda.errors import PagodaError
from pagoda.llm.engine_options import EngineOptions, ParallelOptions

_HELP = """\
/reset  forget the conversation so far
/help   show this
/exit   leave; so does Ctrl-D
Ctrl-C stops an answer."""


def chat(
    model: str | None = None,
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    system: str | None = None,
    sampling: SamplingOptions = SamplingOptions(),
    answer: AnswerOptions = AnswerOptions(),
    engine: EngineOptions = EngineOptions(),
    parallel: ParallelOptions = ParallelOptions(),
    trust: TrustOptions = TrustOptions(),
    general: GeneralOptions = GeneralOptions(),
) -> int:
    """Talk with a model; every line is a message. Reads piped lines too.

    Args:
        model: The model to load, by default the embedded one; with --base-url its name there.
        base_url: Talk with the model of a running server instead of loading one.
        api_key: The bearer token for that server.
        system: A system message to begin with.
    """
    general.apply()
    parallel.check_prompts_at_once(1)
    with connect(model, base_url, api_key, engine, parallel, trust) as (thread, connection):
        parameters = {**sampling.body(), **answer.body(engine.seed)}
        conversation = _Conversation(connection, parameters, system)
        if sys.stdin.isatty():
            output.stderr().print(f"{connection.model} answers each line; /help lists commands.")
        for line in _lines():
            if line == "/exit":
                break
            if line == "/help":
                output.stderr().print(_HELP)
            elif line == "/reset":
                conversation.reset()
            elif line.startswith("/"):
                output.stderr().print(f"{line.split()[0]} is no command; /help lists them.")
            elif line:
                with suppress(KeyboardInterrupt):
                    outcome = thread.run(conversation.say(line))
                    if outcome is not None and sys.stdin.isatty():
                        output.stderr().print(f"[{outcome.figures()}]", style=Style(dim=True))
    return 0


class _Conversation:
    def __init__(
        self, connection: Connection, sampling: dict[str, object], system: str | None
    ) -> None:
        self._connection = connection
        self._sampling = sampling
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)

    def reset(self) -> None:
        self._messages = list(self._opening)

    async def say(self, text: str) -> RequestTimes | None:
        """Sends `text`, prints the answer as it comes and remembers both.

        A question whose answer was stopped or failed is forgotten, so that it can be asked again.
        """
        question = {"role": "user", "content": text}
        printer = AnswerPrinter()
        body = {
            "model": self._connection.model,
            "messages": [*self._messages, question],
            **self._sampling,
        }
        try:
            outcome = await ask(self._connection.client, PATHS["chat"], body, printer)
        except PagodaError as error:
            if not sys.stdin.isatty():
                raise
            output.stderr().print(str(error))
            return None
        finally:
            output.write_answer("\n")
        content = printer.message().content or ""
        self._messages += [question, {"role": "assistant", "content": content}]
        return outcome


def _lines() -> Iterator[str]:
    """Messages without white space around them, until the end of input."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.strip()
        return
    with suppress(ImportError):
        import readline  # noqa: F401  (gives input() a history and an editor)
    with suppress(EOFError):
        while True:
            yield input("> ").strip()
