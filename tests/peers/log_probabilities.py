# SPDX-License-Identifier: Apache-2.0
"""Measures how far log-probabilities are from transformers': `python -m tests.peers.log_probabilities [NAME...]`.

Of each family a tiny random model in float32 is asked, as it is and with one layer. Its log-probabilities, those
of the 20 likeliest tokens along an answer, are compared with those that transformers computes in float64; how far
transformers is from them in float32 stands beside.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "worker")]
family_models, scan_models, own_code_models, published_models, tiny_models, driver = map(
    importlib.import_module,
    (
        "family_models",
        "scan_models",
        "own_code_models",
        "published_models",
        "tiny_models",
        "driver",
    ),
)
BACKENDS = ("cpu", "reference")


class Found(NamedTuple):
    """Largest differences from log-probabilities in float64."""

    ours: float
    theirs: float


def differences(model: PreTrainedModel, directory: Path, backend: str) -> Found:
    """Differences of a model in a directory, and of transformers in float32."""
    runner = driver.load(directory, max_model_len=128, backend=backend)
    exact = with_logit_scale(driver.in_float64(model))
    ours = driver.answer_differences(runner, exact).max().item()
    return Found(ours, driver.rounding(with_logit_scale(model), exact))


def with_logit_scale(model: PreTrainedModel) -> PreTrainedModel:
    """A model that sees, whose class leaves out the factor of logits that its text part has by itself (Cohere)."""
    factor = getattr(getattr(model.config, "text_config", None), "logit_scale", 1.0)
    if factor != 1:
        with torch.no_grad():
            model.lm_head.weight.mul_(factor)
    return model


def save(name: str, directory: Path, **sizes: Any) -> PreTrainedModel:
    """Saves a family's model as its makers publish it."""
    if name in own_code_models.OWN_CODE:
        model = own_code_models.make_like(name)
        model.save_pretrained(directory)
        own_code_models.as_makers_publish(name, directory)
        return model
    if name in tiny_models.FAMILIES:
        model = tiny_models.make_model(name, **sizes)
    else:
        model = family_models.make_model(name, **sizes)
    model.save_pretrained(directory)
    if name in family_models.TEXT_PARTS:
        published_models.as_published(directory)
    return model


def measure(name: str, backend: str, **sizes: Any) -> Found:
    with tempfile.TemporaryDirectory() as scratch:
        return differences(save(name, Path(scratch), **sizes), Path(scratch), backend)


def main() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    families = family_models.FAMILIES, family_models.TEXT_PARTS, own_code_models.OWN_CODE
    names = sys.argv[1:] or [name for known in (tiny_models.FAMILIES, *families) for name in known]
    worst = dict.fromkeys(BACKENDS, 0.0)
    above = []
    for name in names:
        known = name in family_models.FAMILIES
        known = known and name not in scan_models.NEVER_ONE_LAYER
        one = [family_models.of_one_layer(name)] if known else []
        for sizes in [{}, *one]:
            for backend in BACKENDS:
                ours, theirs = measure(name, backend, **sizes)
                worst[backend] = max(worst[backend], ours)
                above += [name] * (ours > 5e-5)
                layers = "1 layer" if sizes else "all layers"
                print(
                    f"{name}, {layers}, {backend}: {ours:.1e} (transformers {theirs:.1e})",
                    flush=True,
                )
    print(f"{len(names)} families, largest {worst}, above 5e-5: {sorted(set(above))}")


if __name__ == "__main__":
    main()
