# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests of files and batches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from batch_files import Attach

from pagoda.plugins.batches.runner import BatchRunner
from pagoda.plugins.batches.state import BatchState


@pytest.fixture
async def attach(tmp_path: Path) -> AsyncIterator[Attach]:
    """Gives a server the directory of the test, and begins to answer its batches."""
    runners: list[BatchRunner] = []

    async def attach(api: Any) -> BatchRunner:
        for runner in runners:
            await runner.close()
        if api.service.state(BatchState).files is not None:
            api.service.state(BatchState).files.close()
        api.service.state(BatchState).open(tmp_path / "files")
        api.service.state(BatchState).batches.start()
        runners.append(api.service.state(BatchState).batches)
        return runners[-1]

    yield attach
    for runner in runners:
        await runner.close()
