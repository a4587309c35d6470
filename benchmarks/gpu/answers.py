# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.gpu.answers [--questions N]` compares the embedded model on `cuda` and on `reference`.

Both compute in float32 and sample greedily, so that all answers are the same. With TRITON_INTERPRET=1 in the
environment the device is emulated; an answer then takes minutes.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence

from pagoda.cli import output
from pagoda.cli.options import GeneralOptions
from pagoda.cli.questions import Question, load_questions
from pagoda.llm.llm import LLM
from pagoda.messages.sampling_params import SamplingParams


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--questions", type=int, default=100, help="how many, of all skills in turn"
    )
    count = parser.parse_args().questions
    GeneralOptions().apply()
    chosen = spread([each for each in load_questions(None, ()) if _is_plain(each)], count)
    expected = answers("reference", chosen)
    began = time.monotonic()
    found = answers("cuda", chosen)
    seconds = time.monotonic() - began
    different = [
        question
        for question, own, wanted in zip(chosen, found, expected, strict=True)
        if own != wanted
    ]
    for question in different:
        output.stderr().print(f"another answer to {question.id}")
    tokens = sum(map(len, found))
    output.stdout().print(
        f"{len(chosen) - len(different)} of {len(chosen)} answers are those of reference; "
        f"{tokens} tokens in {seconds:.0f} s"
    )
    return 1 if different else 0


def spread(questions: Sequence[Question], count: int) -> list[Question]:
    """The first questions of each skill, in turn."""
    by_skill = itertools.groupby(questions, key=lambda question: question.skill)
    groups = [list(group) for _, group in by_skill]
    in_turn = (each for some in itertools.zip_longest(*groups) for each in some if each)
    return list(itertools.islice(in_turn, count))


def _is_plain(question: Question) -> bool:
    """Returns True for a question that needs nothing but its messages."""
    return question.tools is None and question.chat_template_kwargs is None


def answers(backend: str, questions: Sequence[Question]) -> list[list[int]]:
    """Token ids of the answers, of which up to eight are computed at a time."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=question.max_tokens) for question in questions
    ]
    conversations = [question.messages for question in questions]
    with LLM(backend=backend, dtype="float32", max_num_seqs=8, max_model_len=2048) as llm:
        found = llm.chat(conversations, params)
    return [list(each.outputs[0].token_ids) for each in found]


if __name__ == "__main__":
    sys.exit(main())
