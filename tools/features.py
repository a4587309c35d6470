# SPDX-License-Identifier: Apache-2.0
"""Features that may be asked for together: which exclude each other, which are refused, and the sets of them that
tests compute, so that every other pair stands in one of these (a covering array of strength two).

A feature that ceases to be refused loses its lines in `REFUSED`, and joins the sets by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

CHOICES: dict[str, tuple[str, ...]] = {
    "the method of --speculative-config": ("suffix", "ngram", "draft model", "MTP", "EAGLE-3"),
    "--quantization": ("int8", "int4", "fp8"),
    "the files of a model": ("W8A8 files", "W4A16 files", "FP8 files", "MXFP4 files", "GGUF files"),
    "the layers of a model": ("windows", "states", "MLA", "encoders"),
    "the architecture of a model, as gpt-oss alone has such files": (
        *("MXFP4 files", "states", "MLA", "encoders"),
    ),
    "--backend": ("cpu", "reference", "cuda", "pypto"),
}
"""Values of which a server has one; no architecture that Pagoda runs has two of these kinds of layers."""
_METHODS, ROUNDED, _FILES, LAYERS, _, _BACKENDS = CHOICES.values()
_REQUESTS = ("grammars", "tools", "log-probabilities", "n > 1", "adapters")
_RANKS = (
    *("tensor parallelism", "pipeline parallelism", "expert parallelism"),
    "context parallelism",
)
OVER_PROCESSES = ("tiers", "handoff", "data parallelism", "Ray")
"""Features of several processes, which the sets of whole servers have, all at once."""
FEATURES: tuple[str, ...] = (
    *_METHODS,
    *_REQUESTS,
    "prefix cache",
    *_RANKS,
    *OVER_PROCESSES,
    "int8 KV",
    *ROUNDED,
    *_FILES,
    *LAYERS,
    *_BACKENDS,
)
"""All features, as the page lists them."""


class Refusal(NamedTuple):
    """A sentence that refuses a pair before anything is loaded, or a request to a server that has the other."""

    sentence: str
    module: str


Pair = frozenset[str]


def _all(one: str, others: Collection[str], sentence: str, module: str) -> dict[Pair, Refusal]:
    return {frozenset((one, other)): Refusal(sentence, module) for other in others if other != one}


_FLAG = "pagoda/llm/speculative_config.py"
_FORMATS = "pagoda/worker/number_formats.py"
_DRAFTERS = "pagoda/worker/drafting/planning.py"
_DEVICES = "pagoda/devices.py"
_CONTEXTS = "pagoda/worker/context.py"
_LACKING = "which this model needs; choose another --backend."
_QUANTIZED = "is quantized already"

REFUSED: dict[Pair, Refusal] = {
    **_all("MTP", ["windows", "MXFP4 files"], "brings no head that guesses tokens", _FLAG),
    **_all("EAGLE-3", ["pipeline parallelism"], "on other ranks; choose mtp", _DRAFTERS),
    **{
        it: refusal
        for method in _METHODS
        for it, refusal in {
            **_all(method, ["encoders"], "is an encoder, which says no tokens", _FLAG),
        }.items()
    },
    **{
        it: refusal
        for rounded in ROUNDED
        for it, refusal in _all(
            rounded,
            ["W8A8 files", "W4A16 files", "MXFP4 files", "GGUF files"],
            _QUANTIZED,
            _FORMATS,
        ).items()
    },
    **_all(
        "encoders",
        [it for it in _REQUESTS if it != "adapters"],
        "gives vectors or scores of texts and generates none",
        "pagoda/engine/scheduler.py",
    ),
    **_all(
        "encoders",
        ["expert parallelism"],
        "needs a model with experts",
        "pagoda/checkpoints/topology.py",
    ),
    **_all(
        "pypto", ["suffix", "ngram"], "tokens and chunks in one step", "pagoda/engine/assembly.py"
    ),
    **_all(
        "pypto",
        ["draft model", "MTP", "EAGLE-3"],
        "samples several tokens of a request in a step",
        _DRAFTERS,
    ),
    **_all("pypto", _RANKS, "shares a model out over the devices of one rank", _DEVICES),
    **_all("pypto", ["states", "MLA", "encoders"], _LACKING, "pagoda/backend/base.py"),
    **_all(
        "pypto", ["windows"], "where the PyPTO programs compute", "pagoda/plugins/pypto/pattern.py"
    ),
    **_all("pypto", ["int8 KV"], " on this backend", _FORMATS),
    **_all("pypto", ROUNDED, "this backend does not compute with", _FORMATS),
    **_all("pypto", ["adapters"], _LACKING, "pagoda/backend/base.py"),
    **_all(
        "pypto",
        ["W8A8 files", "W4A16 files", "GGUF files"],
        "the PyPTO programs take no quantized weights",
        "pagoda/plugins/pypto/backend.py",
    ),
    **_all("pypto", ["MXFP4 files"], _LACKING, "pagoda/backend/base.py"),
    **_all("context parallelism", ["states"], "all keep keys and values", _CONTEXTS),
    **_all("context parallelism", ["encoders"], "which keep no context", _CONTEXTS),
    **_all("context parallelism", ["cuda"], "attends to contexts on several ranks", _CONTEXTS),
}


def pair(one: str, other: str) -> Pair:
    return frozenset((one, other))


def choice_of(one: str, other: str) -> str:
    """Name of the choice of which these are two values; empty if there is none."""
    return next((name for name, it in CHOICES.items() if one in it and other in it), "")


def together(features: Sequence[str] = FEATURES) -> Iterator[Pair]:
    """Pairs that are not refused."""
    for one, other in combinations(features, 2):
        if not choice_of(one, other) and pair(one, other) not in REFUSED:
            yield pair(one, other)


def _covering(
    pairs: Sequence[Pair], features: Sequence[str], apart: Sequence[str] = ()
) -> list[tuple[str, ...]]:
    """Few sets of features that go together, so that each of the pairs stands in one of them; of those in `apart`
    each has one at most.

    A set begins with the first pair that is left, and takes what brings most pairs that are left (the greedy
    algorithm of AETG, Cohen et al. 1997)."""
    allowed = {it for it in together(features) if not it <= set(apart)}
    left, sets = dict.fromkeys(pairs), list[tuple[str, ...]]()
    while left:
        chosen = sorted(next(iter(left)), key=features.index)
        while True:
            fitting = [it for it in features if all(pair(it, other) in allowed for other in chosen)]
            gains = [sum(pair(it, other) in left for other in chosen) for it in fitting]
            if not any(gains):
                break
            chosen.append(fitting[gains.index(max(gains))])
        for found in combinations(chosen, 2):
            left.pop(pair(*found), None)
        sets.append(tuple(sorted(chosen, key=features.index)))
    return sets


_ON_HOSTS = tuple(it for it in FEATURES if it not in ("cuda", "pypto"))
_IN_PROCESS = tuple(it for it in _ON_HOSTS if it not in OVER_PROCESSES)
_ON_GPUS = (*(it for it in _IN_PROCESS if it not in _BACKENDS), "cuda")
SETS = _covering(list(together(_IN_PROCESS)), _IN_PROCESS)
"""Sets of features of one engine, by number."""
GPU_SETS = _covering(
    [it for it in together(_ON_GPUS) if "cuda" in it],
    _ON_GPUS,
    (*_RANKS, *_REQUESTS, "prefix cache"),
)
"""The same on GPUs, where one of each pair is the backend; apart is what takes the interpreter long."""
_ON_SERVERS = tuple(it for it in _ON_HOSTS if it != "context parallelism")
SERVER_SETS = _covering(
    [it for it in together(_ON_SERVERS) if it & set(OVER_PROCESSES)], _ON_SERVERS, _RANKS[:2]
)
"""Sets of features of several engines in processes, by number, with two workers of an engine at most."""
_PYPTO = "tests/e2e/test_pypto_features.py::test_features_of_requests_and_replicas"
_CONTEXT_SERVERS = (
    "tests/worker/test_context_parallel_servers.py::test_answers_are_those_of_one_rank"
)
_PROOFS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "pypto",
        (*(it for it in _REQUESTS if it != "adapters"), "data parallelism"),
        _PYPTO,
    ),
    (
        "pypto",
        ("FP8 files",),
        "tests/e2e/test_pypto_features.py::test_files_in_8_bit_floats_are_dense_once_loaded",
    ),
    ("pypto", ("Ray",), "tests/e2e/test_pypto_features.py::test_a_worker_on_a_ray_cluster"),
    (
        "pypto",
        ("prefix cache",),
        "tests/e2e/test_pypto_serving.py::test_losses_of_the_device_preemption_and_prefix_hits_change_no_token",
    ),
    (
        "pypto",
        ("tiers",),
        "tests/e2e/test_pypto_serving.py::test_kv_comes_back_from_host_memory_and_disk",
    ),
    (
        "pypto",
        ("handoff",),
        "tests/e2e/test_pypto_serving.py::test_prefill_and_decode_on_two_hosts_of_two_chips",
    ),
    ("context parallelism", ("data parallelism",), f"{_CONTEXT_SERVERS}[replicas]"),
    ("context parallelism", ("Ray",), f"{_CONTEXT_SERVERS}[two Ray nodes]"),
    (
        "context parallelism",
        ("tiers",),
        "tests/worker/test_tiers_of_ranks.py::test_answers_over_tiers_are_those_of_transformers",
    ),
    (
        "context parallelism",
        ("handoff",),
        "tests/worker/test_handoff_of_ranks.py::test_all_blocks_come_and_tokens_are_those_of_transformers",
    ),
    (
        "cuda",
        ("handoff",),
        "tests/e2e/test_handoff_on_device.py::test_a_network_moves_kv_of_emulated_gpus",
    ),
    (
        "cuda",
        ("tiers", "data parallelism", "Ray"),
        "pagoda/plugins/cuda/tests/test_servers_on_gpus.py::test_tiers_replicas_and_ray",
    ),
)
PROVEN: dict[Pair, str] = {
    pair(one, other): test for one, others, test in _PROOFS for other in others
}
"""Pairs that tests of their own compare, by the name of the test."""
SETS_OF_TESTS = {
    "tests/worker/test_features_together.py::test_features_together": SETS,
    "pagoda/plugins/cuda/tests/test_features_on_gpus.py::test_features_on_gpus": GPU_SETS,
    "tests/worker/test_servers_with_features.py::test_servers_with_features": SERVER_SETS,
}


def features_of(test: str) -> tuple[str, ...]:
    """The features that a test asks for together."""
    name, _, case = test.removesuffix("]").partition("[")
    if name in SETS_OF_TESTS:
        return SETS_OF_TESTS[name][int(case)]
    found = {it for both, proven in PROVEN.items() if proven == test for it in both}
    return tuple(sorted(found, key=FEATURES.index))


def proof(one: str, other: str) -> str:
    """The test that compares a pair; empty of one that is refused or of one choice."""
    both = pair(one, other)
    if choice_of(one, other) or both in REFUSED:
        return ""
    if both in PROVEN:
        return PROVEN[both]
    for name, sets in SETS_OF_TESTS.items():
        found = next((number for number, it in enumerate(sets) if both <= set(it)), None)
        if found is not None:
            return f"{name}[{found}]"
    return ""
