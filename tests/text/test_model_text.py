# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from transformers.convert_slow_tokenizer import import_protobuf

from pagoda.checkpoints.resolve import resolve_model
from pagoda.errors import ConfigError, InvalidRequestError
from pagoda.text.generation_file import fields_not_followed
from pagoda.text.model_text import load_model_text, load_text, synthetic_model_text
from pagoda.text.tokenizers.convert_tokenizer import marian
from pagoda.text.tokenizers.detokenizer import byte_level_alphabet


@pytest.fixture
def model(tmp_path: Path) -> Path:
    backend = Backend(BPE(vocab=byte_level_alphabet(), merges=[]))
    backend.decoder = ByteLevel()
    tokens = ["<s>", "</s>", "<|eot|>"]
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in tokens])
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "config.json", {"eos_token_id": 256})
    return tmp_path


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def rendered(directory: Path, **options: Any) -> str:
    template = load_model_text(directory, **options).require_template()
    return template.render([{"role": "user", "content": "hi"}])


def test_a_tokenizer_neither_truncates_nor_pads(model: Path) -> None:
    tokenizer = load_model_text(model).tokenizer
    assert tokenizer.encode("abc", add_special_tokens=True) == [97, 98, 99]
    assert tokenizer.token_id("<|eot|>") == 258


def test_end_tokens_come_from_all_files(model: Path) -> None:
    assert load_model_text(model).eos_token_ids == (256,)
    write(model / "generation_config.json", {"eos_token_id": [258, 257]})
    assert load_model_text(model).eos_token_ids == (257, 258)
    write(model / "tokenizer_config.json", {"eos_token": {"content": "<s>"}})
    assert load_model_text(model).eos_token_ids == (256, 257, 258)


def test_sampling_preferences_come_from_generation_config(model: Path) -> None:
    write(
        model / "generation_config.json",
        {"temperature": 0.6, "top_k": 20, "top_p": None, "do_sample": True, "max_length": 5},
    )
    assert load_model_text(model).default_sampling == {"temperature": 0.6, "top_k": 20}


def test_wishes_that_are_not_followed_are_named(model: Path) -> None:
    neutral = {"num_beams": 1, "length_penalty": 1.0, "bad_words_ids": [], "min_length": None}
    write(model / "generation_config.json", neutral | {"renormalize_logits": False, "top_k": 5})
    assert load_model_text(model).not_followed == ()
    asked = {"num_beams": 4, "no_repeat_ngram_size": 3, "bad_words_ids": [[7]]}
    write(model / "generation_config.json", neutral | asked)
    named = ("num_beams", "no_repeat_ngram_size", "bad_words_ids")
    assert load_model_text(model).not_followed == named
    assert fields_not_followed(asked, hears=False, reads=True) == named[:2]
    assert fields_not_followed({"bad_words_ids": [[7, 8]]}, hears=False, reads=True) == named[2:]
    assert fields_not_followed({"suppress_tokens": [5]}, hears=True, reads=False) == ()
    assert fields_not_followed({"suppress_tokens": [5]}, hears=False, reads=True) != ()


@pytest.mark.parametrize(
    ("says", "default"), [(False, {"temperature": 0.0}), (True, {}), (None, {})]
)
def test_a_model_that_is_not_to_be_sampled_answers_greedily(
    model: Path, says: bool | None, default: dict[str, float]
) -> None:
    write(model / "generation_config.json", {"do_sample": says})
    assert load_model_text(model).default_sampling == default


def test_whole_numbers_may_be_written_with_a_point(model: Path) -> None:
    written = {"top_k": 20.0, "temperature": 0.5, "eos_token_id": [257.0]}
    write(model / "generation_config.json", written)
    text = load_model_text(model)
    assert text.default_sampling == {"top_k": 20, "temperature": 0.5}
    assert text.eos_token_ids == (257,)


def test_sampling_preferences_that_are_not_possible(model: Path) -> None:
    write(model / "generation_config.json", {"top_k": 20.5})
    with pytest.raises(ConfigError, match=r"generation_config\.json.*top_k"):
        load_model_text(model)


