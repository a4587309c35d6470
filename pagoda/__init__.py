# SPDX-License-Identifier: Apache-2.0
"""Pagoda serves large language models, from a laptop CPU to a fleet.

    from pagoda import LLM, SamplingParams

    with LLM() as llm:
        print(llm.generate("Hello", SamplingParams(max_tokens=8))[0].outputs[0].text)

Names are imported when first used, so `import pagoda` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from pagoda.version import __version__

if TYPE_CHECKING:
    from pagoda.llm.async_llm import AsyncLLM
    from pagoda.llm.llm import LLM
    from pagoda.llm.outputs import CompletionOutput, RequestOutput
    from pagoda.messages.sampling_params import SamplingParams, StructuredOutputsParams
    from pagoda.text.beam_search import BeamSearchParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

_HOMES = {
    "AsyncLLM": "pagoda.llm.async_llm",
    "BeamSearchParams": "pagoda.text.beam_search",
    "CompletionOutput": "pagoda.llm.outputs",
    "LLM": "pagoda.llm.llm",
    "RequestOutput": "pagoda.llm.outputs",
    "SamplingParams": "pagoda.messages.sampling_params",
    "StructuredOutputsParams": "pagoda.messages.sampling_params",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'pagoda' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return __all__
