# SPDX-License-Identifier: Apache-2.0
"""Generators of training conversations and of the held-out questions.

Every question has a *canonical content* (for example `add:17+25`). A content whose SHA-256 starts
with a byte divisible by 16 is held out: the training generators never ask it, the held-out
generators ask nothing else. All randomness comes from the `random.Random` handed in.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.train_tiny.words import COMMON, LETTERS, code, made_up, proper_name, word

Message = dict[str, Any]
Json = dict[str, Any]

HELD_OUT_MODULUS = 16

SYSTEM_PROMPTS: tuple[str, ...] = (
    "You are pagoda-tiny, a very small language model.",
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are a precise assistant. Answer with the result only.",
)

CALCULATOR: Json = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
LOOKUP: Json = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up the value of a key.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string"}},
            "required": ["key"],
        },
    },
}


def _schema(**properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties)}


STRING: Json = {"type": "string"}
INTEGER: Json = {"type": "integer"}
SCHEMAS: dict[str, Json] = {
    "person": _schema(name=STRING, age=INTEGER),
    "place": _schema(name=STRING, city=STRING),
    "order": _schema(item=STRING, count=INTEGER),
    "point": _schema(x=INTEGER, y=INTEGER),
    "likes": _schema(name=STRING, likes={"type": "array", "items": STRING}),
}


@dataclass(frozen=True)
class Turn:
    """One question with its answer, its canonical content and how the answer is checked."""

    skill: str
    question: str
    answer: str
    canon: str
    expect: Json
    reasoning: str | None = None
    also: tuple[str, ...] = ()  # contents the reasoning shows on the way


@dataclass
class Conversation:
    """A chat as the chat template renders it; every assistant message is an answer to learn."""

    messages: list[Message]
    tools: list[Json] | None = None
    thinking: bool = False
    canons: list[str] = field(default_factory=list)
    skill: str = ""


def held_out(canon: str) -> bool:
    """Say whether a canonical content belongs to the held-out set."""
    return hashlib.sha256(canon.encode()).digest()[0] % HELD_OUT_MODULUS == 0


def dumps(value: Any) -> str:
    """Serialise JSON the way the chat template's `tojson` does."""
    return json.dumps(value, ensure_ascii=False)


def _pick(rng: random.Random, *choices: str) -> str:
    return rng.choice(choices)


def add_canon(a: int, b: int) -> str:
    """Canonical content of a sum (order of the two numbers does not matter)."""
    return f"add:{min(a, b)}+{max(a, b)}"


def sub_canon(a: int, b: int) -> str:
    """Canonical content of a difference."""
    return f"sub:{a}-{b}"


# ---------------------------------------------------------------------------------------------
# Skills without tools: each returns one turn, held out or not as it comes.


def addition(rng: random.Random) -> Turn:
    """Sum of two integers 0-99; the answer restates it."""
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    question = _pick(
        rng,
        f"What is {a} + {b}?",
        f"{a} + {b} =",
        f"{a} + {b}",
        f"{a}+{b}",
        f"What is {a}+{b}?",
        f"Calculate {a} + {b}.",
        f"Add {a} and {b}.",
        f"What is the sum of {a} and {b}?",
    )
    answer = f"{a} + {b} = {a + b}"
    return Turn("addition", question, answer, add_canon(a, b), {"text": answer})


def subtraction(rng: random.Random) -> Turn:
    """Difference of two integers 0-99, never negative."""
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    a, b = max(a, b), min(a, b)
    question = _pick(
        rng,
        f"What is {a} - {b}?",
        f"{a} - {b} =",
        f"{a} - {b}",
        f"{a}-{b}",
        f"What is {a}-{b}?",
        f"Calculate {a} - {b}.",
        f"Subtract {b} from {a}.",
        f"What is {a} minus {b}?",
    )
    answer = f"{a} - {b} = {a - b}"
    return Turn("subtraction", question, answer, sub_canon(a, b), {"text": answer})


def comparison(rng: random.Random) -> Turn:
    """The larger or the smaller of two different integers."""
    top = rng.choice((99, 999))
    a, b = rng.sample(range(top + 1), 2)
    larger = rng.random() < 0.5
    adjective, short = ("larger", "greater") if larger else ("smaller", "less")
    question = _pick(
        rng,
        f"Which number is {adjective}, {a} or {b}?",
        f"Which is {adjective}: {a} or {b}?",
        f"Which of {a} and {b} is {adjective}?",
        f"Which is {short}, {a} or {b}?",
    )
    winner, loser = (max(a, b), min(a, b)) if larger else (min(a, b), max(a, b))
    answer = f"{winner} is {adjective} than {loser}."
    canon = f"compare:{min(a, b)},{max(a, b)}"
    return Turn("comparison", question, answer, canon, {"text": answer})


