# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Responses API: `/v1/responses`, its events, and responses that are kept in memory."""
