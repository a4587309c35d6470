# SPDX-License-Identifier: Apache-2.0
"""The API of OpenAI: text completions, chat completions, and the fields that vLLM adds to them."""
