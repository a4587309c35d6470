# SPDX-License-Identifier: Apache-2.0
"""Counts the decoders that vLLM names and Pagoda serves: `python -m tests.peers.decoders [NAME...]`.

Of each architecture a tiny random model is made by transformers, saved by the name that vLLM has for it, loaded
and asked; its answer has to be that of transformers. Of those that Pagoda refuses the sentence is shown.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from pagoda.checkpoints.config_json import parse_model_config
from pagoda.checkpoints.families import FAMILIES
from pagoda.errors import ConfigError

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "worker")]
family_models, tiny_models, own_code_models, driver = map(
    importlib.import_module, ("family_models", "tiny_models", "own_code_models", "driver")
)
OWN_CODE = own_code_models.OWN_CODE
NAMES = HERE / "vllm_decoders.txt"
SEEING = {"HCXVisionForCausalLM": "LlamaForCausalLM"}
"""Models that see, by classes of transformers that compute their text part."""
PROMPT = [(7 * i) % 320 for i in range(30)]
LENGTH = 16


def architectures() -> list[str]:
    """Names in the list."""
    lines = NAMES.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def save_tiny(architecture: str, directory: Path) -> PreTrainedModel | None:
    """Saves a tiny model by that name; returns the model that says what it answers, None if there is no family."""
    aliases = {it: name for name, family in FAMILIES.items() for it in family.aliases}
    name = aliases.get(architecture, architecture)
    own = next((key for key, it in OWN_CODE.items() if architecture == it.architecture), None)
    own = own or next((key for key, it in OWN_CODE.items() if name == it.architecture), None)
    plain = next((key for key, (kind, _) in family_models.FAMILIES.items() if kind == name), None)
    same = next(
        (k for k, (kind, _) in family_models.FAMILIES.items() if kind == architecture), None
    )
    shorts = [it.removesuffix("ForCausalLM") for it in (architecture, name)]
    tiny = next((key for key, (kind, _) in tiny_models.FAMILIES.items() if kind in shorts), None)
    if architecture in SEEING:
        model = family_models.make_random(architecture, SEEING[architecture], {})
        model.save_pretrained(directory)
        as_text_part(directory)
    elif same or plain:
        model = family_models.make_model(same or plain)
        model.save_pretrained(directory)
    elif tiny:
        model = tiny_models.save_model(tiny, directory)
    elif own:
        model = own_code_models.make_like(own)
        model.save_pretrained(directory)
        own_code_models.as_makers_publish(own, directory)
    else:
        return None
    path = directory / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**values, "architectures": [architecture]}), encoding="utf-8")
    return model


def as_text_part(directory: Path) -> None:
    """Makes a saved decoder the text part of a model that sees, as its makers publish it."""
    files = directory / "model.safetensors", directory / "config.json"
    tensors = {f"language_model.{name}": it for name, it in load_file(files[0]).items()}
    tensors["vision_model.patch_embedding.weight"] = torch.zeros(2, 2)
    save_file(tensors, files[0], metadata={"format": "pt"})
    text = json.loads(files[1].read_text(encoding="utf-8"))
    files[1].write_text(json.dumps({"text_config": text}), encoding="utf-8")


def outcome(architecture: str) -> str:
    """ "served" where answers are equal, else what is wrong."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        model = save_tiny(architecture, directory)
        if model is None:
            try:
                parse_model_config({"architectures": [architecture]}, source="config.json")
            except ConfigError as error:
                return str(error)
            return "no tiny model of it in the tests"
        asked = driver.Driver(driver.load(directory, max_model_len=128))
        asked.start(0, PROMPT)
        asked.run([0], LENGTH)
        same = asked.output(0) == tiny_models.continuation(model, PROMPT, LENGTH)
        return "served" if same else "its answer is another one than that of transformers"


def main() -> None:
    names = sys.argv[1:] or architectures()
    found = {name: outcome(name) for name in names}
    for name, said in found.items():
        print(f"{name}: {said}")
    served = sum(said == "served" for said in found.values())
    print(f"{served} of {len(names)} decoders are served.")


if __name__ == "__main__":
    main()
