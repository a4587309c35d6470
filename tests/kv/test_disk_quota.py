"""A quota is compared with the file system before anything starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagoda.errors import ConfigError
from pagoda.kv.disk_quota import check_quota


def test_a_quota_may_be_as_large_as_the_file_system(tmp_path: Path) -> None:
    file_system = os.statvfs(tmp_path)
    size = file_system.f_frsize * file_system.f_blocks
    check_quota(tmp_path, size)
    check_quota(tmp_path / "not" / "there" / "yet", size)
    sentence = rf"^--kv-disk-bytes \d+\.\d GiB is more than the \d+\.\d GiB of the file system of {tmp_path}/a; "
    with pytest.raises(ConfigError, match=sentence):
        check_quota(tmp_path / "a", size + 1)
