from __future__ import annotations

import re
from pathlib import Path

import pytest

from pagoda.errors import ConfigError
from pagoda.frontend.engine_options import EngineOptions, ExecutorOptions, Handoff, HandoffOptions
from pagoda.ipc.curve import keys_of
from pagoda.messages.worker_config import Role

SECRET = b"a secret that all hosts have"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(SECRET + b"\n")
    return path


def config(key_file: Path | None, num_replicas: int = 1, **flags: object) -> Handoff | None:
    options = HandoffOptions(**flags)  # type: ignore[arg-type]
    return options.config(
        cluster_key_file=key_file, advertise="10.0.0.1", num_replicas=num_replicas
    )


def test_without_a_role_there_is_nothing(key_file: Path) -> None:
    assert config(None) is None
    assert config(key_file) is None
    assert EngineOptions().engine_config("m").handoff is None
    assert EngineOptions().engine_config("m").worker.kv_handoff is None


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_a_role_is_told_to_engine_and_workers(key_file: Path, role: str) -> None:
    handoff = config(key_file, role=role, kv_lease=5.0, kv_transports="tcp, shm", kv_encrypt=True)
    assert handoff is not None
    engine = ExecutorOptions(executor="sim").engine_config(EngineOptions(), "m", handoff=handoff)
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


def test_the_doors_of_replicas_have_ports_beside_each_other(key_file: Path) -> None:
    handoff = config(key_file, 2, role="prefill", kv_port=65534)
    assert handoff is not None
    assert handoff.engine.port == 65534


@pytest.mark.parametrize("executor", ["local", "sim"])
def test_a_load_failure_may_fail_the_request(key_file: Path, executor: str) -> None:
    options = EngineOptions(kv_load_failure="fail")
    handoff = config(key_file, role="decode")
    engine = options.engine_config("m", handoff)
    assert engine.handoff is not None
    assert engine.fail_on_load_failure
    assert engine.kv_tiers is None
    sentence = "--kv-load-failure needs --kv-host-bytes, --kv-disk-path, or --role decode or both."
    for other in (None, config(key_file, role="prefill")):
        with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}$"):
            ExecutorOptions(executor=executor).engine_config(options, "m", handoff=other)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            {"kv_transports": "tcp"},
            "--kv-transports needs --role prefill, decode or both.",
        ),
        ({"kv_lease": 5.0}, "--kv-lease needs --role prefill, decode or both."),
        ({"kv_port": 5}, "--kv-port needs --role prefill, decode or both."),
        ({"kv_encrypt": True}, "--kv-encrypt needs --role prefill, decode or both."),
        (
            {"role": "decode", "kv_port": 5700},
            "--kv-port needs --role prefill or both; no host fetches KV from a decode host.",
        ),
        (
            {"role": "both", "kv_port": 65535},
            "--kv-port 65535 leaves too few ports for 2 replicas.",
        ),
        *(
            (
                {"role": "both", "kv_transports": names},
                "--kv-transports takes some of shm, tcp, nixl, mooncake, each once, such as shm,tcp, "
                f"got {names!r}.",
            )
            for names in ("", "rdma", "tcp,tcp", "shm,", "shm tcp")
        ),
    ],
)
def test_what_cannot_be_is_refused(key_file: Path, flags: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}$"):
        config(key_file, 2, **flags)


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_a_role_needs_the_clusters_secret_and_the_prefix_cache(key_file: Path, role: str) -> None:
    with pytest.raises(ConfigError, match=f"--role {role} needs --cluster-key-file"):
        config(None, role=role)
    with pytest.raises(ConfigError, match="cannot be read"):
        config(key_file.parent / "nothing", role=role)
    handoff = config(key_file, role=role)
    with pytest.raises(ConfigError, match=f"--role {role} needs the prefix cache"):
        EngineOptions(enable_prefix_caching=False).engine_config("m", handoff)


def test_workers_on_other_hosts_share_no_memory(key_file: Path) -> None:
    handoff = config(key_file, role="prefill", kv_transports="shm")
    executor = ExecutorOptions(executor="ray")
    with pytest.raises(ConfigError, match="--kv-transports shm does not go with --executor ray"):
        executor.engine_config(EngineOptions(load_format="dummy"), "qwen3-0.6b", handoff=handoff)
