# SPDX-License-Identifier: Apache-2.0
"""docs/models.md has every family, and every family is compared with transformers."""

from __future__ import annotations

import ast
from pathlib import Path

from pagoda.checkpoints.families import FAMILIES
from tools.models_page import PAGE, page

WORKER = Path(__file__).parents[1] / "worker"


def test_the_page_has_every_family() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "make docs writes the table"


def test_every_family_is_compared() -> None:
    texts = {
        node.value
        for name in (
            "tiny_models.py",
            "family_models.py",
            "own_code_models.py",
            "newer_code_models.py",
            "own_arithmetic_models.py",
            "scan_models.py",
            "head_models.py",
            "test_whisper.py",
            "text_pair_models.py",
            "../e2e/encoder_models.py",
        )
        for node in ast.walk(ast.parse((WORKER / name).read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    for architecture in FAMILIES:
        short = architecture.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
        assert {architecture, short} & texts, architecture
