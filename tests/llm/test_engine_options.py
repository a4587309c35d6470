# SPDX-License-Identifier: Apache-2.0
"""Flags become configurations of engines, or are refused with a sentence before anything starts."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from pagoda.errors import ConfigError
from pagoda.ipc.amounts import parse_bytes
from pagoda.ipc.curve import keys_of
from pagoda.llm.engine_options import (
    EngineOptions,
    ExecutorOptions,
    Handoff,
    ParallelOptions,
)
from pagoda.messages.engine_config import EngineConfig, KVTiersConfig
from pagoda.messages.speculation import HEAD_IF_ANY, SpeculativeConfig
from pagoda.messages.worker_config import KVTierConfig, Role, WorkerConfig
from pagoda.plugins.disaggregation.options import HandoffOptions
from pagoda.plugins.kv_events.address import KVEventsAddress

SECRET = b"a secret that all hosts have"
GIB = 2**30


def configured(
    executor: str = "local", model: str = "m", handoff: Handoff | None = None, **flags: Any
) -> EngineConfig:
    """The configuration that flags of all groups of options ask for."""
    executor_options, parallel = {"executor": executor}, {}
    engine = {}
    for name, value in flags.items():
        if name in ExecutorOptions.__dataclass_fields__:
            executor_options[name] = value
        elif name in ParallelOptions.__dataclass_fields__:
            parallel[name] = value
        else:
            engine[name] = value
    return ExecutorOptions(**executor_options).engine_config(  # type: ignore[arg-type]
        EngineOptions(**engine), model, ParallelOptions(**parallel), handoff
    )


def refused(sentence: str) -> Any:
    return pytest.raises(ConfigError, match=f"^{re.escape(sentence)}$")


# ---- what reaches the engine


def test_defaults_are_those_of_the_engine() -> None:
    worker = WorkerConfig(model="dir", drafter=HEAD_IF_ANY)
    expected = EngineConfig(worker=worker, speculation=SpeculativeConfig())
    assert EngineOptions().engine_config("dir") == configured(model="dir") == expected


def test_every_flag_reaches_the_engine() -> None:
    both: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 50}
    worker: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "seed": 5,
        "max_model_len": 100,
        "block_size": 32,
        "kv_cache_memory_bytes": 1000,
        "memory_utilization": 0.25,
        "pin_threads": True,
        "batch_invariant": False,
    }
    engine: dict[str, Any] = {
        "max_num_waiting": 9,
        "long_prefill_token_threshold": 40,
        "enable_prefix_caching": False,
    }
    speculation = '{"method": "ngram", "prompt_lookup_max": 4}'
    given = EngineOptions(
        speculative_config=speculation,
        num_kv_blocks=7,
        threads=2,
        step_timeout=1.5,
        **both,
        **worker,
        **engine,
    ).engine_config("m")
    assert given == EngineConfig(
        worker=WorkerConfig(model="m", num_blocks=7, num_threads=2, **both, **worker),
        speculation=SpeculativeConfig(method="ngram", prompt_lookup_max=4),
        step_timeout_s=1.5,
        **both,
        **engine,
    )


def test_kv_events_name_a_port_for_each_replica_and_its_replays() -> None:
    assert configured(kv_events="tcp://*:5557").kv_events == "tcp://*:5557"
    events = KVEventsAddress.parse("tcp://*:5557")
    assert (events.publish_port(0), events.replay_port(0, 1)) == (5557, 5558)
    assert [events.publish_port(replica) for replica in range(2)] == [5557, 5558]
    assert [events.replay_port(replica, 2) for replica in range(2)] == [5559, 5560]
    assert KVEventsAddress.parse("tcp://[::1]:70").host == "[::1]"
    configured("sim", kv_events="tcp://127.0.0.1:65534")


def test_kv_tiers_reach_engine_and_worker(tmp_path: Path) -> None:
    path = str(tmp_path / "kv")
    disk = {"kv_disk_path": path, "kv_disk_bytes": "2MiB"}
    config = configured(kv_host_bytes="1GiB", kv_disk_min_touches=3, kv_load_failure="fail", **disk)
    tier = KVTierConfig(path, 2**21, {"min_touches": 3})
    tiers = KVTiersConfig(host_bytes=GIB, further={"disk": tier})
    assert config.kv_tiers == tiers
    assert config.fail_on_load_failure
    assert (config.worker.kv_host_bytes, config.worker.kv_tiers) == (GIB, {"disk": tier})
    assert configured(kv_host_bytes=GIB).kv_tiers == KVTiersConfig(host_bytes=GIB)
    alone = KVTiersConfig(further={"disk": KVTierConfig(path, 2**21, {"min_touches": 2})})
    assert configured(**disk).kv_tiers == alone


def test_the_workers_of_all_replicas_share_host_memory() -> None:
    sizes = {"tensor_parallel_size": 2, "data_parallel_size": 2}
    config = configured(model="qwen3-0.6b", load_format="dummy", kv_host_bytes=4000, **sizes)
    assert config.worker.kv_host_bytes == 1000
    assert config.kv_tiers is not None
    assert config.kv_tiers.host_bytes == 4000


def test_the_simulated_executor_takes_its_sizes_from_the_same_flags() -> None:
    config = configured(
        "sim",
        sim_base_ms=2.0,
        sim_per_token_ms=0.5,
        sim_vocab_size=99,
        num_kv_blocks=40,
        block_size=8,
        max_model_len=300,
        pipeline_parallel_size=3,
    )
    sim = config.sim
    assert (config.executor, config.worker.parallel.pipeline_parallel_size) == ("sim", 3)
    assert (sim.base_s, sim.per_token_s) == (pytest.approx(0.002), pytest.approx(0.0005))
    assert (sim.num_blocks, sim.block_size, sim.max_model_len, sim.vocab_size) == (40, 8, 300, 99)


def test_the_cluster_is_told_to_the_engine() -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    flags: dict[str, Any] = {"load_format": "dummy", "threads": 3, "tensor_parallel_size": 2}
    config = configured("ray", "qwen3-0.6b", ray_address="10.0.0.1:6379", **flags)
    assert (config.executor, config.ray_address) == ("ray", "10.0.0.1:6379")
    assert config.worker.parallel.tensor_parallel_size == 2


# ---- what is refused

CALIBRATION = "--quantization-calibration"
TIER = "--kv-host-bytes, --kv-disk-path, or --role decode or both"


@pytest.mark.parametrize(
    ("executor", "flags", "sentence"),
    [
        *(
            ("sim", {flag: value}, f"--{flag.replace('_', '-')} must be float <= 86400.0, got {value}.")
            for flag in ("step_timeout", "worker_start_timeout", "worker_timeout", "engine_timeout")
            for value in (86_401.0, math.inf)
        ),
        ("local", {"dtype": "int3"}, "--dtype must be one of auto, float32, bfloat16, float16, got 'int3'."),
        ("local", {"quantization_group_size": 64}, "--quantization-group-size needs --quantization int4."),
        ("local", {"quantization_calibration": "t"}, f"{CALIBRATION} needs --quantization int8 or int4."),
        *(
            (
                "local",
                {"quantization": "int4", "quantization_calibration": "t", size: 2},
                f"{CALIBRATION} does not go with several devices or replicas, as it rounds for one worker; "
                f"round once with pagoda quantize MODEL OUT --format w4a16 {CALIBRATION} t, and serve OUT.",
            )
            for size in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        ),
        *(
            (
                "sim",
                {"kv_events": f"tcp://127.0.0.1:{port}", "data_parallel_size": replicas},
                f"--kv-events takes {2 * replicas} ports from PORT on, so PORT must be 1 to "
                f"{2**16 - 2 * replicas}, got {port}.",
            )
            for port, replicas in ((0, 1), (65535, 1), (99999, 1), (65534, 4))
        ),
        ("sim", {"max_num_seqs": 2**17}, "--max-num-seqs is at most 65536 with --executor sim."),
        ("local", {"tensor_parallel_size": 2, "devices": "cpu:0"},
         "dp × tp × pp = 1 × 2 × 1 = 2 devices, 1 given (--devices cpu:0); name 2, or change a size."),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(executor: str, flags: dict[str, Any], sentence: str) -> None:
    """Besides the mistakes in tests/cli/test_cli_mistakes.py."""
    with refused(sentence):
        configured(executor, **flags)


def test_without_ray_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with refused("--executor ray needs Ray: pip install 'pagoda-llm[ray]'."):
        configured("ray")


@pytest.mark.parametrize(
    ("devices", "tp", "threads", "known"),
    [
        ("cpu:1,cpu:0", 2, None, None),
        ("cpu:3", 1, 2, None),
        ("cpu:0,cpu:2", 2, None, "names cpu:2, but the 8 cores of this host are cpu:0 to cpu:1 with 2 workers."),
        ("cpu:1", 1, None, "names cpu:1, but the 8 cores of this host are cpu:0 with 1 workers."),
        ("cpu:0,cpu:4", 2, 2,
         "names cpu:4, but the 8 cores of this host are cpu:0 to cpu:3 with 2 workers of 2 threads."),
    ],
)  # fmt: skip
def test_devices_are_those_of_this_host(
    devices: str, tp: int, threads: int | None, known: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    flags: dict[str, Any] = {"load_format": "dummy", "threads": threads, "devices": devices}
    if known is None:
        configured(model="qwen3-0.6b", tensor_parallel_size=tp, **flags)
        return
    with refused(f"--devices {known}"):
        configured(model="qwen3-0.6b", tensor_parallel_size=tp, **flags)


# ---- prefill/decode handoff


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(SECRET + b"\n")
    return path


def handed(key_file: Path | None, num_replicas: int = 1, **flags: Any) -> Handoff | None:
    return HandoffOptions(**flags).config(
        cluster_key_file=key_file, advertise="10.0.0.1", num_replicas=num_replicas
    )


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_a_role_is_told_to_engine_and_workers(key_file: Path, role: str) -> None:
    handoff = handed(key_file, role=role, kv_lease=5.0, kv_transports="tcp, shm", kv_encrypt=True)
    engine = configured("sim", handoff=handoff)
    assert engine.handoff is not None
    assert engine.handoff.role is Role(role)
    assert (engine.handoff.host, engine.handoff.port) == ("10.0.0.1", 0)
    assert engine.handoff.lease_s == 5.0
    assert engine.handoff.keys == keys_of(SECRET)
    assert not engine.fail_on_load_failure
    workers = engine.worker.kv_handoff
    assert workers is not None
    assert (workers.role, workers.host) == (Role(role), "10.0.0.1")
    assert workers.transports == ("tcp", "shm")
    assert workers.secret == SECRET
    assert workers.encrypts
    assert engine.worker.has_transfer_link


def test_a_load_failure_may_fail_requests_where_kv_is_fetched(key_file: Path) -> None:
    assert handed(None) is handed(key_file) is None
    decode = handed(key_file, role="decode")
    for executor in ("local", "sim"):
        engine = configured(executor, handoff=decode, kv_load_failure="fail")
        assert engine.fail_on_load_failure
        assert engine.kv_tiers is None
        with refused(f"--kv-load-failure needs {TIER}."):
            prefill = handed(key_file, role="prefill", kv_port=65535)
            configured(executor, handoff=prefill, kv_load_failure="fail")


ROLE = "--role prefill, decode or both"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"kv_transports": "tcp"}, f"--kv-transports needs {ROLE}."),
        ({"kv_lease": 5.0}, f"--kv-lease needs {ROLE}."),
        ({"kv_port": 5}, f"--kv-port needs {ROLE}."),
        ({"kv_encrypt": True}, f"--kv-encrypt needs {ROLE}."),
        ({"kv_port": 2**16}, "--kv-port must be int <= 65535, got 65536."),
        ({"kv_lease": 0}, "--kv-lease must be float >= 1.0, got 0."),
        ({"role": "decode", "kv_port": 5700},
         "--kv-port needs --role prefill or both; no host fetches KV from a decode host."),
        ({"role": "both", "kv_port": 65535}, "--kv-port 65535 leaves too few ports for 2 replicas."),
        *(
            ({"role": "both", "kv_transports": names},
             f"--kv-transports takes some of shm, tcp, nixl, mooncake, each once, such as shm,tcp, got {names!r}.")
            for names in ("", "rdma", "tcp,tcp", "shm,", "shm tcp")
        ),
    ],
)  # fmt: skip
def test_what_hosts_cannot_do_is_refused(
    key_file: Path, flags: dict[str, Any], sentence: str
) -> None:
    with refused(sentence):
        handed(key_file, 2, **flags)


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_a_role_needs_the_clusters_secret_and_the_prefix_cache(key_file: Path, role: str) -> None:
    with pytest.raises(ConfigError, match=f"--role {role} needs --cluster-key-file"):
        handed(None, role=role)
    with pytest.raises(ConfigError, match="cannot be read"):
        handed(key_file.parent / "nothing", role=role)
    with refused(f"--role {role} needs the prefix cache; leave --enable-prefix-caching on."):
        configured(handoff=handed(key_file, role=role), enable_prefix_caching=False)


def test_workers_on_other_hosts_share_no_memory(key_file: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    handoff = handed(key_file, role="prefill", kv_transports="shm")
    with pytest.raises(ConfigError, match="--kv-transports shm does not go with --executor ray"):
        configured("ray", "qwen3-0.6b", handoff, load_format="dummy")


# ---- amounts of memory


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("2GiB", 2**31),
        ("2 gib", 2**31),
        ("1.5G", 3 * 2**29),
        ("512MB", 512_000_000),
        ("4096", 4096),
        ("1k", 1024),
    ],
)
def test_amounts_are_read(text: str, amount: int) -> None:
    assert parse_bytes(text) == amount


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "0", "2 parsecs", "1e9", "nan", "0.1", "8388608TiB"]
)
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as 2GiB"):
        parse_bytes(text)
