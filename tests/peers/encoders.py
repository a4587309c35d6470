# SPDX-License-Identifier: Apache-2.0
"""Counts the encoders that vLLM names and Pagoda serves: `python -m tests.peers.encoders`.

Of each architecture a tiny random model is made by transformers, saved by the name that vLLM has for it, loaded
and asked. It counts if its vectors, or the scores of its head, are those that transformers computes.
"""

from __future__ import annotations

import json
import sys
import tempfile
import tomllib
from array import array
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests" / room) for room in ("", "worker", "e2e")]

from encoder_models import make_encoder  # noqa: E402
from family_models import make_model  # noqa: E402
from in_process import InProcessEngine  # noqa: E402
from own_code_models import as_makers_publish, make_like  # noqa: E402

from pagoda.checkpoints.config_json import read_model_config  # noqa: E402
from pagoda.errors import PagodaError  # noqa: E402
from pagoda.messages.frontend import GenerateRequest, Pooling, Work  # noqa: E402
from pagoda.messages.sampling_params import SamplingParams  # noqa: E402

LIST = Path(__file__).with_name("vllm_encoders.toml")
PROMPT = [3, 17, 250, 9, 9, 101, 44]


def main() -> None:
    listed = tomllib.loads(LIST.read_text())
    served = 0
    for name, entry in listed["architectures"].items():
        try:
            difference = _difference(name, entry, listed["common"])
        except PagodaError as error:
            print(f"{name}: refused ({error})")
            continue
        if difference is None:
            print(f"{name}: transformers has no class of it")
            continue
        served += difference < 5e-5
        print(f"{name}: differs by {difference:.1e}")
    print(f"{served} of {len(listed['architectures'])} are served")


@torch.no_grad()
def _difference(name: str, entry: dict[str, Any], common: dict[str, Any]) -> float | None:
    """The largest difference from transformers; None where that has no class to compare with.
    Raises PagodaError: the model is refused."""
    model: Any
    if "own" in entry:
        model = make_like(entry["own"])
    elif "text" in entry:
        model = make_model(entry["text"])
    elif "like" in entry:
        model = make_encoder(entry["like"], **{**common, **entry.get("options", {})})
    else:
        return None
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        model.save_pretrained(directory)
        if "own" in entry:
            as_makers_publish(entry["own"], directory)
        more = _more(entry)
        if more:
            file = directory / "model.safetensors"
            save_file(load_file(file) | more, file)
        path = directory / "config.json"
        config = {**json.loads(path.read_text()), "architectures": [name]}
        config["num_labels"] = entry.get(
            "reward", 1 if "head" in entry else model.config.num_labels
        )
        path.write_text(json.dumps(config))
        spec = read_model_config(directory)
        pooling = Pooling.MEAN
        if spec.classifier is not None:
            pooling = Pooling.SCORE_ALL if spec.classifier.sees_all else Pooling.SCORE
        elif "masked" in spec.vector_maps:
            pooling = Pooling.SPARSE
        elif "token_vectors" in spec.vector_maps:
            pooling = Pooling.ALL
        request = GenerateRequest(
            request_id=name,
            prompt_token_ids=PROMPT,
            work=Work(SamplingParams(temperature=0, seed=0, max_tokens=0), pooling=pooling),
        )
        [chunk] = InProcessEngine(directory, dtype="float32").chunks([request])
    found = torch.tensor(array("f", chunk.embedding))
    return float((found - _expected(model, pooling, more).flatten()).abs().max())


def _more(entry: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors of the architecture that transformers' class has not."""
    if entry.get("tokens"):
        return {"linear.weight": torch.randn(24, 64) / 8}
    if "head" in entry:
        return {f"{entry['head']}.weight": torch.randn(1, 64) / 8}
    if "reward" not in entry:
        return {}
    inner = {"score.0.weight": torch.randn(64, 64) / 8, "score.0.bias": torch.randn(64)}
    labels = entry["reward"]
    return {
        **inner,
        "score.2.weight": torch.randn(labels, 64) / 8,
        "score.2.bias": torch.randn(labels),
    }


def _expected(model: Any, pooling: Pooling, more: dict[str, Tensor]) -> Tensor:
    tokens = torch.tensor([PROMPT])
    if pooling is Pooling.SPARSE:
        return torch.log1p(model(tokens).logits[0].amax(0).clamp(min=0))
    if pooling in (Pooling.SCORE, Pooling.SCORE_ALL) and not more:
        logits: Tensor = model(tokens).logits[0]
        return logits
    body = getattr(model, model.base_model_prefix, model)
    body = getattr(body, "language_model", body)
    states: Tensor = body(tokens).last_hidden_state[0]
    if len(more) == 1:
        [weight] = more.values()
        mapped = states @ weight.t()
        return mapped.mean(0) if pooling is Pooling.MEAN else mapped
    if more:
        inner = torch.relu(states @ more["score.0.weight"].t() + more["score.0.bias"])
        return inner @ more["score.2.weight"].t() + more["score.2.bias"]
    return states.mean(0)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    main()
