# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from pagoda.cli.yaml_file import YamlFile
from pagoda.errors import ConfigError
from tests.tables import each_row

BOMB = "a: &a [1, 1]\nb: &b [*a, *a]\nc: [*b, *b]\n"


def _read(path: Path, data: bytes) -> YamlFile:
    path.write_bytes(data)
    return YamlFile(path, "--file")


def test_numbers_are_those_of_json(tmp_path: Path) -> None:
    file = _read(tmp_path / "a.yaml", b"a: 8e9\nb: -1.5E-3\nc: .5e1\nd: e9\ne: '8e9'\n")
    assert file.value == {"a": 8e9, "b": -1.5e-3, "c": 5.0, "d": "e9", "e": "8e9"}


@each_row(
    ("data", "words"),
    [
        (b"", "line 1: the file: Expected `object`, got `null`"),
        (b"- 1\n", "line 1: the file: Expected `object`, got `array`"),
        (b"a: 1\n\na: 2\n", "line 3: 'a' is there twice"),
        (BOMB.encode(), "line 1: write values out, without aliases"),
        (b"a: &a [*a]\n", "line 1: write values out, without aliases"),
        (b"a: 1\n1: 2\n", "line 2: names are texts; write others in quotes"),
        (b"? [1]\n: 2\n", "line 1: names are texts; write others in quotes"),
        (b"a: 2024-99-99\n", "line 1: write '2024-99-99' in quotes"),
        (b"a:\n- !!binary x\n", "line 2: write 'x' in quotes"),
        (b"a: !!int x\n", "this is not valid YAML (invalid literal"),
        (b"a: " + b"9" * 5000, "this is not valid YAML (Exceeds the limit"),
        (b"a: [", "line 1: this is not valid YAML (expected"),
        (b"a: " + b"[" * 5000, "values are nested too deeply"),
        (b"a: " + b"[" * 40 + b"]" * 40, "line 1: values are nested too deeply"),
        (b"a: \xff\n", "this is not valid YAML"),
        (b"a: \0\n", "this is not valid YAML"),
    ],
)
def test_mistakes_are_named_with_their_lines(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _read(tmp_path / "a.yaml", data)
    assert str(caught.value).startswith(f"--file {tmp_path / 'a.yaml'}")
    assert words in str(caught.value)
