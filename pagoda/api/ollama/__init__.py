# SPDX-License-Identifier: Apache-2.0
"""The API of Ollama (https://docs.ollama.com/api): chat, generate and the list of models."""
