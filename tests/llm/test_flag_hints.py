# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from pagoda.errors import ConfigError
from pagoda.llm.engine_options import EngineOptions
from pagoda.llm.flag_hints import hint


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--dtype", "int4", " Weights are rounded by --quantization int4."),
        ("--dtype", "float8", ""),
        ("--quantization", "float16", " Number formats are chosen by --dtype float16."),
        ("--quantization", "gptq", "need no flag."),
        ("--quantization", "int3", ""),
        ("--load-format", "safetensors", "alike."),
        ("--kv-cache-dtype", "int4", ""),
    ],
)
def test_a_value_of_another_flag_names_that_flag(flag: str, value: str, said: str) -> None:
    assert hint(flag, value).endswith(said)
    assert bool(hint(flag, value)) is bool(said)


def test_options_of_the_library_say_it_too() -> None:
    wanted = (
        r"^--dtype must be one of .*, got 'int8'\. Weights are rounded by --quantization int8\.$"
    )
    with pytest.raises(ConfigError, match=wanted):
        EngineOptions(dtype="int8").engine_config("m")  # type: ignore[arg-type]
