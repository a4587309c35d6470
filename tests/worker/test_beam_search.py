# SPDX-License-Identifier: Apache-2.0
"""Beam search finds the sequences of transformers, with their scores."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from in_process import InProcessEngine
from text_pair_models import END, FIRST, START, save_text_pair
from tiny_models import make_model

from pagoda.messages.encoder_input import text_input
from pagoda.messages.frontend import GenerateRequest, TokenLogprobs, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.model.cross_encoder import TextFront
from pagoda.text.beam_search import BeamSearch, BeamSearchParams

CONTEXT = 96
PROMPTS = [[random.Random(seed).randrange(320) for _ in range(10 + seed)] for seed in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    directory = tmp_path_factory.mktemp("model")
    made = make_model("qwen3")
    made.save_pretrained(directory)
    return directory, made


def _search(
    engine: InProcessEngine,
    prompt: list[int],
    *searches: BeamSearch,
    texts: Sequence[Any] = (None,),
) -> None:
    """Searches behind one prompt, side by side, of what the encoder reads for each."""
    step = 0
    while not all(search.is_over for search in searches):
        step += 1
        requests: list[GenerateRequest] = []
        for number, (search, text) in enumerate(zip(searches, texts, strict=True)):
            sampling = SamplingParams(
                temperature=0, seed=0, max_tokens=1, logprobs=search.num_candidates
            )
            requests += [
                GenerateRequest(
                    request_id=f"{step}/{number}/{i}",
                    prompt_token_ids=[*prompt, *beam.token_ids],
                    work=Work(sampling, encoder_input=text),
                )
                for i, beam in enumerate([] if search.is_over else search.running)
            ]
        found: dict[str, list[TokenLogprobs]] = {one.request_id: [] for one in requests}
        for chunk in engine.chunks(requests):
            found[chunk.request_id] += chunk.logprobs or []
        for number, search in enumerate(searches):
            if not search.is_over:
                own = f"{step}/{number}/"
                search.advance(
                    [entry for name, it in found.items() if name.startswith(own) for entry in it]
                )


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -0.5])
@pytest.mark.parametrize("num_ends", [0, 40])
def test_the_beams_of_transformers(
    model: tuple[Path, torch.nn.Module],
    early_stopping: bool | Literal["never"],
    length_penalty: float,
    num_ends: int,
) -> None:
    directory, made = model
    # Of many end tokens some come up early.
    ends = list(range(3, 3 + num_ends))
    engine = InProcessEngine(directory, max_model_len=CONTEXT, enable_prefix_caching=True)
    for width, prompt in zip((1, 2, 4, 3), PROMPTS, strict=True):
        params = BeamSearchParams(
            beam_width=width,
            max_tokens=12,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        ).checked(vocab_size=320)
        search = BeamSearch(params, ends)
        _search(engine, prompt, search)
        if width == 1:
            continue  # transformers decodes greedily then
        with torch.no_grad():
            expected = made.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                num_beams=width,
                num_return_sequences=width,
                max_new_tokens=12,
                do_sample=False,
                length_penalty=length_penalty,
                early_stopping=early_stopping,
                eos_token_id=ends or None,
                pad_token_id=319,
                return_dict_in_generate=True,
                output_scores=True,
            )
        assert len(search.finished) == width
        scores = [beam.score for beam in search.finished]
        assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)
        for beam, sequence in zip(search.finished, expected.sequences.tolist(), strict=True):
            answer = sequence[len(prompt) :]
            assert list(beam.token_ids) == answer[: len(beam.token_ids)]
            assert set(answer[len(beam.token_ids) :]) <= {319}
            assert sum(one.logprob for one in beam.entries) == pytest.approx(
                beam.cumulative_logprob
            )
    if not ends:
        assert engine.load().num_prefix_hit_tokens > 0


def test_a_forced_token_is_a_part_of_the_answer_and_texts_are_encoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = save_text_pair(tmp_path)
    with torch.no_grad():
        made.final_logits_bias[:, END], made.final_logits_bias[:, START] = 10, -100
    made.save_pretrained(tmp_path)
    encoded, inputs = list[bytes](), TextFront.inputs

    def noted(front: TextFront[Any], values: bytes) -> dict[str, torch.Tensor]:
        encoded.append(values)
        return inputs(front, values)

    engine = InProcessEngine(tmp_path, block_size=128, max_model_len=CONTEXT)
    monkeypatch.setattr(TextFront, "inputs", noted)
    texts = [[*range(97, 105), END], [*range(99, 119), END]]
    for length_penalty, early_stopping in ((1.0, False), (2.0, "never"), (-1.0, True)):
        params = BeamSearchParams(
            beam_width=4, max_tokens=8, length_penalty=length_penalty, early_stopping=early_stopping
        )
        searches = [BeamSearch(params, [END], num_forced=1) for _ in texts]
        _search(engine, [START, FIRST], *searches, texts=list(map(text_input, texts)))
        for search, text in zip(searches, texts, strict=True):
            expected = made.generate(
                torch.tensor([text]),
                num_beams=4,
                num_return_sequences=4,
                max_new_tokens=9,
                length_penalty=length_penalty,
                early_stopping=early_stopping,
                do_sample=False,
                decoder_start_token_id=START,
                forced_bos_token_id=FIRST,
                eos_token_id=END,
                pad_token_id=1,
                bad_words_ids=None,
                return_dict_in_generate=True,
                output_scores=True,
            )
            scores = [beam.score for beam in search.finished]
            assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)
            for beam, sequence in zip(search.finished, expected.sequences.tolist(), strict=True):
                assert list(beam.token_ids) == sequence[2 : 2 + len(beam.token_ids)]
    assert len(encoded) == len(texts)