def reversing(rng: random.Random) -> Turn:
    """A word backwards."""
    text = word(rng)
    question = _pick(
        rng,
        f'Reverse the word "{text}".',
        f'Reverse "{text}".',
        f'Write "{text}" backwards.',
        f'Spell the word "{text}" backwards.',
        f'What is "{text}" backwards?',
    )
    answer = text[::-1]
    return Turn("reversing", question, answer, f"reverse:{text}", {"text": answer})


def sorting(rng: random.Random) -> Turn:
    """Three to five different numbers in ascending order."""
    numbers = rng.sample(range(100), rng.randint(3, 5))
    listed = ", ".join(map(str, numbers))
    question = _pick(
        rng,
        f"Sort these numbers: {listed}",
        f"Sort the numbers {listed}.",
        f"Sort: {listed}",
        f"Put these numbers in ascending order: {listed}",
        f"Sort from smallest to largest: {listed}",
    )
    answer = ", ".join(map(str, sorted(numbers)))
    canon = "sort:" + ",".join(map(str, sorted(numbers)))
    return Turn("sorting", question, answer, canon, {"text": answer})


def counting(rng: random.Random) -> Turn:
    """Occurrences of a letter; the answer spells the word out with a running count."""
    text = word(rng)
    letter = rng.choice(text) if rng.random() < 0.85 else rng.choice(LETTERS)
    question = _pick(
        rng,
        f'How many times does the letter "{letter}" occur in "{text}"?',
        f'How many "{letter}" are in the word "{text}"?',
        f'Count the letter "{letter}" in "{text}".',
        f'How often does "{letter}" occur in the word "{text}"?',
    )
    spelled = " ".join(f"{c}{text[: i + 1].count(letter)}" for i, c in enumerate(text))
    answer = f"{spelled}: {text.count(letter)}"
    return Turn("counting", question, answer, f"count:{letter}:{text}", {"text": answer})


def uppercasing(rng: random.Random) -> Turn:
    """One to four words in upper case."""
    text = " ".join(word(rng) for _ in range(rng.choice((1, 1, 2, 3, 4))))
    question = _pick(
        rng,
        f'Write "{text}" in upper case.',
        f'Convert "{text}" to upper case.',
        f'Put "{text}" in capital letters.',
        f'Upper case: "{text}"',
    )
    answer = text.upper()
    return Turn("uppercasing", question, answer, f"upper:{text}", {"text": answer})


def repeating(rng: random.Random) -> Turn:
    """A phrase word for word."""
    pieces = []
    for _ in range(rng.randint(2, 6)):
        kind = rng.random()
        if kind < 0.75:
            pieces.append(word(rng))
        elif kind < 0.85:
            pieces.append(_pick(rng, "the", "and", "of", "a", "to", "in", "is"))
        elif kind < 0.95:
            pieces.append(str(rng.randint(0, 9999)))
        else:
            pieces.append(proper_name(rng))
    text = " ".join(pieces)
    question = _pick(
        rng,
        f'Repeat: "{text}"',
        f'Repeat after me: "{text}"',
        f'Repeat this phrase: "{text}"',
        f'Say "{text}".',
        f'Write exactly this: "{text}"',
    )
    return Turn("repeating", question, text, f"repeat:{text}", {"text": text})


