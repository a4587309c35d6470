# SPDX-License-Identifier: Apache-2.0
"""The API of llama.cpp's server, besides what it has in common with OpenAI's."""
