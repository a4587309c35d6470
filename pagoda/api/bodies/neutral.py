# SPDX-License-Identifier: Apache-2.0
"""Fields of other APIs and servers that Pagoda does not have, with the values that change nothing.

Routers and clients send them with every request, mostly at these values: sglang-router and smg fill in SGLang's
defaults, SDKs those of OpenAI, vLLM or llama.cpp. At any other value a field is refused by name, unless it is a
hint.
"""

from __future__ import annotations

from typing import Annotated, Any

from pagoda.api.bodies.ignored_fields import Hint
from pagoda.messages.sampling_params import DrawFields

_No = Annotated[Any, (False,)]
_Yes = Annotated[Any, (True,)]
_Zero = Annotated[Any, (0, 0.0)]
_One = Annotated[Any, (1, 1.0)]
_Null = Annotated[Any, ()]
_Empty = Annotated[Any, ({}, [])]


class NeutralFields(DrawFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Neutral fields of text and chat completions, beside those of draws. Null is neutral for all."""

    # OpenAI
    store: Annotated[Any, Hint((False,))] = None
    """Texts are not kept."""
    service_tier: Annotated[Any, Hint(("auto", "default"))] = None
    """There is one tier, which answers tell."""
    verbosity: Annotated[Any, Hint(("medium",))] = None
    """Answers are as long as the model makes them."""
    web_search_options: Annotated[Any, Hint()] = None
    """The server searches nothing, like all tools that another server would run."""
    audio: _Null = None
    moderation: _Null = None

    # Mistral
    safe_prompt: _No = None

    # vLLM
    length_penalty: _One = None
    early_stopping: _No = None
    spaces_between_special_tokens: _Yes = None
    detokenize: _Yes = None
    truncate_prompt_tokens: _Null = None
    logits_processors: Annotated[Any, ([],)] = None
    vllm_xargs: _Empty = None
    documents: Annotated[Any, ([],)] = None
    chat_template: _Null = None
    mm_processor_kwargs: Annotated[Any, Hint(({},))] = None
    media_io_kwargs: Annotated[Any, Hint(({},))] = None
    prompt_embeds: _Null = None
    structural_tag: _Null = None
    repetition_detection: _Null = None

    # SGLang, and routers before it
    no_stop_trim: _No = None
    return_hidden_states: _No = None
    return_routed_experts: _No = None
    return_cached_tokens_details: _No = None
    return_meta_info: _No = None
    stop_regex: Annotated[Any, ([], "")] = None
    lora_path: _Null = None
    session_params: _Empty = None
    custom_logit_processor: _Null = None
    custom_params: _Empty = None
    extra_key: _Null = None
    data_parallel_rank: _Null = None
    routed_dp_rank: _Null = None
    disagg_prefill_dp_rank: _Null = None

    # llama.cpp, KoboldCpp, Aphrodite
    cache_prompt: Annotated[Any, Hint((True,))] = None
    timings_per_token: _No = None
    return_progress: _No = None
    post_sampling_probs: _No = None
    n_keep: Annotated[Any, Hint((0,))] = None
    n_discard: Annotated[Any, Hint((0,))] = None
    dynatemp_range: _Zero = None
    dynatemp_exponent: _One = None
    mirostat: _Zero = None
    dry_multiplier: _Zero = None
    xtc_probability: _Zero = None
    top_n_sigma: Annotated[Any, (-1, -1.0, 0, 0.0)] = None
    repeat_penalty: _One = None
    top_a: _Zero = None
    tfs: _One = None

    # Text Generation Inference
    watermark: _No = None
    details: _No = None
    decoder_input_details: _No = None
    return_full_text: _No = None
    truncate: _Null = None
    guideline: Annotated[Any, ("",)] = None
