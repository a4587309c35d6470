# SPDX-License-Identifier: Apache-2.0
"""Closeness of distributions, with transformers and plain formulas as oracles."""

from __future__ import annotations

import math
from pathlib import Path

import family_models
import msgspec
import pytest
import torch
import transformers
from quantized_models import packed_format, save_quantized
from tiny_models import make_model, save_model

from pagoda.errors import ConfigError
from pagoda.messages.jobs import QualityConfig
from pagoda.messages.worker_config import WorkerConfig
from pagoda.plugins.bench.quality_job import Tally, compare, windows

CONTEXT = 40


def _text(count: int) -> list[int]:
    return torch.randint(0, 320, (count,), generator=torch.Generator().manual_seed(3)).tolist()


def _config(model: Path, *texts: list[int], **changes: object) -> QualityConfig:
    reference = WorkerConfig(model=str(model), dtype="float32")
    return QualityConfig(
        model=WorkerConfig(model=str(model), **{"dtype": "float32", **changes}),  # type: ignore[arg-type]
        reference=reference,
        texts=list(texts),
        prefix=[1],
        context_len=CONTEXT,
    )


def _perplexity(oracle: transformers.PreTrainedModel, text: list[int]) -> float:
    losses = []
    for window in windows(text, [1], CONTEXT):
        with torch.no_grad():
            logits = oracle(torch.tensor([window])).logits[0].log_softmax(-1)
        losses += [-logits[i, token].item() for i, token in enumerate(window[1:])]
    return math.exp(sum(losses) / len(losses))


def test_windows_begin_with_the_prefix_and_hold_the_whole_text() -> None:
    assert list(windows(range(5), [9], 3)) == [[9, 0, 1], [9, 2, 3], [9, 4]]
    assert list(windows(range(4), [], 4)) == [[0, 1, 2, 3]]


def test_a_tally_is_the_plain_formulas_over_the_whole_vocabulary() -> None:
    torch.manual_seed(1)
    given, wanted = torch.randn(50, 100) * 2, torch.randn(50, 100) * 2
    targets = torch.randint(0, 100, (50,))
    tally = Tally()
    tally.add(given[:20], wanted[:20], targets[:20])
    tally.add(given[20:], wanted[20:], targets[20:])
    found = tally.closeness()
    q, p = given.double().softmax(-1), wanted.double().softmax(-1)
    kl = (p * (p / q).log()).sum(-1)
    chosen = torch.stack([q[i, t] for i, t in enumerate(targets)])
    assert found.positions == 50
    assert found.kl_mean == pytest.approx(kl.mean().item())
    assert found.kl_max == pytest.approx(kl.max().item())
    assert found.kl_p99 == pytest.approx(kl.sort().values[49].item())
    assert found.perplexity == pytest.approx(chosen.log().mean().neg().exp().item())
    assert found.same_top_token == (q.argmax(-1) == p.argmax(-1)).double().mean().item()
    top = torch.zeros(50, 21, dtype=torch.float64)
    of_reference = top.clone()
    for row in range(50):
        places = q[row].argsort(descending=True)
        for out, of in ((top, q), (of_reference, p)):
            out[row, :20] = of[row, places[:20]]
            out[row, 20] = of[row, places[20:]].sum()
    expected = (of_reference * (of_reference / top).log()).sum(-1).mean()
    assert found.kl_top20 == pytest.approx(expected.item())
    assert 0 < found.kl_top20 < found.kl_mean


def test_logits_that_are_not_finite_are_an_error() -> None:
    logits = torch.zeros(1, 4)
    broken = torch.tensor([[0.0, math.inf, 0.0, 0.0]])
    with pytest.raises(ConfigError, match="not finite"):
        Tally().add(broken, logits, torch.tensor([0]))


def test_a_model_equals_itself_and_has_the_perplexity_of_transformers(tmp_path: Path) -> None:
    oracle = save_model("qwen3", tmp_path)
    texts = _text(95), _text(7)
    reports: list[tuple[int, int]] = []
    result = compare(_config(tmp_path, *texts), lambda done, total: reports.append((done, total)))
    for text, found in zip(texts, result.texts, strict=True):
        assert found.positions == len(text)
        assert found.perplexity == pytest.approx(_perplexity(oracle, text), rel=1e-4)
        assert (found.kl_mean, found.kl_max, found.same_top_token) == (0.0, 0.0, 1.0)
    assert result.overall.positions == 102
    assert reports == [(39, 102), (78, 102), (95, 102), (102, 102)]


def test_rounding_shows_and_does_not_depend_on_how_a_text_is_cut_into_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model("qwen3", tmp_path)
    config = _config(tmp_path, _text(60), quantization="int8")
    whole = compare(config, lambda *_: None)
    assert 0 < whole.overall.kl_mean < whole.overall.kl_max
    assert whole.overall.reference_perplexity != whole.overall.perplexity
    for name, count in (("TOKENS_AT_ONCE", 7), ("ROWS_AT_ONCE", 3)):
        monkeypatch.setattr(f"pagoda.plugins.bench.quality_job.{name}", count)
    assert compare(config, lambda *_: None).overall == whole.overall


def test_a_reference_has_the_numbers_that_quantized_weights_stand_for(tmp_path: Path) -> None:
    """Inputs that are rounded where the model computes with integers are not rounded there."""
    oracle, _ = save_quantized(tmp_path, packed_format(4, 64, symmetric=False))
    text = _text(60)
    config = _config(tmp_path, text)
    reference = msgspec.structs.replace(config.reference, dequantizes=True)
    found = compare(msgspec.structs.replace(config, reference=reference), lambda *_: None).overall
    expected = _perplexity(oracle, text)
    assert found.reference_perplexity == pytest.approx(expected, rel=1e-5)
    assert found.perplexity != pytest.approx(expected, rel=1e-5)
    assert 0 < found.kl_mean < 0.01


def test_models_of_other_vocabularies_do_not_compare(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path / "a")
    make_model("qwen3", vocab_size=256).save_pretrained(tmp_path / "b")
    config = _config(tmp_path / "a", [1, 2, 3])
    other = WorkerConfig(model=str(tmp_path / "b"))
    broken = QualityConfig(
        model=other, reference=config.reference, texts=config.texts, context_len=8
    )
    with pytest.raises(ConfigError, match=r"a vocabulary of 256 tokens and .* one of 320;"):
        compare(broken, lambda *_: None)


def test_a_model_with_states_has_the_perplexity_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window is longer than two blocks of states, and is computed in many steps."""
    monkeypatch.setattr("pagoda.plugins.bench.quality_job.TOKENS_AT_ONCE", 7)
    oracle = family_models.make_model("lfm2")
    oracle.save_pretrained(tmp_path)
    config = msgspec.structs.replace(_config(tmp_path, _text(149)), context_len=150)
    with torch.no_grad():
        logits = oracle(torch.tensor([[1, *_text(149)]])).logits[0, :-1].log_softmax(-1)
    loss = -logits.gather(1, torch.tensor(_text(149))[:, None]).mean().item()
    found = compare(config, lambda *_: None).overall
    assert found.perplexity == pytest.approx(math.exp(loss), rel=1e-4)
