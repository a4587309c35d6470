"""The embedded model, served in processes on the emulated device, answers as on the reference."""

from __future__ import annotations

from pagoda.frontend.llm import LLM
from pagoda.messages.sampling_params import SamplingParams

PROMPT = "17 + 25 ="
GREEDY = SamplingParams(temperature=0.0, max_tokens=2)


def _answers(backend: str) -> list[list[int]]:
    with LLM(backend=backend, dtype="float32", max_num_seqs=1, max_model_len=64) as llm:
        outputs = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_answers_are_those_of_the_reference() -> None:
    expected, found = _answers("reference"), _answers("cuda")
    assert len(expected[0]) == 2
    assert found == expected
