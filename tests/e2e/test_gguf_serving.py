# SPDX-License-Identifier: Apache-2.0
"""The embedded model as a GGUF file answers as its directory does, and quantized it is still right."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import gguf
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, TokenType
from gguf_files import finish
from safetensors.torch import load_file

from pagoda.checkpoints.resolve import resolve_model
from pagoda.cli.local_server import Connection
from pagoda.cli.openai_client import OpenAIClient
from pagoda.cli.questions import Question, load_questions
from pagoda.cli.server_process import server_process
from pagoda.plugins.bench.accuracy import Grade, grade_all

TINY = Path(resolve_model(None).model)


def write_tiny(path: Path, kind: Kind) -> Path:
    """`pagoda-tiny` with all its matrices in one type."""
    config = json.loads((TINY / "config.json").read_text())
    writer = GGUFWriter(path, "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    _add_tokenizer(writer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for name, tensor in load_file(TINY / "model.safetensors").items():
        short = names.get_name(name, try_suffixes=(".weight",))
        assert short is not None
        stored = kind if tensor.dim() == 2 else Kind.F32
        writer.add_tensor(short, gguf.quantize(tensor.float().numpy(), stored), raw_dtype=stored)
    finish(writer)
    return path


def _add_tokenizer(writer: GGUFWriter, config: dict[str, object]) -> None:
    text = (TINY / "tokenizer.json").read_text(encoding="utf-8")
    tokenizer = json.loads(text)
    tokens = {i: token for token, i in tokenizer["model"]["vocab"].items()}
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    tokens |= {i: token["content"] for i, token in added.items()}
    size = config["vocab_size"]
    assert isinstance(size, int)
    types = [
        TokenType.CONTROL
        if added.get(i, {}).get("special")
        else TokenType.NORMAL
        if i in tokens
        else TokenType.UNUSED
        for i in range(size)
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([tokens.get(i, f"[PAD{i}]") for i in range(size)])
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    # Its way of cutting texts into words is its own.
    writer.add_string("tokenizer.huggingface.json", text)
    settings = json.loads((TINY / "tokenizer_config.json").read_text(encoding="utf-8"))
    writer.add_chat_template(settings["chat_template"])
    writer.add_eos_token_id(
        next(i for i, token in added.items() if token["content"] == "<|im_end|>")
    )


def some_questions() -> list[Question]:
    return load_questions(None, ())[::40]


def answers(arguments: Sequence[str], model: str, questions: Sequence[Question]) -> list[Grade]:
    async def ask(base_url: str) -> list[Grade]:
        async with OpenAIClient(base_url) as client:
            assert await client.first_model() == model
            return await grade_all(Connection(client, model), questions, 8)

    with server_process([*arguments, "--log-level", "warning"]) as server:
        return asyncio.run(ask(server.base_url))


@pytest.fixture(scope="module")
def of_directory() -> list[Grade]:
    return answers([], "pagoda-tiny", some_questions())


def test_a_dense_file_gives_the_same_answers(of_directory: list[Grade], tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny-f32.gguf", Kind.F32)
    found = answers([str(path)], "tiny-f32", some_questions())
    assert [grade.answer for grade in found] == [grade.answer for grade in of_directory]


def test_a_quantized_file_is_about_as_right(of_directory: list[Grade], tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", Kind.Q5_1)
    found = answers([str(path)], "tiny", some_questions())
    right = [sum(grade.correct for grade in grades) for grades in (found, of_directory)]
    assert right[0] >= right[1] - 0.05 * len(found)


def test_generate_and_doctor_take_a_file(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", Kind.Q8_0)
    question = ["generate", "What is 17 + 25?", "--temperature", "0"]
    assert "42" in _pagoda([*question, "--model", str(path)])
    assert "Q8_0" in _pagoda(["doctor", str(path)])


def _pagoda(arguments: list[str]) -> str:
    command = [sys.executable, "-m", "pagoda", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout
