# SPDX-License-Identifier: Apache-2.0
"""Writes docs/combinations.md, what goes together and which test shows it: `make docs`.

A pair is exact, and names a test, or is refused, and names the module whose sentence says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, starmap
from pathlib import Path
from typing import NamedTuple, TypeVar

from tools.features import CHOICES, FEATURES, REFUSED, choice_of, features_of, pair, proof

T = TypeVar("T")

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "combinations.md"
_ENGINES = "tests/worker/test_speculated_engines.py"
_CASES = f"{_ENGINES}::test_drafts_change_nothing"
_MACHINE = "tests/engine/test_speculating_machine.py::SpeculatingMachine"
_BITS = "tests/worker/test_same_bits.py"
_ROWS = "tests/worker/test_drafts.py::test_rows_of_a_slot_are_sampled_as_if_each_were_alone"
_TOPOLOGIES = "tests/worker/test_drafts.py::test_drafts_change_no_answer"
_DRAFT_MODELS = "tests/worker/test_draft_models.py"
_HEADS = "tests/worker/test_draft_heads.py"
_DRAFTER = "pagoda/worker/drafting/planning.py"
_FLAG = "pagoda/llm/speculative_config.py"
_OWN_REQUESTS = "attention of each rank's own requests"
_RANKS = "tests/worker/test_dp_attention.py"
_TIERS_OF_RANKS = (
    "tests/worker/test_tiers_of_ranks.py::test_answers_over_tiers_are_those_of_transformers"
)
_HANDOFF_OF_RANKS = (
    "tests/worker/test_handoff_of_ranks.py::"
    "test_all_blocks_come_and_tokens_are_those_of_transformers"
)


class Pair(NamedTuple):
    """Two features, and how they go together."""

    one: str
    other: str
    proof: str
    """A test, `FILE::NAME`, or `FILE::NAME[CASE]`; of a refused pair the module that refuses."""
    sentence: str = ""
    """Sentence that refuses the pair; empty of a pair that is exact."""


def _with_speculation(proof: str, *others: str) -> list[Pair]:
    return [Pair("speculation", other, proof) for other in others]


PAIRS: list[Pair] = [
    *_with_speculation(_ROWS, "greedy and sampled", "penalties", "`min_tokens`"),
    *(
        Pair(_OWN_REQUESTS, other, f"{_RANKS}::{test}")
        for test, others in (
            ("test_greedy", ("tensor and pipeline parallelism", "expert parallelism", "MLA")),
            ("test_preempted_and_cached", ("preemption", "prefix cache", "windows")),
            ("test_sampled_with_log_probabilities_and_drafts", ("log-probabilities", "ngram")),
        )
        for other in others
    ),
    *(
        Pair(_OWN_REQUESTS, other, module, sentence)
        for other, module, sentence in (
            ("adapters", "pagoda/worker/dp_attention.py", "does not go with adapters"),
            ("encoders", "pagoda/worker/dp_attention.py", "and an encoder keeps none"),
            ("cuda, pypto", "pagoda/worker/dp_attention.py", "needs a backend whose ranks"),
            ("draft model, MTP, EAGLE-3", _DRAFTER, "which --enable-dp-attention does not share"),
        )
    ),
    Pair(_OWN_REQUESTS, "tiers", _TIERS_OF_RANKS),
    Pair(_OWN_REQUESTS, "handoff", _HANDOFF_OF_RANKS),
    *_with_speculation(_ROWS, "`allowed_token_ids`", "log-probabilities"),
    *_with_speculation(
        "tests/worker/test_masked_answers.py::test_drafts_change_no_answer_in_a_grammar",
        "grammars",
        "grammars, tensor and pipeline parallelism",
    ),
    *_with_speculation(_MACHINE, "forced tokens of grammars", "stop tokens", "priorities"),
    *_with_speculation(_MACHINE, "scores and vectors of prompts beside", "deaths of workers"),
    *_with_speculation(
        "tests/sim/test_seeds.py::test_seeds",
        "tiers",
        "prefill and decode apart",
        "deaths of engines and hosts",
        "adapters, routers, replicas",
    ),
    *(
        Pair("speculation", case, f"{_CASES}[{case}]")
        for case in (
            *("bfloat16", "int8", "int4", "int8 KV", "windows", "windows of some layers"),
            *("chunked attention", "sinks", "latent attention", "experts", "chunks of prompts"),
            *("preemption", "tensor parallelism", "pipeline parallelism", "expert parallelism"),
            "tensor and pipeline parallelism",
            *("gated delta nets", "short convolutions", "states, chunks of prompts"),
            *("states, preemption", "states, tensor and pipeline parallelism"),
            "states, pipeline parallelism, preemption",
        )
    ),
    *_with_speculation(f"{_ENGINES}::test_prefix_cache", "prefix cache", "prefix cache of states"),
    *_with_speculation(_MACHINE, "states in all that happens to a scheduler"),
    *_with_speculation(f"{_ENGINES}::test_adapters", "adapters"),
    *_with_speculation(_TOPOLOGIES, "few blocks, chunks, topologies"),
    *_with_speculation(f"{_BITS}::test_gguf_files", "GGUF files"),
    *_with_speculation(f"{_BITS}::test_quantized_checkpoints", "quantized checkpoints"),
    Pair(
        "speculation",
        "backends without mixed steps",
        "pagoda/engine/assembly.py",
        "tokens and chunks in one step; choose another --backend.",
    ),
    *(
        Pair(f"speculation ({method})", other, f"{_HEADS}::{test}", "")
        for method in ("mtp", "eagle3")
        for other, test in (
            ("topologies, preemption, chunks, prefix cache", "test_a_head_changes_no_answer"),
            ("a start behind K and V of others", "test_a_head_drafts_behind_kv_of_others"),
        )
    ),
    Pair("speculation (mtp)", "GGUF files", f"{_HEADS}::test_heads_in_gguf_files", ""),
    *(
        Pair(f"speculation ({method})", other, _DRAFTER, sentence)
        for method, other, sentence in (
            ("mtp", "models without a head", "mtp is for models that bring a head, and"),
            (
                "eagle3",
                "pipeline parallelism",
                "on other ranks; choose mtp, draft_model or suffix.",
            ),
            ("eagle3", "heads of other models", "is of another model than"),
        )
    ),
    *(
        Pair("speculation (draft_model)", other, f"{_DRAFT_MODELS}::{test}", "")
        for other, test in (
            ("topologies, preemption, chunks of prompts", "test_a_draft_model_changes_no_answer"),
            ("prefix cache", "test_all_drafts_of_the_model_itself_are_right"),
            ("a start behind K and V of others", "test_a_drafter_begins_anew_where_kv_is_fetched"),
            ("layers with a state", "test_a_draft_model_changes_no_answer_of_states"),
        )
    ),
    Pair(
        "speculation (draft_model)",
        "tiers",
        "tests/worker/test_grouped_tiers_of_workers.py::"
        "test_a_draft_model_goes_on_from_disk_after_a_restart",
    ),
    Pair(
        "speculation (draft_model)",
        "prefill and decode apart",
        "tests/worker/test_grouped_handoff_of_workers.py::test_answers_are_those_of_transformers",
    ),
    Pair(
        "speculation (draft_model)",
        "the simulated executor",
        "pagoda/llm/engine_options.py",
        "has no effect with --executor sim, which loads",
    ),
    *(
        Pair("speculation (draft_model)", other, _DRAFTER, sentence)
        for other, sentence in (
            ("another vocabulary", "has another vocabulary than"),
            ("windows of all layers", "needs a model with a layer that sees all tokens"),
            ("draft models with a state", "has layers that keep states, which cannot go back"),
        )
    ),
]

_HEAD = """# Combinations

