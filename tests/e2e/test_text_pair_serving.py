# SPDX-License-Identifier: Apache-2.0
"""A server of a model whose encoder reads prompts answers as transformers does, asked by OpenAI's client."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from text_pair_models import END, FIRST, START, save_text_pair
from tokenizers import Tokenizer

from pagoda.cli.server_process import server_process

LENGTH = 20
LONGEST = 99


class Pair:
    """A server of a tiny BART, and the same model in transformers."""

    def __init__(self, directory: Path, url: str, model: Any) -> None:
        self.model, self.url = model, url
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    def ask(self, prompt: Any, **fields: Any) -> Any:
        sizes = {"model": "tiny", "max_tokens": LENGTH, "temperature": 0}
        return self.client.completions.create(prompt=prompt, **sizes | fields)

    def native(self, route: str, body: dict[str, Any]) -> Any:
        return self.client.post(f"{self.url}{route}", body=body, cast_to=object)

    def expected(self, token_ids: list[int]) -> str:
        ids = torch.tensor([[START, FIRST]])
        with torch.no_grad():
            encoded = self.model.get_encoder()(torch.tensor([token_ids]))
            for _ in range(LENGTH):
                logits = self.model(encoder_outputs=encoded, decoder_input_ids=ids).logits[0, -1]
                logits[START] = -torch.inf
                ids = torch.cat([ids, logits.argmax()[None, None]], 1)
        return str(self.tokenizer.decode(ids[0, 2:].tolist()))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("pair")
    model = save_text_pair(directory)
    template = directory / "template.jinja"
    template.write_text("{% for it in messages %}{{ it.content }}{% endfor %}")
    flags = (str(directory), "--served-model-name", "tiny", "--log-level", "warning")
    flags += ("--chat-template", str(template))
    with server_process(flags) as server:
        yield Pair(directory, server.base_url, model)


def test_answers_are_those_of_transformers(pair: Pair) -> None:
    texts = ["translate: a pagoda has storeys", "b", "summarize: " + "c" * 80]
    tokens = [[*pair.tokenizer.encode(text).ids] for text in texts]
    assert all(ids[-1] == END for ids in tokens)
    expected = [pair.expected(ids) for ids in tokens]
    assert len({*expected}) == 3
    answer = pair.ask(texts)
    assert [choice.text for choice in answer.choices] == expected
    assert answer.usage.prompt_tokens == sum(map(len, tokens))
    assert answer.usage.completion_tokens == 3 * LENGTH
    assert pair.ask(tokens[0]).choices[0].text == expected[0]
    streamed = pair.ask(texts[1], stream=True, stream_options={"include_usage": True})
    chunks = list(streamed)
    assert "".join(it.choices[0].text for it in chunks if it.choices) == expected[1]
    assert chunks[-1].usage.prompt_tokens == len(tokens[1])


def test_a_grammar_goes_with_tokens_that_are_never_said(pair: Pair) -> None:
    grammar = {"structured_outputs": {"regex": "[0-9]{4}"}}
    for fields in ({}, {"temperature": 1.0, "seed": 3}):
        text = pair.ask("a pagoda has storeys", extra_body=grammar, **fields).choices[0].text
        assert re.fullmatch("[0-9]{4}", text)


def test_beams_are_those_of_transformers(pair: Pair) -> None:
    """The token that is never said is likelier than all others, and counts in their log-probabilities."""
    text = "a pagoda has storeys"
    ids = torch.tensor([pair.tokenizer.encode(text).ids])
    with torch.no_grad():
        expected = pair.model.generate(
            ids,
            num_beams=3,
            num_return_sequences=3,
            max_new_tokens=1 + LENGTH,
            length_penalty=0.0,
            bad_words_ids=[[START]],
        )
    fields = {"use_beam_search": True, "length_penalty": 0.0}
    answer = pair.ask(text, n=3, extra_body=fields)
    found = [choice.text for choice in answer.choices]
    assert found == [pair.tokenizer.decode(it[2:].tolist()) for it in expected]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"echo": True}, "echo does not go with a model whose encoder reads the prompt"),
        ({"extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs is not given of a prompt that"),
        ({"prompt": "a" * LONGEST}, f"prompt has {LONGEST + 1} tokens and is longer"),
        ({"max_tokens": LONGEST}, f"maximum context length is {LONGEST} tokens"),
    ],
)
def test_what_such_models_do_not_give_is_refused(
    fields: dict[str, Any], message: str, pair: Pair
) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        pair.ask(**{"prompt": "a"} | fields)


def test_vectors_are_refused(pair: Pair) -> None:
    with pytest.raises(openai.BadRequestError, match="gives no vectors or scores"):
        pair.client.embeddings.create(model="tiny", input="a")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"return_logprob": True, "logprob_start_len": 0}, "logprob_start_len"),
        ({"sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
    ],
)
def test_refusals_name_fields_of_sglang(fields: dict[str, Any], param: str, pair: Pair) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        pair.native("/generate", {"text": "a", **fields})
    assert refused.value.param == param


def test_a_text_as_long_as_may_be_leaves_room_for_an_answer(pair: Pair) -> None:
    native = pair.native("/completion", {"prompt": "a" * (LONGEST - 1), "n_predict": LENGTH})
    assert native["tokens_predicted"] == LENGTH
    whole = pair.native("/generate", {"text": "a" * (LONGEST - 1), "return_logprob": True})
    assert whole["meta_info"]["completion_tokens"] == LONGEST - 2


def test_the_tokens_of_prompts_are_those_that_are_read(pair: Pair) -> None:
    """What the decoder begins with is no part of them."""
    token_ids = pair.tokenizer.encode("a pagoda").ids
    fields = {"max_tokens": 2, "extra_body": {"return_token_ids": True}}
    answer = pair.client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "a pagoda"}], **fields
    )
    assert answer.prompt_token_ids == token_ids[:-1]  # templates write what ends texts
    assert pair.ask("a pagoda", **fields).choices[0].prompt_token_ids == token_ids
    rendered = pair.native("/v1/completions/render", {"model": "tiny", "prompt": "a pagoda"})
    assert [it["token_ids"] for it in rendered] == [token_ids]
