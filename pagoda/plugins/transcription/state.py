# SPDX-License-Identifier: Apache-2.0
"""State of this plugin while a server runs."""

from __future__ import annotations

from collections.abc import Mapping

from pagoda.api.plugin import ApiPlugin
from pagoda.api.service import Service
from pagoda.plugins.transcription.decoding import AudioDecoder


class TranscriptionState:
    """Decoder that all requests share. What it starts ends with the request that it is for."""

    def __init__(self, service: Service, plugins: Mapping[str, ApiPlugin]) -> None:  # noqa: ARG002
        self.decoder = AudioDecoder()

    def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    async def close(self) -> None:
        pass
