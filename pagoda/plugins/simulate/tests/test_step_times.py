# SPDX-License-Identifier: Apache-2.0
import random

import msgspec
import pytest

from pagoda.plugins.simulate.step_times import (
    StepSample,
    device_table,
    fit,
    model_shape,
    roofline,
)


def test_a_fit_finds_the_costs_that_samples_were_made_of() -> None:
    rng = random.Random(0)
    samples = []
    for _ in range(60):
        seqs = rng.randint(1, 64)
        tokens = seqs + rng.choice([0, 0, 100, 900])
        context, pairs = seqs * rng.randint(1, 4000), (tokens - seqs) ** 2 / 2
        time_s = 0.002 + 2e-5 * tokens + 1e-5 * seqs + 3e-8 * context + 1e-10 * pairs
        samples.append(
            StepSample(
                num_tokens=tokens,
                num_seqs=seqs,
                context_tokens=context,
                pairs=pairs,
                time_s=time_s * rng.uniform(0.99, 1.01),
            )
        )
    fitted = fit(samples, "made up")
    assert fitted.base_s == pytest.approx(0.002, rel=0.1)
    assert fitted.per_token_s == pytest.approx(2e-5, rel=0.1)
    assert fitted.per_context_token_s == pytest.approx(3e-8, rel=0.1)
    assert fitted.error_p95 is not None
    assert fitted.error_p95 < 0.02
    assert fitted.error().startswith("made up: ±")


def test_a_fit_tells_what_engine_and_frontend_take_and_how_steps_vary() -> None:
    samples = []
    for seqs in (1, 4, 16, 64):
        for requests, prompt in ((0.0, 0), (0.1, 50), (0.2, 800)):
            costs = (1.0, seqs + requests, requests, requests * prompt)
            samples.append(
                StepSample(
                    num_tokens=seqs + requests * prompt,
                    num_seqs=seqs + requests,
                    num_requests=requests,
                    time_s=0.01,
                    engine_s=sum(map(float.__mul__, costs, (3e-4, 2e-5, 4e-4, 1e-6))),
                    frontend_s=sum(map(float.__mul__, costs, (1e-4, 1e-5, 3e-4, 5e-7))),
                    threads=2,
                    gaps_s=() if requests else (0.008, 0.008, 0.012, 0.012),
                )
            )
    fitted = fit(samples, "made up")
    assert msgspec.structs.astuple(fitted.engine) == pytest.approx((3e-4, 2e-5, 4e-4, 1e-6), 0.01)
    assert msgspec.structs.astuple(fitted.frontend) == pytest.approx((1e-4, 1e-5, 3e-4, 5e-7), 0.01)
    assert fitted.spread[0] == pytest.approx(0.8, rel=0.02)
    assert fitted.spread[-1] == pytest.approx(1.2, rel=0.02)
    assert sum(fitted.spread) / len(fitted.spread) == pytest.approx(1.0, rel=0.01)
    assert fitted.threads == 2
    late = [msgspec.structs.replace(it, gaps_s=(0.01, 0.013, 0.007, 0.01)) for it in samples]
    assert set(fit(late, "late messages").spread) == {1.0}


def test_a_fit_tells_how_replicas_slow_each_other_down() -> None:
    alone = [
        StepSample(
            num_tokens=n, num_seqs=n, time_s=n / 1000, worker_s=n / 1000, engine_s=1e-4, cores=2
        )
        for n in range(1, 10)
    ]
    together = [
        msgspec.structs.replace(
            it,
            replicas=replicas,
            time_s=9.0,  # with all waiting for cores, which the simulation adds
            worker_s=slower * it.worker_s + more_s,
            engine_s=0.5e-4,
        )
        for replicas, slower, more_s in ((2, 1.1, 2e-4), (4, 1.2, 6e-4))
        for it in alone
    ]
    fitted = fit([*alone, *together], "made up")
    assert fitted.num_samples == len(alone)
    assert fitted.slowdown(0.5).worker.of(1.0) == 1.0
    assert fitted.slowdown(1.0).worker.of(0.01) == pytest.approx(0.0112)
    assert fitted.slowdown(1.5).worker.of(0.01, 2) == pytest.approx(0.0115 + 2 * 4e-4)
    assert fitted.slowdown(2.0).worker.of(0.01) == pytest.approx(0.0126)
    assert fitted.slowdown(9.0) == fitted.slowdown(2.0)
    assert fitted.slowdown(2.0).engine.of(1.0) == 1.0  # nothing gets faster
    assert fit(alone, "made up").slowdowns == ()


def test_a_fit_has_no_negative_costs() -> None:
    samples = [
        StepSample(num_tokens=n, num_seqs=n, time_s=0.01 - 0.0001 * n) for n in (1, 10, 20, 40)
    ]
    assert min(fit(samples, "falling").costs().values()) == 0.0


@pytest.mark.parametrize(
    ("name", "billions"), [("llama-3.1-8b", 8.0), ("qwen3-30b-a3b", 30.5), ("mixtral-8x7b", 46.7)]
)
def test_shapes_have_the_parameters_of_their_models(name: str, billions: float) -> None:
    shape = model_shape(name)
    assert shape is not None
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.02)


def test_a_roofline_reads_weights_or_computes() -> None:
    model, device = model_shape("llama-3.1-8b"), device_table({})["h100"]
    assert model is not None
    steps = roofline(model, device, 1, 16)
    assert steps.floor_s == pytest.approx(2 * 8.03e9 / (3.35e12 * 0.7), rel=0.01)
    assert 20_000 < steps.num_blocks < 30_000
    two = roofline(model, device, 2, 16)
    assert two.floor_s == pytest.approx(steps.floor_s / 2)
    assert two.num_blocks > 2 * steps.num_blocks