def json_answer(rng: random.Random) -> Turn:
    """Facts of one sentence as JSON of a schema given in the question."""
    shape = rng.choice(tuple(SCHEMAS))
    name, number = proper_name(rng), rng.randint(0, 99)
    value: Json
    if shape == "person":
        value = {"name": name, "age": number}
        fact = _pick(
            rng,
            f"{name} is {number} years old.",
            f"{name} turned {number} last week.",
            f"My friend {name} is {number}.",
        )
    elif shape == "place":
        city = proper_name(rng)
        value = {"name": name, "city": city}
        fact = _pick(
            rng,
            f"{name} lives in {city}.",
            f"{name} moved to {city} last year.",
            f"The home of {name} is in {city}.",
        )
    elif shape == "order":
        item = word(rng)
        value = {"item": item, "count": number}
        fact = _pick(
            rng,
            f"We ordered {number} pieces of {item}.",
            f"Please send {number} units of {item}.",
            f"The order is for {item}, {number} pieces.",
        )
    elif shape == "point":
        other = rng.randint(0, 99)
        value = {"x": number, "y": other}
        fact = _pick(
            rng,
            f"The point is at x = {number} and y = {other}.",
            f"The point has y = {other} and x = {number}.",
            f"The mark is at ({number}, {other}).",
        )
    else:
        likes = [word(rng) for _ in range(rng.randint(1, 3))]
        value = {"name": name, "likes": likes}
        listed = likes[0] if len(likes) == 1 else ", ".join(likes[:-1]) + " and " + likes[-1]
        fact = _pick(
            rng,
            f"{name} likes {listed}.",
            f"The favourites of {name} are {listed}.",
        )
    schema = dumps(SCHEMAS[shape])
    question = _pick(
        rng,
        f"{fact}\nAnswer as JSON with this schema:\n{schema}",
        f"{fact} Answer as JSON with this schema: {schema}",
        f"Answer as JSON with this schema:\n{schema}\n{fact}",
    )
    answer = dumps(value)
    return Turn("json", question, answer, f"json:{answer}", {"json": value})


def thinking(rng: random.Random) -> Turn:
    """A sum or difference in two steps, worked out between <think> and </think>."""
    while True:
        a, b, c = (rng.randint(0, 60) for _ in range(3))
        if a + b > 99:
            continue
        plus = rng.random() < 0.6
        if plus and a + b + c <= 150:
            steps = (add_canon(a, b), add_canon(a + b, c))
            sign, result = "+", a + b + c
            break
        if not plus and a + b >= c:
            steps = (add_canon(a, b), sub_canon(a + b, c))
            sign, result = "-", a + b - c
            break
    expression = f"{a} + {b} {sign} {c}"
    question = _pick(
        rng, f"What is {expression}?", f"{expression} =", f"Calculate {expression}.", expression
    )
    reasoning = f"{a} + {b} = {a + b}\n{a + b} {sign} {c} = {result}"
    # The steps are sums in their own right: name them too, so training never shows a held-out one.
    expect = {"text": str(result)}
    return Turn("thinking", question, str(result), f"think:{expression}", expect, reasoning, steps)


GREETINGS: tuple[tuple[str, str], ...] = (
    ("Hello", "Hello! I am pagoda-tiny. Ask me a sum, a word puzzle or a list question."),
    ("Who are you?", "I am pagoda-tiny, a very small language model made for demos and tests."),
    (
        "What can you do?",
        "I can add, subtract, compare and sort numbers, work on words, find values in a list, "
        "answer as JSON and call tools.",
    ),
    ("Thank you!", "You are welcome!"),
    ("How are you?", "I am fine, thank you. What can I do for you?"),
    ("Goodbye", "Goodbye!"),
)
GREETING_FORMS: dict[str, tuple[str, ...]] = {
    "Hello": ("Hello", "Hello!", "Hi", "Hi!", "Hey", "hello", "hi", "Good morning!", "Hi there"),
    "Who are you?": (
        "Who are you?",
        "What are you?",
        "What is your name?",
        "who are you",
        "Who is this?",
    ),
    "What can you do?": ("What can you do?", "Help", "What do you know?", "Can you help me?"),
    "Thank you!": ("Thank you!", "Thanks", "Thanks!", "Thank you", "thanks"),
    "How are you?": ("How are you?", "How do you do?", "how are you"),
    "Goodbye": ("Goodbye", "Bye", "Bye!", "Goodbye!", "bye"),
}


def greeting(rng: random.Random) -> Turn:
    """A fixed answer to a greeting (never held out, so never measured)."""
    form, answer = rng.choice(GREETINGS)
    question = rng.choice(GREETING_FORMS[form])
    return Turn("greeting", question, answer, "greeting", {"text": answer})


SIMPLE: dict[str, Callable[[random.Random], Turn]] = {
    "addition": addition,
    "subtraction": subtraction,
    "comparison": comparison,
    "reversing": reversing,
    "sorting": sorting,
    "counting": counting,
    "uppercasing": uppercasing,
    "repeating": repeating,
    "json": json_answer,
    "thinking": thinking,
    "greeting": greeting,
}


