# SPDX-License-Identifier: Apache-2.0
"""Names of models and times as Ollama writes them."""

from __future__ import annotations

from datetime import UTC, datetime

from pagoda.api.service import Service

_LATEST = ":latest"


def served_name(service: Service, name: str) -> str:
    """The name by which the server knows a model; Ollama adds `:latest` to names without a tag."""
    if name.endswith(_LATEST) and name != service.config.served_model_name:
        return name.removesuffix(_LATEST)
    return name


def tagged_name(name: str) -> str:
    """A name as Ollama lists it."""
    return name if ":" in name else name + _LATEST


def now() -> str:
    """The time in RFC 3339."""
    return rfc3339(datetime.now(UTC).timestamp())


def rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
