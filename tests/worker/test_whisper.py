# SPDX-License-Identifier: Apache-2.0
"""Transcripts of tiny Whispers are those of transformers, whatever else is heard, cached or preempted."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
import transformers
from in_process import Answer, InProcessEngine, assert_answers
from speech_models import BINS, FRAMES, POSITIONS, VOCABULARY, make_whisper
from tiny_models import save_model
from torch import Tensor
from transformers.generation import GenerateEncoderDecoderOutput
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from pagoda.checkpoints.config_json import parse_model_config
from pagoda.errors import ConfigError
from pagoda.messages.audio import Alignment, SpeechRules
from pagoda.messages.encoder_input import encoder_input
from pagoda.messages.frontend import GenerateRequest, Pooling, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker_config import WorkerConfig
from pagoda.parallel.config import ParallelConfig
from pagoda.worker.loading import plan_worker

LENGTH = 24
END, FIRST_TIME, LAST_INITIAL = 150, 170, 180
RULES = SpeechRules((3, 8, 169), (40, END), None, END, FIRST_TIME, LAST_INITIAL)
"""The token 169 says that there are no times."""
WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "cut": {"max_num_batched_tokens": 2},
    "one at a time": {"num_blocks": 2},
    "prefix-cached": {"enable_prefix_caching": True},
    "tp 3": {"parallel": ParallelConfig(tensor_parallel_size=3)},
    "pp 2": {"parallel": ParallelConfig(pipeline_parallel_size=2)},
}


class Heard(NamedTuple):
    """An audio, and what was said of it before."""

    seed: int
    prompt: list[int]
    rules: SpeechRules | None = None

    @property
    def features(self) -> Tensor:
        return torch.randn(BINS, FRAMES, generator=torch.Generator().manual_seed(self.seed))

    def request(self, name: str, *, priority: int = 0) -> GenerateRequest:
        audio = encoder_input(self.features.numpy().tobytes())
        sampling = SamplingParams(temperature=0, seed=0, max_tokens=LENGTH, logprobs=0)
        work = Work(sampling, encoder_input=audio, speech=self.rules)
        return GenerateRequest(
            request_id=name, prompt_token_ids=self.prompt, work=work, priority=priority
        )


AUDIOS = [
    Heard(1, [1, 5, 9]),
    Heard(2, [1, 5, 9]),
    Heard(3, [1]),
    Heard(4, [*range(100, 130), 1, 5]),
    Heard(5, [1, 5], RULES),
    Heard(6, [*range(20, 30), 1, 5], RULES),
    Heard(7, [1, 5], SpeechRules((3, 8), (40, END), FIRST_TIME)),
]


def _processors(heard: Heard) -> list[Any]:
    """The rules as transformers has them."""
    rules, begin = heard.rules, len(heard.prompt)
    if rules is None:
        return []
    found = [
        SuppressTokensLogitsProcessor(
            [*rules.suppressed, *range(rules.suppressed_from or VOCABULARY, VOCABULARY)]
        ),
        SuppressTokensAtBeginLogitsProcessor([*rules.begin_suppressed], begin),
    ]
    if rules.first_timestamp is not None:
        config = transformers.GenerationConfig(
            eos_token_id=END,
            bos_token_id=END,
            no_timestamps_token_id=FIRST_TIME - 1,
            max_initial_timestamp_index=LAST_INITIAL - FIRST_TIME,
        )
        found.append(WhisperTimeStampLogitsProcessor(config, begin))
    return found


def _expected(model: Any, heard: Heard) -> Answer:
    ids, answer = torch.tensor([heard.prompt]), list[tuple[int, float]]()
    with torch.no_grad():
        encoded = model.model.encoder(heard.features[None])
        for _ in range(LENGTH):
            logits = model(encoder_outputs=encoded, decoder_input_ids=ids).logits[:, -1]
            scores = logits.clone()
            for process in _processors(heard):
                scores = process(ids, scores)
            token_id = int(scores.argmax())
            answer.append((token_id, float(scores.log_softmax(-1)[0, token_id])))
            ids = torch.cat([ids, torch.tensor([[token_id]])], 1)
    return answer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whisper")


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[Answer]:
    model = make_whisper()
    model.save_pretrained(directory)
    answers = [_expected(model, heard) for heard in AUDIOS]
    assert len({tuple(token for token, _ in answer) for answer in answers}) == len(answers)
    for answer in answers[4:6]:
        assert sum(token >= FIRST_TIME for token, _ in answer) > 3
    return answers


@pytest.mark.parametrize("way", WAYS)
def test_transcripts_are_those_of_transformers(
    way: str, backend: str, directory: Path, expected: list[Answer]
) -> None:
    engine = InProcessEngine(directory, **{"backend": backend, "block_size": 128} | WAYS[way])
    requests = [heard.request(str(index)) for index, heard in enumerate(AUDIOS)]
    assert_answers(engine.answers_with_logprobs(requests), expected)
    assert_answers(engine.answers_with_logprobs(requests), expected)


def test_a_preempted_transcript_is_heard_again(directory: Path, expected: list[Answer]) -> None:
    engine = InProcessEngine(directory, backend="auto", block_size=128, num_blocks=2)
    found: dict[str, Answer] = {str(index): [] for index in range(3)}
    first = engine.chunks([AUDIOS[index].request(str(index), priority=1) for index in (0, 1)])
    chunks = [next(first) for _ in range(9)]
    chunks += engine.chunks([AUDIOS[2].request("2")])
    chunks += first
    for chunk in chunks:
        reported = [token.logprob for token in chunk.logprobs or []]
        found[chunk.request_id] += zip(chunk.token_ids, reported, strict=True)
    assert engine.load().num_preemptions > 0
    assert_answers(found, expected[:3])


def test_prefixes_are_shared_by_requests_of_one_audio_alone(tmp_path: Path) -> None:
    """The longest sequence fills a block here, so that it is cached."""
    model = make_whisper(max_source_positions=64, max_target_positions=192 // 3)
    model.save_pretrained(tmp_path)
    engine = InProcessEngine(
        tmp_path, backend="auto", block_size=64, enable_prefix_caching=True, max_model_len=64
    )
    features = [torch.randn(BINS, 128, generator=torch.Generator().manual_seed(n)) for n in (1, 2)]
    found = []
    for values in (*features, features[0]):
        audio = encoder_input(values.numpy().tobytes())
        sampling = SamplingParams(temperature=0, seed=0, max_tokens=40, ignore_eos=True)
        work = Work(sampling, encoder_input=audio)
        request = GenerateRequest(request_id="0", prompt_token_ids=[*range(24)], work=work)
        found += engine.answer([request])
    assert found[0] == found[2] != found[1]


HEADS = ((0, 2), (1, 0), (1, 1))
ALIGNED = [
    (Heard(1, [*range(30, 57)]), Alignment(HEADS, 3, 60)),
    (Heard(2, [1, 5, 9, 77]), Alignment(HEADS, 2, POSITIONS)),
    (Heard(1, [*range(200, 260)]), Alignment(HEADS[:1], 0, 2)),
    (Heard(3, [*range(90, 97)]), Alignment(HEADS, 6, 41)),
]


def _places(model: Any, heard: Heard, alignment: Alignment) -> list[float]:
    """Positions that transformers finds for tokens; it has none for the last one, which stands for the end."""
    prompt = torch.tensor([heard.prompt])
    with torch.no_grad():
        found = model(heard.features[None], decoder_input_ids=prompt, output_attentions=True)
    times = vars(WhisperGenerationMixin)["_extract_token_timestamps"](
        model,
        GenerateEncoderDecoderOutput(
            sequences=torch.tensor([[*heard.prompt, END]]),
            cross_attentions=(found.cross_attentions,),
        ),
        alignment.heads,
        num_frames=2 * alignment.positions,
        num_input_ids=alignment.first,
    )
    places: list[float] = (times[0, alignment.first : -1] / 0.02).round().tolist()
    return places


@pytest.mark.parametrize("way", [way for way in WAYS if not way.startswith("pp")])
def test_places_of_tokens_are_those_of_transformers(
    way: str, backend: str, directory: Path, expected: list[Answer]
) -> None:
    model = make_whisper()
    model.set_attn_implementation("eager")
    engine = InProcessEngine(directory, **{"backend": backend, "block_size": 128} | WAYS[way])
    requests, places = [AUDIOS[0].request("transcript")], {}
    for index, (heard, alignment) in enumerate(ALIGNED):
        audio = encoder_input(heard.features.numpy().tobytes())
        sampling = SamplingParams(temperature=0, seed=0, max_tokens=0)
        work = Work(sampling, pooling=Pooling.PLACES, encoder_input=audio, alignment=alignment)
        name = str(index)
        requests.append(GenerateRequest(request_id=name, prompt_token_ids=heard.prompt, work=work))
        places[name] = _places(model, heard, alignment)
        assert len(set(places[name])) > 1 or len(places[name]) < 3
    found, text = {}, list[int]()
    for chunk in engine.chunks(requests):
        if chunk.embedding is not None:
            found[chunk.request_id] = torch.frombuffer(
                bytearray(chunk.embedding), dtype=torch.float32
            ).tolist()
        text += chunk.token_ids
    assert found == places
    assert text == [token for token, _ in expected[0]]


@pytest.mark.usefixtures("expected")
def test_what_is_not_heard_is_refused(directory: Path) -> None:
    engine = InProcessEngine(directory, backend="auto", block_size=128)
    sampling = SamplingParams(temperature=0, seed=0, max_tokens=1)
    silent = GenerateRequest(request_id="0", prompt_token_ids=[1], work=Work(sampling))
    with pytest.raises(RuntimeError, match="The model transcribes audio"):
        engine.answer([silent])
    for alignment in (None, Alignment(HEADS, 1, 9)):
        work = msgspec.structs.replace(
            AUDIOS[0].request("0").work, pooling=Pooling.PLACES, alignment=alignment
        )
        unaligned = GenerateRequest(request_id="0", prompt_token_ids=[1], work=work)
        with pytest.raises(RuntimeError, match="Places in an audio are those of tokens"):
            engine.answer([unaligned])
    stages = InProcessEngine(
        directory, backend="auto", block_size=128, parallel=ParallelConfig(pipeline_parallel_size=2)
    )
    with pytest.raises(RuntimeError, match="not found on several pipeline stages"):
        stages.answer([unaligned])
    work = Work(sampling, encoder_input=encoder_input(bytes(400)))
    short = GenerateRequest(request_id="0", prompt_token_ids=[1], work=work)
    with pytest.raises(RuntimeError, match=f"have {4 * BINS * FRAMES} bytes, got 400"):
        engine.answer([short])


def test_a_model_of_text_hears_nothing(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path)
    engine = InProcessEngine(tmp_path, backend="auto")
    with pytest.raises(RuntimeError, match="hears no audio"):
        engine.answer([AUDIOS[0].request("0")])


@pytest.mark.usefixtures("expected")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel": ParallelConfig(context_parallel_size=2)}, "does not go with --context"),
        ({"loads_adapters": True}, "does not go with adapters"),
        ({"block_size": 64}, "--block-size must be at least 128"),
    ],
)
def test_flags_that_do_not_go_with_it_are_refused(
    options: dict[str, Any], message: str, directory: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_worker(WorkerConfig(model=str(directory), **options))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder_attention_heads": 1}, "encoder_attention_heads is not supported"),
        ({"max_source_positions": 9}, "max_source_positions must be at least"),
        ({"scale_embedding": True}, "scale_embedding is not supported"),
    ],
)
def test_configurations_that_would_be_computed_otherwise_are_refused(
    change: dict[str, Any], message: str
) -> None:
    values = {
        **make_whisper().config.to_dict(),
        "architectures": ["WhisperForConditionalGeneration"],
    }
    with pytest.raises(ConfigError, match=message):
        parse_model_config({**values, **change}, source="config.json")
