# SPDX-License-Identifier: Apache-2.0
"""Transcripts and translations of audio, as OpenAI has them."""

from pagoda.api.plugin import ApiPlugin
from pagoda.plugins.transcription.routes import ROUTES
from pagoda.plugins.transcription.state import TranscriptionState

API = ApiPlugin(routes=ROUTES, state=TranscriptionState)
