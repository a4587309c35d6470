# SPDX-License-Identifier: Apache-2.0
"""The short form of the trial of overload: what was refused and what was answered, but no times."""

from __future__ import annotations

import re

from benchmarks.chaos.overload import OVERLOAD, outcome_of
from benchmarks.chaos.overload_load import Received


def test_every_request_is_answered_in_full_or_refused_in_order() -> None:
    measured = OVERLOAD.run(True).measured
    complete, cut, refused = re.search(
        r"(\d+) complete, (\d+) cut, refused (.*?), of light keys \d+;", measured
    ).groups()  # type: ignore[union-attr]
    assert int(complete) > 0
    assert int(cut) == 0
    assert re.fullmatch(r"\d+ × 429", refused)


def test_other_refusals_cut_answers_and_late_light_keys_fall_short() -> None:
    def received(**fields: object) -> Received:
        ttft_s = {f"light-key-{index}": [0.1] for index in range(5)}
        light = {key: {200: 3} for key in ttft_s}
        statuses = light | {"heavy-key": {200: 3, 429: 5}}
        statuses |= fields.pop("statuses", {})  # type: ignore[arg-type, call-overload]
        whole = {"num_tokens": 96, "statuses": statuses, "ttft_s": ttft_s, **fields}
        return Received(**whole)  # type: ignore[arg-type]

    unloaded = received()
    assert outcome_of(100, 1, unloaded, received()).holds
    for bad in (
        {"num_tokens": 94},
        {"statuses": {"heavy-key": {200: 3, 500: 1}}},
        {"statuses": {"light-key-2": {200: 60, 429: 1}}},
        {"statuses": {"light-key-2": {200: 1, 429: 19}}},
        {"statuses": {"light-key-2": {200: 3, 408: 1}}},
        {"num_incomplete": 1},
        {"num_without_retry_after": 1},
        {"ttft_s": {f"light-key-{index}": [0.21] for index in range(5)}},
        {"ttft_s": {f"light-key-{index}": [0.1] for index in range(4)}},
        {"ttft_s": {}},
    ):
        assert not outcome_of(100, 1, unloaded, received(**bad)).holds
