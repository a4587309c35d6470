# SPDX-License-Identifier: Apache-2.0
"""The routes of the core."""

from __future__ import annotations

from functools import partial

from pagoda.api.adapters import (
    LoadLoraAdapter,
    UnloadLoraAdapter,
    load_lora_adapter,
    unload_lora_adapter,
)
from pagoda.api.monitoring import info
from pagoda.api.monitoring.metrics import metrics
from pagoda.api.monitoring.profile import StartBody, start_profile, stop_profile
from pagoda.api.openai.answers import ChatCompletion, Completion, Model, ModelList
from pagoda.api.openai.bodies import ChatRequest, CompletionRequest, FimRequest
from pagoda.api.openai.chat import chat_completions, count_chat_tokens
from pagoda.api.openai.completions import completions
from pagoda.api.openai.fim import fim_completions
from pagoda.api.openai.stored_chats import (
    MetadataBody,
    change_chat,
    delete_chat,
    get_chat,
    list_chats,
)
from pagoda.api.route import ANSWER, ANY_KEY, LOOK, OPEN, OPERATE, RUNNING, Route
from pagoda.api.tokenization import DetokenizeRequest, TokenizeRequest, detokenize, tokenize

PLAIN_TEXT = "text/plain; version=0.0.4; charset=utf-8"

READY = Route(info.health_ready, "Whether the model makes progress.", OPEN, statuses=(503,))
MODELS = Route(
    info.models, "The models that are served.", ANY_KEY, answer=ModelList, needs_model=True
)
_server_info = Route(info.server_info, "The server, in the words of SGLang and vLLM.", ANSWER)
_chat = Route(
    chat_completions,
    "Answers a conversation.",
    ANSWER,
    ChatRequest,
    ChatCompletion,
    streams=True,
    is_queued=True,
)
COUNT_CHAT_TOKENS = Route(
    count_chat_tokens, "Counts the tokens of a conversation.", ANSWER, ChatRequest, needs_model=True
)
_start_profile = Route(
    start_profile, "Begins a trace.", OPERATE, StartBody, needs_body=False, statuses=(409,)
)
_load_adapter = Route(
    load_lora_adapter,
    "Loads an adapter.",
    OPERATE,
    LoadLoraAdapter,
    content_type="text/plain",
    statuses=(403, 404),
    needs_model=True,
)
_unload_adapter = Route(
    unload_lora_adapter,
    "Unloads an adapter.",
    OPERATE,
    UnloadLoraAdapter,
    content_type="text/plain",
    statuses=(403, 404),
    needs_model=True,
)
_stop_profile = Route(stop_profile, "Ends the trace.", OPERATE, statuses=(409,))

CORE_ROUTES: dict[str, dict[str, Route]] = {
    "/health": {"GET": READY},
    "/health/live": {"GET": Route(info.health_live, "The process answers.", OPEN)},
    "/health/ready": {"GET": READY},
    "/version": {"GET": Route(info.version, "The version of the server.", ANY_KEY)},
    "/server_info": {"GET": _server_info},
    "/get_server_info": {"GET": _server_info},
    "/v1/models": {"GET": MODELS},
    "/v1/models/*": {
        "GET": Route(
            info.model, "One model.", ANY_KEY, answer=Model, statuses=(404,), needs_model=True
        )
    },
    "/v1/load": {
        "GET": Route(info.load, "The load of the server and of each replica.", LOOK, is_polled=True)
    },
    "/v1/requests": {"GET": Route(info.list_requests, "The client's running answers.", RUNNING)},
    "/v1/requests/*": {
        "DELETE": Route(info.cancel_request, "Ends running answers.", RUNNING, statuses=(404,))
    },
    "/metrics": {
        "GET": Route(
            metrics, "Figures for Prometheus.", LOOK, content_type=PLAIN_TEXT, is_polled=True
        )
    },
    "/metrics/vllm": {
        "GET": Route(
            partial(metrics, aliases=True),
            "Figures for Prometheus, also under vLLM's names.",
            LOOK,
            content_type=PLAIN_TEXT,
            is_polled=True,
        )
    },
    "/v1/completions": {
        "POST": Route(
            completions,
            "Continues texts.",
            ANSWER,
            CompletionRequest,
            Completion,
            streams=True,
            is_queued=True,
        )
    },
    "/v1/fim/completions": {
        "POST": Route(
            fim_completions,
            "Fills a gap in a text, as Mistral's API does.",
            ANSWER,
            FimRequest,
            streams=True,
            is_queued=True,
        )
    },
    "/v1/chat/completions": {
        "POST": _chat,
        "GET": Route(list_chats, "Lists the answers that are kept.", ANSWER),
    },
    "/v1/chat/completions/*": {
        "GET": Route(get_chat, "An answer, or its messages.", ANSWER, statuses=(404,)),
        "POST": Route(change_chat, "Sets metadata.", ANSWER, MetadataBody, statuses=(404,)),
        "DELETE": Route(delete_chat, "Forgets an answer.", ANSWER, statuses=(404,)),
    },
    "/v1/chat/completions/input_tokens": {"POST": COUNT_CHAT_TOKENS},
    "/v1/load_lora_adapter": {"POST": _load_adapter},
    "/v1/unload_lora_adapter": {"POST": _unload_adapter},
    "/profile/start": {"POST": _start_profile},
    "/profile/stop": {"POST": _stop_profile},
    "/tokenize": {
        "POST": Route(tokenize, "Token ids of a text.", ANSWER, TokenizeRequest, needs_model=True)
    },
    "/detokenize": {
        "POST": Route(detokenize, "Text of token ids.", ANSWER, DetokenizeRequest, needs_model=True)
    },
}
