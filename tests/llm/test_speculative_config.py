# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
from cyclopts import App

from pagoda.errors import ConfigError
from pagoda.llm.engine_options import EngineOptions
from pagoda.llm.speculative_config import read_speculative_config
from pagoda.messages.speculation import SpeculativeConfig

MISTAKES = {
    '{"method": "foo"}': "method must be one of auto, off, ngram, suffix, draft_model, mtp, eagle3, got 'foo'.",
    '{"metod": "ngram"}': "there is no key metod; there are method, model, num_speculative_tokens,",
    '{"method": "ngram", "num_speculative_tokens": 0}': "num_speculative_tokens must be int >= 1.",
    '{"method": "ngram", "num_speculative_tokens": 99}': "num_speculative_tokens must be int <= 32.",
    '{"prompt_lookup_max": "4"}': "prompt_lookup_max must be int, got str.",
    '{"method": "suffix", "prompt_lookup_min": 2}': "prompt_lookup_min needs the method ngram, not suffix.",
    '{"method": "ngram", "suffix_decoding_max_spec_factor": 2}': (
        "suffix_decoding_max_spec_factor needs the method suffix, not ngram."
    ),
    '{"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}': (
        "prompt_lookup_min must be at most prompt_lookup_max (3), got 5."
    ),
    '{"method": "eagle3"}': "eagle3 needs model, the directory of a head that was trained for this model.",
    '{"method": "mtp", "model": "head"}': "has no use with the method mtp, whose weights come with the model.",
    '{"method": "draft_model"}': "draft_model needs model, a smaller model of the same tokenizer.",
    '{"method": "suffix", "model": "small"}': "model has no use with the method suffix, which has no weights.",
    "[1]": "takes a JSON object such as",
    "ngram": "takes a JSON object such as",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_is_a_sentence(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineOptions(speculative_config=text).engine_config("model")
    assert str(caught.value).startswith("--speculative-config")
    assert MISTAKES[text] in str(caught.value)


def test_keys_of_vllm() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}'
    assert read_speculative_config(text) == SpeculativeConfig(
        method="ngram", num_speculative_tokens=5, prompt_lookup_min=2, prompt_lookup_max=4
    )
    assert read_speculative_config('{"suffix_decoding_max_cached_requests": 0}').method == "auto"
    named = read_speculative_config('{"model": "small", "num_speculative_tokens": 3}')
    assert (named.method, named.model) == ("draft_model", "small")
    assert read_speculative_config(None) == SpeculativeConfig()


@pytest.mark.parametrize(
    ("flags", "config"),
    [
        ("-md small --draft-max 3", {"method": "draft_model", "model": "small", "most": 3}),
        ("--spec-type ngram-simple --spec-draft-n-max 8", {"method": "ngram", "most": 8}),
        ("--spec-type none", {"method": "off"}),
        (
            "--speculative-algorithm STANDALONE --speculative-draft-model-path small",
            {"method": "draft_model", "model": "small"},
        ),
        (
            "--speculative-algorithm NGRAM --speculative-num-draft-tokens 4",
            {"method": "ngram", "most": 4},
        ),
    ],
)
def test_flags_of_llama_cpp_and_sglang(flags: str, config: dict[str, Any]) -> None:
    def command(*, engine: EngineOptions | None = None) -> EngineOptions | None:
        return engine

    app = App()
    app.default(command)
    found = app(flags.split(), result_action="return_value").asked_speculation()
    said = {"num_speculative_tokens": config.pop("most")} if "most" in config else {}
    assert found == SpeculativeConfig(**config, **said)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"spec_type": "EAGLE"},
            "--spec-type (--speculative-algorithm) must be one of none, draft-simple,",
        ),
        ({"spec_type": "draft-eagle3"}, "eagle3 needs model"),
        ({"spec_type": "draft-simple"}, "draft_model needs model"),
        ({"draft_max": 99}, "--draft-max must be int <= 32, got 99."),
        (
            {"model_draft": "small", "speculative_config": "{}"},
            "--model-draft says a part of --speculative-config; give one of them, not both.",
        ),
    ],
)
def test_mistakes_in_them_are_sentences(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineOptions(**options).engine_config("model")
    assert problem in str(caught.value)