What goes together, and what shows it. *Exact*: the answers are those of a server that does nothing but compute,
one request at a time, in every bit of tokens, log-probabilities and vectors; the test compares them. Formats,
ranks and backends have bits of their own, and are compared with themselves. *Refused*: one sentence says so before
anything is loaded, or to the request. Written by `make docs` from `tools/features.py` and
`tools/combinations_page.py`; a test looks for every test and every sentence, and for pairs without either.

## Every feature with every other

A number is a test of a set of features that has both, a letter a sentence that refuses, and – stands between two
values of one choice. Columns have the numbers of rows.

"""
_TESTS = """
## Tests

Features that are asked for together in each.

| | test | features |
|---|---|---|"""
_SENTENCES = """
## Sentences

| | sentence | in |
|---|---|---|"""
_CHOICES = """
## Choices

A server has one value of each.
"""
_MORE = """
## Speculation in detail

| | with | | |
|---|---|---|---|"""


def _letters(number: int) -> str:
    """a, b, … z, aa, ab…"""
    first, last = divmod(number, 26)
    return (_letters(first - 1) if first else "") + chr(ord("a") + last)


def _numbered(names: Iterable[T]) -> dict[T, int]:
    return {name: number for number, name in enumerate(dict.fromkeys(names))}


def _matrix() -> str:
    """The table of all features, and lists of the tests, sentences and choices that it refers to."""
    pairs = list(combinations(FEATURES, 2))
    refusals = _numbered(REFUSED[it] for it in starmap(pair, pairs) if it in REFUSED)
    tests = _numbered(filter(None, starmap(proof, pairs)))

    def cell(one: str, other: str) -> str:
        if choice_of(one, other):
            return "–"
        refusal = REFUSED.get(pair(one, other))
        return str(1 + tests[proof(one, other)]) if refusal is None else _letters(refusals[refusal])

    columns = range(1, len(FEATURES))
    return "\n".join(
        [
            f"| | {' | '.join(map(str, columns))} |",
            "|---" * len(FEATURES) + "|",
            *(
                f"| {1 + at} {one} | "
                + " | ".join(cell(one, it) if it in FEATURES[:at] else "" for it in FEATURES[:-1])
                + " |"
                for at, one in enumerate(FEATURES)
            ),
            _TESTS,
            *(f"| {1 + at} | `{it}` | {', '.join(features_of(it))} |" for it, at in tests.items()),
            _SENTENCES,
            *(f"| {_letters(at)} | “{it[0]}” | `{it[1]}` |" for it, at in refusals.items()),
            _CHOICES,
            *(f"- {what}: {', '.join(values)}" for what, values in CHOICES.items()),
            _MORE,
        ]
    )


def page() -> str:
    """The text of docs/combinations.md."""
    rows = (
        f"| {one} | {other} | {'refused' if sentence else 'exact'} | "
        + (f"“{sentence}” (`{proof}`)" if sentence else f"`{proof}`")
        + " |"
        for one, other, proof, sentence in PAIRS
    )
    return "\n".join([_HEAD + _matrix(), *rows, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
