# SPDX-License-Identifier: Apache-2.0
"""Test suites of other servers that have to do with HTTP, and how they are run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Suite:
    """Files of a checkout, and the plugins that stand in for the server."""

    root: Sequence[str]
    """Directories below the given path in which the files may lie; the first one that is there is taken."""
    files: Sequence[str]
    """Patterns of test files, relative to the root."""
    left_out: Sequence[str] = ()
    """Parts of paths of tests of what is no part of Pagoda: images, audio, several nodes."""
    plugins: Sequence[str] = ()
    markers: str = ""
    """Tests to run, as pytest's -m has it."""


SUITES = {
    "vllm": Suite(
        root=("",),
        files=(
            "tests/entrypoints/anthropic/test_messages.py",
            "tests/entrypoints/openai/chat_completion/test_*.py",
            "tests/entrypoints/openai/completion/test_*.py",
            "tests/entrypoints/openai/generative_scoring/test_*_e2e.py",
            "tests/entrypoints/openai/models/test_*.py",
            "tests/entrypoints/openai/responses/test_*.py",
            "tests/entrypoints/openai/tool_parsers/test_*.py",
            "tests/entrypoints/openai/test_*.py",
            "tests/entrypoints/serve/*/test_*.py",
            "tests/entrypoints/rpc/test_*.py",
            "tests/tool_use/test_*.py",
            "tests/v1/sample/test_logprobs_e2e.py",
            "tests/v1/distributed/test_*_lb_dp.py",
            "tests/v1/entrypoints/openai/test_*.py",
        ),
        left_out=(
            *("audio", "video", "vision", "image", "multimodal", "_mm_", "_vlm", "speech_to_text"),
            *("mm_embeds", "mm_loras", "tensorizer", "correctness", "realtime", "oot_registration"),
        ),
        plugins=("vllm_stand_in",),
    ),
    "llamacpp": Suite(
        root=("tools/server/tests", "vendor/llama.cpp/tools/server/tests"),
        files=("unit/test_*.py",),
        left_out=("vision", "speculative", "mcp_servers", "tools_builtin", "test_router", "sleep"),
        plugins=("llamacpp_stand_in",),
        markers="not slow",
    ),
    "sglang": Suite(
        root=("",),
        files=("test/registered/openai_server/*/test_*.py", "test/srt/openai_server/*/test_*.py"),
        left_out=("transcription", "grpc", "http2", "uds"),
        plugins=("sglang_stand_in",),
    ),
}
