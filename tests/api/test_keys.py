from __future__ import annotations

import pytest

from pagoda.api.keys import NO_KEYS, ApiKeys
from pagoda.errors import ConfigError


def test_keys_are_known_by_their_names() -> None:
    keys = ApiKeys(["alice:=s3cret", "other", "bob-2:=with=inside"])
    assert keys.names == ("alice", "key2", "bob-2")
    names = {"Bearer s3cret": "alice", "bearer other ": "key2", "Bearer with=inside": "bob-2"}
    unknown = ["", "s3cret", "Basic s3cret", "Bearer", "Bearer alice", "Bearer ĸ", "Bearer \udcff"]
    for given, name in {**names, **dict.fromkeys(unknown)}.items():
        assert keys.name_of(given) == name, given


def test_without_keys_all_are_known_and_have_no_name() -> None:
    assert not NO_KEYS
    assert NO_KEYS.names == ("",)
    assert NO_KEYS.name_of("") == NO_KEYS.name_of("Bearer x") == ""


@pytest.mark.parametrize("key", ["QUJDRA==", "=", "1st=key", "a b=c", "ab=", "sk=live-abcdef"])
def test_no_part_of_a_key_becomes_its_name(key: str) -> None:
    keys = ApiKeys([key])
    assert keys.names == ("key1",)
    assert keys.name_of(f"Bearer {key}") == "key1"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ([""], "must not be empty"),
        (["a:=x", "a:=y"], "gives the name a to two keys"),
        (["key2:=x", "y"], "gives the name key2 to two keys"),
        (["a:=x", "b:=x"], "the same key twice, the second time as b"),
        (["a:="], "must not be empty"),
        (["1st:=x"], "must have a letter"),
        ([":=x"], "must have a letter"),
        (["schlüssel"], "must be of visible ASCII characters"),
        (["a:=x\n"], "must be of visible ASCII characters"),
        ([" x"], "must be of visible ASCII characters"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(flags: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"--api-key .*{problem}"):
        ApiKeys(flags)