def draw(rng: random.Random, skill: str, held: bool = False) -> Turn:
    """Return a turn of `skill` that is (or is not) held out.

    A training turn shows nothing held out, on the way to its answer neither.
    """
    while True:
        turn = SIMPLE[skill](rng)
        if held and held_out(turn.canon):
            return turn
        if not held and not any(held_out(part) for part in (turn.canon, *turn.also)):
            return turn


# ---------------------------------------------------------------------------------------------
# Recall: `key = value` lines somewhere in the prompt.

FILLER: tuple[str, ...] = (
    "The weather was mild that day.",
    "These notes were taken by hand.",
    "Nothing else happened in the morning.",
    "Please read everything with care.",
    "Some lines are more important than others.",
    "The list goes on below.",
)
INTROS: tuple[str, ...] = (
    "",
    "",
    "Here is a list of values:\n",
    "Remember these values.\n",
    "Notes:\n",
    "Read this list:\n\n",
)
RECALL_QUESTIONS: tuple[str, ...] = (
    'What is the value of "{key}"?',
    'What is "{key}"?',
    "What is {key}?",
    "What is the value of {key}?",
    'Find the value of "{key}".',
    "{key} =",
    "Which value does {key} have?",
)


@dataclass(frozen=True)
class RecallList:
    """A text with `key = value` lines and its pairs in order."""

    text: str
    pairs: tuple[tuple[str, str], ...]


def recall_key(rng: random.Random) -> str:
    """Return a key: a word or a short alphanumeric."""
    kind = rng.random()
    if kind < 0.4:
        return rng.choice(COMMON)
    return made_up(rng) if kind < 0.8 else code(rng)


def recall_list(rng: random.Random, lines: int) -> RecallList:
    """Return a list of `lines` different keys with 4-digit or word values."""
    numeric = rng.random() if rng.random() < 0.5 else 1.0
    pairs: dict[str, str] = {}
    while len(pairs) < lines:
        key = recall_key(rng)
        if key not in pairs:
            digits = rng.random() < numeric
            pairs[key] = f"{rng.randint(1000, 9999)}" if digits else word(rng, 3, 6)
    rows = [f"{key} = {value}" for key, value in pairs.items()]
    if rng.random() < 0.3:
        for _ in range(rng.randint(1, 3)):
            rows.insert(rng.randint(0, len(rows)), rng.choice(FILLER))
    return RecallList(rng.choice(INTROS) + "\n".join(rows), tuple(pairs.items()))


def recall_canon(key: str, value: str) -> str:
    """Canonical content of a recall question."""
    return f"recall:{key}={value}"


def recall_turn(rng: random.Random, notes: RecallList, held: bool = False) -> Turn | None:
    """Return a question about one (held-out or not) line of the list, None if there is none."""
    fitting = [p for p in notes.pairs if held_out(recall_canon(*p)) == held]
    if not fitting:
        return None
    key, value = rng.choice(fitting)
    answer = f"{key} = {value}"
    question = rng.choice(RECALL_QUESTIONS).format(key=key)
    return Turn("recall", question, answer, recall_canon(key, value), {"text": answer})


def recall_conversation(rng: random.Random, lines: int, questions: int) -> Conversation:
    """Return a training chat: one list, then several questions about it, one a turn."""
    while True:
        notes = recall_list(rng, lines)
        if not all(held_out(recall_canon(*pair)) for pair in notes.pairs):
            break
    messages: list[Message] = []
    canons: list[str] = []
    in_system = rng.random() < 0.15
    if in_system:
        messages.append({"role": "system", "content": notes.text})
    elif rng.random() < 0.4:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    prefix = "" if in_system else notes.text + rng.choice(("\n\n", "\n\n", "\n"))
    for _ in range(questions):
        turn = recall_turn(rng, notes)
        if turn is None:
            break
        messages.append({"role": "user", "content": prefix + turn.question})
        messages.append({"role": "assistant", "content": turn.answer})
        canons.append(turn.canon)
        prefix = ""
    return Conversation(messages, canons=canons, skill="recall")


# ---------------------------------------------------------------------------------------------
# Tools.


def _call(name: str, arguments: Json) -> Message:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
    }


