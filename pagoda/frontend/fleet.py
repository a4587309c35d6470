"""The replicas of one server behind one dispatcher, as a configuration describes them."""

from __future__ import annotations

import msgspec

from pagoda.engine.config import EngineConfig
from pagoda.frontend.dispatcher import Dispatcher
from pagoda.frontend.engine_client import EngineClient
from pagoda.frontend.policies import DEFAULT_POLICY, POLICIES, PolicyName
from pagoda.parallel.config import RankPlace


def make_dispatcher(engine: EngineConfig, policy: PolicyName = DEFAULT_POLICY) -> Dispatcher:
    """A dispatcher, not started, over as many engine processes as `engine.worker.parallel` has replicas.

    Raises:
        ConfigError: there is no place for their sockets.
    """
    return Dispatcher([EngineClient(config) for config in replicas_of(engine)], POLICIES[policy])


def replicas_of(engine: EngineConfig) -> list[EngineConfig]:
    """One configuration for each replica."""
    return [_replica(engine, index) for index in range(engine.worker.parallel.data_parallel_size)]


def _replica(engine: EngineConfig, index: int) -> EngineConfig:
    worker = msgspec.structs.replace(engine.worker, place=RankPlace(dp=index))
    return msgspec.structs.replace(engine, worker=worker)
