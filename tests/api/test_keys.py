# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from pagoda.api.auth.keys import ANYBODY, EVERY_ROUTE, NO_KEYS, ApiKey, ApiKeys, Scope, digest_of
from pagoda.errors import ConfigError


def test_keys_are_known_by_their_names() -> None:
    keys = ApiKeys(["alice:=s3cret", "other", "bob-2:=with=inside"])
    assert keys.names == ("alice", "key2", "bob-2")
    names = {"Bearer s3cret": "alice", "bearer other ": "key2", "Bearer with=inside": "bob-2"}
    for given, name in names.items():
        found = keys.find(given)
        assert found is not None
        assert (found.name, found.scopes) == (name, EVERY_ROUTE)
    for unknown in (
        "",
        "s3cret",
        "Basic s3cret",
        "Bearer",
        "Bearer alice",
        "Bearer ĸ",
        "Bearer \udcff",
    ):
        assert keys.find(unknown) is None, unknown


def test_without_keys_all_are_known_and_have_no_name() -> None:
    assert not NO_KEYS
    assert NO_KEYS.names == ("",)
    assert NO_KEYS.find("") is NO_KEYS.find("Bearer x") is NO_KEYS.named("any") is ANYBODY


@pytest.mark.parametrize("key", ["QUJDRA==", "=", "1st=key", "a b=c", "ab=", "sk=live-abcdef"])
def test_no_part_of_a_key_becomes_its_name(key: str) -> None:
    keys = ApiKeys([key])
    assert keys.names == ("key1",)
    assert keys.find(f"Bearer {key}") is keys.named("key1") is not None


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
        (["a\n:=x"], "must have a letter"),
        (["schlüssel"], "must be of visible ASCII characters"),
        (["a:=x\n"], "must be of visible ASCII characters"),
        ([" x"], "must be of visible ASCII characters"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(flags: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"--api-key .*{problem}"):
        ApiKeys(flags)


def in_file(name: str, key: str) -> ApiKey:
    return ApiKey(name=name, sha256=digest_of(key), scopes=frozenset((Scope.ANSWER,)))


def test_keys_of_a_file_are_replaced_and_those_of_flags_stay() -> None:
    keys = ApiKeys(["flag"], in_file=[in_file("a", "1"), in_file("b", "2")])
    assert keys.names == ("key1", "a", "b")
    keys.replace_file([in_file("b", "3")])
    assert keys.names == ("key1", "b")
    assert keys.find("Bearer 2") is keys.named("a") is None
    assert keys.find("Bearer 3") == in_file("b", "3")
    assert keys.find("Bearer flag") is not None
    for wrong in ([in_file("b", "1"), in_file("b", "2")], [in_file("c", "flag")]):
        with pytest.raises(ConfigError, match=r"belongs to two keys|have the same key"):
            keys.replace_file(wrong)
    assert keys.find("Bearer 3") is not None


def test_an_empty_file_lets_nobody_in() -> None:
    keys = ApiKeys(in_file=())
    assert keys
    assert keys.names == ()
    assert keys.find("") is keys.find("Bearer ") is keys.named("") is None