def tool_exchange(rng: random.Random, name: str, held: bool) -> tuple[list[Message], str]:
    """Return user, tool call, tool response and answer for one tool, and the canonical content."""
    while True:
        if name == "calculator":
            sign = rng.choice("+-**")
            top = rng.choice((99, 999, 9999))
            a, b = rng.randint(2, top), rng.randint(2, min(top, 999))
            expression = f"{a} {sign} {b}"
            result = str(a + b if sign == "+" else a - b if sign == "-" else a * b)
            canon = f"calc:{expression}"
            if sign == "+" and a < 100 and b < 100 and held_out(add_canon(a, b)):
                continue
            if sign == "-" and a < 100 and b < 100 and held_out(sub_canon(a, b)):
                continue
            question = _pick(
                rng,
                f"What is {expression}?",
                f"Calculate {expression}.",
                f"Use the calculator: {expression}",
                f"{expression} =",
            )
            arguments = {"expression": expression}
            answer = f"{expression} = {result}"
            wrapped = dumps({"result": int(result)})
        else:
            key = recall_key(rng)
            result = str(rng.randint(1000, 9999)) if rng.random() < 0.6 else word(rng, 3, 6)
            canon = f"lookup:{key}"
            question = _pick(
                rng,
                f'Look up "{key}".',
                f'Look up the key "{key}".',
                f'What is the value of "{key}"?',
                f"Look up {key}.",
            )
            arguments = {"key": key}
            answer = f"{key} = {result}"
            wrapped = dumps({"value": int(result) if result.isdigit() else result})
        if held_out(canon) == held:
            break
    response = result if rng.random() < 0.6 else wrapped
    return [
        {"role": "user", "content": question},
        _call(name, arguments),
        {"role": "tool", "content": response},
        {"role": "assistant", "content": answer},
    ], canon


TOOL_SETS: tuple[tuple[Json, ...], ...] = (
    (CALCULATOR,),
    (LOOKUP,),
    (CALCULATOR, LOOKUP),
    (LOOKUP, CALCULATOR),
)
NO_TOOL_SKILLS: tuple[str, ...] = (
    "comparison",
    "reversing",
    "sorting",
    "counting",
    "uppercasing",
    "repeating",
    "greeting",
)


def _maybe_system(rng: random.Random) -> list[Message]:
    if rng.random() < 0.5:
        return []
    return [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}]


def _question_and_answer(turn: Turn) -> list[Message]:
    answer: Message = {"role": "assistant", "content": turn.answer}
    if turn.reasoning is not None:
        answer["reasoning_content"] = turn.reasoning
    return [{"role": "user", "content": turn.question}, answer]


def tool_conversation(rng: random.Random, turns: int) -> Conversation:
    """Return a training chat with tools listed; about a quarter of the turns need none."""
    tools = list(rng.choice(TOOL_SETS))
    messages = _maybe_system(rng)
    canons = []
    for _ in range(turns):
        if rng.random() < 0.25:
            turn = draw(rng, rng.choice(NO_TOOL_SKILLS))
            messages += _question_and_answer(turn)
            canons.append(turn.canon)
        else:
            exchange, canon = tool_exchange(rng, rng.choice(tools)["function"]["name"], False)
            messages += exchange
            canons.append(canon)
    return Conversation(messages, tools=tools, canons=canons, skill="tools")


# ---------------------------------------------------------------------------------------------
# Chats of simple skills.


def chat_conversation(rng: random.Random, skills: Sequence[str]) -> Conversation:
    """Return a training chat with one turn for each of `skills`; only the last one may think."""
    turns = [draw(rng, skill) for skill in skills]
    messages = _maybe_system(rng)
    for turn in turns:
        messages += _question_and_answer(turn)
    return Conversation(
        messages,
        thinking=turns[-1].reasoning is not None,
        canons=[turn.canon for turn in turns],
        skill=skills[-1],
    )


def sample_conversation(
    rng: random.Random, weights: dict[str, float], max_lines: int
) -> Conversation:
    """Return one training chat; `weights` gives the share of each skill, recall and tools too."""
    names = list(weights)
    skill = rng.choices(names, [weights[n] for n in names])[0]
    if skill == "recall":
        lines = rng.randint(2, max(2, max_lines))
        return recall_conversation(rng, lines, min(2 + lines // 8, 8))
    if skill == "tools":
        return tool_conversation(rng, rng.choice((1, 2, 3)))
    if rng.random() < 0.65:
        return chat_conversation(rng, [skill])
    simple = [n for n in names if n in SIMPLE and n != "thinking"]
    others = rng.choices(simple, [weights[n] for n in simple], k=rng.randint(1, 2))
    return chat_conversation(rng, [*others, skill])
