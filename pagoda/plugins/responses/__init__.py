# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Responses API: `/v1/responses`, its events, and responses that are kept in memory."""

from pagoda.api.plugin import ApiPlugin, LineForm
from pagoda.plugins.responses.beginning import answer_response
from pagoda.plugins.responses.bodies import ResponsesRequest
from pagoda.plugins.responses.conversations.routes import ROUTES as CONVERSATION_ROUTES
from pagoda.plugins.responses.routes import ROUTES
from pagoda.plugins.responses.state import ResponseState

API = ApiPlugin(
    routes=ROUTES | CONVERSATION_ROUTES,
    line_forms={"/v1/responses": LineForm(ResponsesRequest, answer_response)},
    state=ResponseState,
)
