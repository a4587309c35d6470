# SPDX-License-Identifier: Apache-2.0
"""Adapters that are served beside a model, by the names under which requests ask for them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pagoda.checkpoints.adapters import read_adapter
from pagoda.checkpoints.resolve import load_model_config
from pagoda.errors import ConfigError, InvalidRequestError, refuse
from pagoda.messages.adapters import Adapter
from pagoda.messages.worker_config import WorkerConfig

if TYPE_CHECKING:
    from pagoda.fleet.engine_client import EngineClient

MAX_LOADED = 64
"""Adapters that may be loaded at once."""
_MAX_NAME_CHARS = 256


def parse_adapters(
    flags: Sequence[str], model: str, load_format: str, max_rank: int
) -> tuple[Adapter, ...]:
    """The adapters that `--lora NAME=DIR` names, each of which fits the model.
    Raises ConfigError: one does not, or a name is not one."""
    adapters: dict[str, Adapter] = {}
    config = load_model_config(model, load_format) if flags else None
    for flag in flags:
        name, separator, path = flag.partition("=")
        if not name or not separator or not path:
            raise ConfigError(f"--lora must be NAME=DIR, such as sql=adapters/sql, got {flag!r}.")
        if name in adapters:
            raise ConfigError(f"--lora names {name!r} twice.")
        if len(adapters) == MAX_LOADED:
            raise ConfigError(f"--lora names more than {MAX_LOADED} adapters.")
        if config is not None:
            directory = Path(path).expanduser().resolve()
            files = read_adapter(directory, config, max_rank=max_rank)
            adapters[name] = Adapter(name, str(directory), files.digest)
    return tuple(adapters.values())


class AdapterRegistry:
    """Adapters by name; loads further ones where the operator allows it."""

    def __init__(
        self,
        worker: WorkerConfig | None = None,
        engines: Sequence[EngineClient] = (),
        directory: Path | None = None,
    ) -> None:
        """`worker` has the adapters that are there from the start; None has none.

        `directory` holds all adapters that may be loaded while the server runs; None allows none.
        """
        self._worker = worker
        self._engines = engines
        self._directory = directory
        self._adapters = {adapter.name: adapter for adapter in worker.adapters} if worker else {}
        self._changes = asyncio.Lock()

    @property
    def allows_loading(self) -> bool:
        return self._directory is not None

    def find(self, name: str) -> Adapter | None:
        return self._adapters.get(name)

    def __iter__(self) -> Iterator[Adapter]:
        return iter(self._adapters.values())

    async def load(self, name: str, path: str, taken_names: Sequence[str] = ()) -> Adapter:
        """Loads the adapter in a directory into all engines, as `name`.

        Raises InvalidRequestError: the name is taken, the directory is not below the one that the operator named,
        or the adapter does not fit the model.
        """
        if not name or len(name) > _MAX_NAME_CHARS:
            refuse("lora_name", f"must have 1 to {_MAX_NAME_CHARS} characters")
        worker, directory = self._worker, self._below(path)
        if worker is None:
            refuse("lora_path", "cannot be loaded by this server")
        async with self._changes:
            if name in self._adapters or name in taken_names:
                refuse("lora_name", f"{name!r} is loaded already; unload it first")
            if len(self._adapters) == MAX_LOADED:
                refuse("lora_name", f"would be one more than {MAX_LOADED} adapters; unload another")
            try:
                digest = await asyncio.to_thread(_digest_of, worker, directory)
                adapter = Adapter(name, str(directory), digest)
                await self._in_all(adapter)
            except ConfigError as error:
                raise InvalidRequestError(str(error), param="lora_path") from None
            self._adapters[name] = adapter
        return adapter

    async def unload(self, name: str) -> None:
        """No request finds the adapter from now on; engines forget it when those that run have ended.
        Raises InvalidRequestError: there is no such adapter."""
        async with self._changes:
            adapter = self._adapters.pop(name, None)
            if adapter is None:
                refuse("lora_name", f"{name[:_MAX_NAME_CHARS]!r} is not loaded")
            # The same files may be served under two names.
            if not any(other.digest == adapter.digest for other in self):
                for engine in self._engines:
                    engine.unload_adapter(adapter.digest)

    def _below(self, path: str) -> Path:
        if self._directory is None:
            refuse(
                "lora_path", "cannot be loaded: the server was started without --allow-lora-loading"
            )
        if "\0" in path:
            refuse("lora_path", "must be the path of a directory")
        root = self._directory.resolve()
        try:
            directory = Path(os.path.realpath(root / path))
        except OSError:
            refuse("lora_path", "must be the path of a directory")
        if not directory.is_relative_to(root):
            refuse("lora_path", "must lie below the directory that --allow-lora-loading names")
        return directory

    async def _in_all(self, adapter: Adapter) -> None:
        ends = await asyncio.gather(
            *(engine.load_adapter(adapter) for engine in self._engines), return_exceptions=True
        )
        problem = next((end for end in ends if isinstance(end, BaseException)), None)
        if problem is None:
            return
        if not any(other.digest == adapter.digest for other in self):
            for engine in self._engines:
                engine.unload_adapter(adapter.digest)
        raise problem


def _digest_of(worker: WorkerConfig, directory: Path) -> str:
    config = load_model_config(worker.model, worker.load_format)
    return read_adapter(directory, config, max_rank=worker.max_lora_rank).digest
