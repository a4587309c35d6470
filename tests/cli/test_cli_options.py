from __future__ import annotations

import re
from pathlib import Path

import pytest

from pagoda.cli.options import SamplingOptions
from pagoda.engine.config import EngineConfig, KVEventsConfig, KVTiersConfig
from pagoda.errors import ConfigError
from pagoda.frontend.engine_options import EngineOptions, ExecutorOptions, ParallelOptions
from pagoda.messages.worker_config import WorkerConfig


def test_defaults_are_those_of_the_engine() -> None:
    expected = EngineConfig(worker=WorkerConfig(model="dir"))
    assert EngineOptions().engine_config("dir") == expected
    assert ExecutorOptions().engine_config(EngineOptions(), "dir") == expected


def test_every_flag_reaches_the_engine() -> None:
    options = EngineOptions(
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=100,
        max_num_seqs=3,
        max_num_batched_tokens=50,
        max_num_waiting=9,
        block_size=32,
        num_kv_blocks=7,
        kv_cache_memory_bytes=1000,
        memory_utilization=0.25,
        enable_prefix_caching=False,
        threads=2,
        pin_threads=True,
        step_timeout=1.5,
        seed=5,
    )
    assert options.engine_config("m") == EngineConfig(
        worker=WorkerConfig(
            model="m",
            load_format="dummy",
            dtype="bfloat16",
            seed=5,
            max_model_len=100,
            max_num_seqs=3,
            block_size=32,
            num_blocks=7,
            kv_cache_memory_bytes=1000,
            memory_utilization=0.25,
            num_threads=2,
            pin_threads=True,
        ),
        max_num_seqs=3,
        max_num_batched_tokens=50,
        max_num_waiting=9,
        enable_prefix_caching=False,
        step_timeout_s=1.5,
    )


def test_kv_events_name_a_port_for_each_replica_and_its_replays() -> None:
    options = EngineOptions(kv_events="tcp://*:5557")
    events = ExecutorOptions().engine_config(options, "m").kv_events
    assert events == KVEventsConfig("*", 5557)
    assert (events.publish_port(0), events.replay_port(0, 1)) == (5557, 5558)
    assert [events.publish_port(replica) for replica in range(2)] == [5557, 5558]
    assert [events.replay_port(replica, 2) for replica in range(2)] == [5559, 5560]
    assert KVEventsConfig.parse("tcp://[::1]:70").host == "[::1]"


def test_kv_events_want_room_for_their_ports() -> None:
    sim = ExecutorOptions(executor="sim")
    for port in (0, 65535, 99999):
        with pytest.raises(ConfigError, match=r"takes 2 ports .* 1 to 65534, got"):
            sim.engine_config(EngineOptions(kv_events=f"tcp://127.0.0.1:{port}"), "m")
    options = EngineOptions(kv_events="tcp://127.0.0.1:65534")
    sim.engine_config(options, "m")
    with pytest.raises(ConfigError, match=r"takes 8 ports .* 1 to 65528, got 65534"):
        sim.engine_config(options, "m", ParallelOptions(data_parallel_size=4))


def test_kv_tiers_reach_engine_and_worker(tmp_path: Path) -> None:
    path = str(tmp_path / "kv")
    options = EngineOptions(
        kv_host_bytes="1GiB",
        kv_disk_path=path,
        kv_disk_bytes="2MiB",
        kv_disk_min_touches=3,
        kv_load_failure="fail",
    )
    config = ExecutorOptions().engine_config(options, "m")
    assert config.kv_tiers == KVTiersConfig(
        host_bytes=2**30, disk_path=path, disk_bytes=2**21, disk_min_touches=3
    )
    assert config.fail_on_load_failure
    assert (config.worker.kv_host_bytes, config.worker.kv_disk_path) == (2**30, path)


