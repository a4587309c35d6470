# SPDX-License-Identifier: Apache-2.0
"""The routes that vLLM's server has besides those of OpenAI."""

from __future__ import annotations

from pagoda.api.monitoring.info import health_ready
from pagoda.api.monitoring.profile import StartBody, start_profile, stop_profile
from pagoda.api.openai.bodies import ChatRequest, CompletionRequest
from pagoda.api.route import ANSWER, LOOK, OPEN, OPERATE, Route, refused
from pagoda.plugins.vllm.server import (
    ChatBatchRequest,
    chat_batch,
    invocations,
    server_load,
    tokenizer_info,
)
from pagoda.plugins.vllm.tokens import TokensBody, generate_tokens, render_chat, render_completion

_ping = Route(health_ready, "Whether the model makes progress.", OPEN, statuses=(503,))
_stays = refused("the model stays loaded as long as the server runs.")

ROUTES: dict[str, dict[str, Route]] = {
    "/ping": {"GET": _ping, "POST": _ping},
    "/load": {"GET": Route(server_load, "The number of requests under way.", LOOK)},
    "/tokenizer_info": {"GET": Route(tokenizer_info, "The tokenizer.", ANSWER, needs_model=True)},
    "/invocations": {
        "POST": Route(
            invocations, "Answers a chat or a completion.", ANSWER, streams=True, is_queued=True
        )
    },
    "/inference/v1/generate": {
        "POST": Route(
            generate_tokens,
            "Continues token ids.",
            ANSWER,
            TokensBody,
            streams=True,
            is_queued=True,
        )
    },
    "/v1/completions/render": {
        "POST": Route(
            render_completion, "The tokens of prompts.", ANSWER, CompletionRequest, needs_model=True
        )
    },
    "/v1/chat/completions/render": {
        "POST": Route(
            render_chat, "The tokens of a conversation.", ANSWER, ChatRequest, needs_model=True
        )
    },
    "/v1/chat/completions/batch": {
        "POST": Route(
            chat_batch, "Answers conversations.", ANSWER, ChatBatchRequest, is_queued=True
        )
    },
    "/start_profile": {
        "POST": Route(
            start_profile, "Begins a trace.", OPERATE, StartBody, needs_body=False, statuses=(409,)
        )
    },
    "/stop_profile": {"POST": Route(stop_profile, "Ends the trace.", OPERATE, statuses=(409,))},
    "/sleep": {"POST": _stays},
    "/wake_up": {"POST": _stays},
    "/is_sleeping": {"GET": _stays},
    "/collective_rpc": {"POST": refused("clients cannot run code in workers.")},
    "/reset_prefix_cache": {"POST": refused("cache_salt keeps requests apart.")},
}