def test_the_order_in_which_a_chat_template_is_looked_for(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        rendered(model)
    tools = [{"type": "function", "function": {"name": "f"}}]
    several = {"tool_use": "T{{ tools[0].function.name if tools }}", "default": "D"}
    listed = [{"name": name, "template": source} for name, source in several.items()]
    for form in (several, listed):
        write(model / "tokenizer_config.json", {"chat_template": form})
        assert rendered(model) == "D"
        template = load_model_text(model).require_template()
        assert template.render([{"role": "user", "content": "hi"}], tools=tools) == "Tf"
    write(model / "tokenizer_config.json", {"chat_template": [*listed[:1], {"name": 5}, "x"]})
    assert rendered(model) == "T"
    write(
        model / "tokenizer_config.json", {"chat_template": "C{{ bos_token }}", "bos_token": "<s>"}
    )
    assert rendered(model) == "C<s>"
    write(model / "chat_template.json", {"chat_template": "J"})
    assert rendered(model) == "J"
    (model / "chat_template.jinja").write_text("F", encoding="utf-8")
    assert rendered(model) == "F"
    (model / "additional_chat_templates").mkdir()
    named = model / "additional_chat_templates" / "tool_use.jinja"
    named.write_text("U{{ tools[0].function.name }}", encoding="utf-8")
    template = load_model_text(model).require_template()
    assert template.render([{"role": "user", "content": "hi"}], tools=tools) == "Uf"
    (tmp_path / "operators.jinja").write_text("O", encoding="utf-8")
    assert rendered(model, chat_template=tmp_path / "operators.jinja") == "O"


@pytest.mark.parametrize("content", ["{", "[]", '"x"'])
def test_a_file_that_is_no_json_object(model: Path, content: str) -> None:
    (model / "tokenizer_config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        load_model_text(model)


def test_a_corrupt_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_model_text(model)


def test_a_directory_without_any_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json, and it could not be made"):
        load_model_text(model)


def test_a_model_that_is_not_served_is_named_before_its_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    write(model / "config.json", {"architectures": ["RwkvForCausalLM"]})
    with pytest.raises(ConfigError, match="RwkvForCausalLM has layers with"):
        load_model_text(model)


def test_transformers_makes_a_tokenizer_from_older_files(tmp_path: Path) -> None:
    vocab = dict(byte_level_alphabet())
    write(tmp_path / "vocab.json", {**vocab, "ab": 256, "<|endoftext|>": 257})
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n", encoding="utf-8")
    write(tmp_path / "config.json", {"model_type": "gpt2", "eos_token_id": 257})
    write(tmp_path / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"})
    text = load_model_text(tmp_path)
    assert text.tokenizer.encode("abc", add_special_tokens=False) == [256, ord("c")]
    assert text.tokenizer.decode([256, ord("c")]) == "abc"


def test_opus_mt_has_pieces_of_one_language_and_ids_of_two() -> None:
    """The expected ids are those of transformers' MarianTokenizer with these files."""
    made = import_protobuf().ModelProto()
    scores = {
        "<unk>": 0.0,
        "</s>": 0.0,
        "▁a": -1.0,
        "b": -2.0,
        "▁ab": -2.5,
        "▁": -3.0,
        "c": -3.5,
        "bc": -9.0,
    }
    for piece, score in scores.items():
        made.pieces.add(piece=piece, score=score, type={"<unk>": 2, "</s>": 3}.get(piece, 1))
    names = ["</s>", "<unk>", "▁a", "▁ab", "b", "c", "▁", "ü", "▁über", ">>deu<<", "<pad>"]
    tokenizer = SimpleNamespace(
        spm_source=SimpleNamespace(serialized_model_proto=made.SerializeToString),
        get_vocab=lambda: {name: i for i, name in enumerate(names)},
        unk_token="<unk>",
        eos_token="</s>",
        supported_language_codes=[">>deu<<"],
        all_special_tokens=["</s>", "<unk>", "<pad>"],
    )
    backend = Backend.from_str(marian(tokenizer))
    for text, ids in {
        " ab  ac ": [3, 2, 5, 0],
        ">>deu<< ab": [9, 3, 0],
        "axyb": [2, 1, 4, 0],
        "abbc": [3, 4, 5, 0],
    }.items():
        assert backend.encode(text).ids == ids
    assert backend.decode([8, 7, 2, 0]) == "überü a"


def test_the_synthetic_text_speaks_chatml() -> None:
    text = synthetic_model_text()
    prompt = text.require_template().render([{"role": "user", "content": "é"}])
    assert prompt == "<|im_start|>user\né<|im_end|>\n<|im_start|>assistant\n"
    ids = text.tokenizer.encode(prompt, add_special_tokens=False)
    assert max(ids) == text.eos_token_ids[0] == 257
    assert text.tokenizer.decode(ids, skip_special_tokens=False) == prompt


def test_presets_and_simulations_have_synthetic_text(model: Path) -> None:
    preset = resolve_model("qwen3-0.6b", load_format="dummy")
    assert load_text(preset, simulated=False, chat_template=None).eos_token_ids == (257,)
    local = resolve_model(str(model))
    assert load_text(local, simulated=True, chat_template=None).eos_token_ids == (257,)
    assert load_text(local, simulated=False, chat_template=None).eos_token_ids == (256,)


def test_the_operator_sets_switches_of_the_template(model: Path, tmp_path: Path) -> None:
    source = tmp_path / "t.jinja"
    source.write_text("{{ style }}", encoding="utf-8")
    load = partial(load_text, resolve_model(str(model)), simulated=False, chat_template=source)
    text = load(switches={"style": "plain"})
    assert text.require_template().render([{"role": "user", "content": "hi"}]) == "plain"
    with pytest.raises(ConfigError, match=r"^--default-chat-template-kwargs.style must be"):
        load(switches={"style": []})


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = (
        "import sys, pagoda.api.server, pagoda.llm.llm;"
        "print(sorted({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_longest_sequence_of_the_model_is_known() -> None:
    def longest(name: str | None, load_format: str = "auto", **options: Any) -> int:
        files = resolve_model(name, load_format=load_format)
        return load_text(files, **{"simulated": False, "chat_template": None, **options}).longest

    assert longest(None) == 2048
    assert longest("llama-3.1-8b", "dummy") == 131_072
    assert longest(None, simulated=True) == 0