def test_a_tier_may_be_alone(tmp_path: Path) -> None:
    host = EngineOptions(kv_host_bytes=2**33).engine_config("m").kv_tiers
    assert host == KVTiersConfig(host_bytes=2**33)
    path = str(tmp_path)
    disk = EngineOptions(kv_disk_path=path, kv_disk_bytes=2**21).engine_config("m").kv_tiers
    assert disk == KVTiersConfig(disk_path=path, disk_bytes=2**21)


def test_the_workers_of_all_replicas_share_host_memory() -> None:
    options = EngineOptions(kv_host_bytes=4000, load_format="dummy")
    parallel = ParallelOptions(tensor_parallel_size=2, data_parallel_size=2)
    config = ExecutorOptions().engine_config(options, "qwen3-0.6b", parallel)
    assert config.worker.kv_host_bytes == 1000
    assert config.kv_tiers is not None
    assert config.kv_tiers.host_bytes == 4000


def test_the_simulated_executor_takes_its_sizes_from_the_same_flags() -> None:
    executor = ExecutorOptions(
        executor="sim", sim_base_ms=2.0, sim_per_token_ms=0.5, sim_vocab_size=99
    )
    engine = EngineOptions(num_kv_blocks=40, block_size=8, max_model_len=300)
    config = executor.engine_config(engine, "m")
    assert config.executor == "sim"
    assert config.sim.base_s == pytest.approx(0.002)
    assert config.sim.per_token_s == pytest.approx(0.0005)
    sizes = (config.sim.num_blocks, config.sim.block_size, config.sim.max_model_len)
    assert sizes == (40, 8, 300)
    assert config.sim.vocab_size == 99


def test_the_simulated_executor_has_stages() -> None:
    parallel = ParallelOptions(pipeline_parallel_size=3)
    config = ExecutorOptions(executor="sim").engine_config(EngineOptions(), "m", parallel)
    assert config.worker.parallel.pipeline_parallel_size == 3


def test_devices_are_those_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))

    def place(devices: str, tp: int, threads: int | None = None) -> None:
        parallel = ParallelOptions(tensor_parallel_size=tp, devices=devices)
        engine = EngineOptions(load_format="dummy", threads=threads)
        ExecutorOptions().engine_config(engine, "qwen3-0.6b", parallel)

    place("cpu:1,cpu:0", 2)
    place("cpu:3", 1, threads=2)
    with pytest.raises(ConfigError) as caught:
        place("cpu:0,cpu:2", 2)
    assert str(caught.value) == (
        "--devices names cpu:2, but the 8 cores of this host are cpu:0 to cpu:1 with 2 workers."
    )
    with pytest.raises(
        ConfigError, match=r"names cpu:1, but the 8 cores of this host are cpu:0 with 1 w"
    ):
        place("cpu:1", 1)
    with pytest.raises(
        ConfigError, match=r"names cpu:4, .* cpu:0 to cpu:3 with 2 workers of 2 threads"
    ):
        place("cpu:0,cpu:4", 2, threads=2)


def test_a_body_holds_only_what_was_given() -> None:
    assert SamplingOptions().body(None) == {}
    options = SamplingOptions(temperature=0.0, max_tokens=5, stop=("a", "b"))
    assert options.body(3) == {"temperature": 0.0, "max_tokens": 5, "stop": ["a", "b"], "seed": 3}


def test_without_ray_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'pagoda-llm[ray]'")):
        ExecutorOptions(executor="ray").engine_config(EngineOptions(), "m")


def test_the_cluster_is_told_to_the_engine() -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    executor = ExecutorOptions(executor="ray", ray_address="10.0.0.1:6379")
    engine = EngineOptions(load_format="dummy", threads=3)
    config = executor.engine_config(engine, "qwen3-0.6b", ParallelOptions(tensor_parallel_size=2))
    assert (config.executor, config.ray_address) == ("ray", "10.0.0.1:6379")
    assert config.worker.parallel.tensor_parallel_size == 2
