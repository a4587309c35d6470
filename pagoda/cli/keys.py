# SPDX-License-Identifier: Apache-2.0
"""`pagoda keys`: the keys in a file, as `serve --api-keys-file` takes it; also while servers use it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from pagoda.api.auth.keys import NAME_RULE, ApiKey, Scope, digest_of, is_name
from pagoda.api.auth.keys_file import changed_keys, new_key, read_keys
from pagoda.cli import output
from pagoda.cli.options import Count, GeneralOptions
from pagoda.errors import ConfigError

KeysFile = Annotated[Path, Parameter(name="--api-keys-file", metavar="FILE")]
Name = Annotated[str, Parameter(name="NAME")]
Weight = Annotated[float, Parameter(validator=Number(gte=0.01, lte=100))]


def add(
    name: Name,
    /,
    *,
    api_keys_file: KeysFile,
    scope: Annotated[
        tuple[Literal["answer", "look", "operate", "others", "urgent"], ...], Parameter(negative=())
    ] = ("answer",),
    weight: Weight = 1.0,
    max_concurrent_requests: Count | None = None,
    requests_per_minute: Count | None = None,
    tokens_per_minute: Count | None = None,
    general: GeneralOptions = GeneralOptions(),
) -> int:
    """Make a key, print it, and add its SHA-256 to a file. Nobody can find the key again.

    Args:
        name: The key's name in metrics and logs; the files and responses of clients belong to it.
        api_keys_file: The file given to a server as --api-keys-file; it is made if it is not there.
        scope: A kind of routes that the key may use; may be repeated: answer for generations and the client's own
            files, look for figures and the page, operate for traces, adapters and hosts, others for listing and
            ending running requests of other keys, urgent for requests with a priority below 0.
        weight: The key's share of tokens beside other keys, when all want more than there is.
        max_concurrent_requests: The most requests of the key at a time.
        requests_per_minute: The most requests of the key in a minute.
        tokens_per_minute: The most tokens, of prompts and answers, of the key in a minute.
    """
    general.apply()
    if not is_name(name):
        raise ConfigError(f"NAME must be {NAME_RULE}, got {name!r}.")
    key = new_key()
    made = ApiKey(
        name=name,
        sha256=digest_of(key),
        scopes=frozenset(map(Scope, scope)),
        weight=weight,
        max_concurrent_requests=max_concurrent_requests,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
    )
    with changed_keys(api_keys_file) as keys:
        if any(name == own.name for own in keys):
            raise ConfigError(
                f"{api_keys_file} has a key {name}; revoke it first, or choose another NAME."
            )
        keys.append(made)
    print(key)
    if sys.stdout.isatty():
        output.stderr().print("This is the only time that the key is shown.", soft_wrap=True)
    return 0


def list(  # noqa: A001 - the name of the command
    *, api_keys_file: KeysFile, general: GeneralOptions = GeneralOptions()
) -> int:
    """List the keys in a file: names, scopes, weights and limits.

    Args:
        api_keys_file: The file given to a server as --api-keys-file.
    """
    general.apply()
    head = ("name", "scopes", "weight", "at once", "requests/min", "tokens/min")
    rows = [tuple(_row(key)) for key in read_keys(api_keys_file)]
    output.stdout().print(output.table(str(api_keys_file), head, rows))
    return 0


def _row(key: ApiKey) -> Iterator[str]:
    yield key.name
    yield " ".join(sorted(key.scopes))
    yield f"{key.weight:g}"
    for limit in (key.max_concurrent_requests, key.requests_per_minute, key.tokens_per_minute):
        yield "-" if limit is None else f"{limit:,}"


def revoke(
    name: Name, /, *, api_keys_file: KeysFile, general: GeneralOptions = GeneralOptions()
) -> int:
    """Remove a key from a file. Servers refuse it within seconds; what it asked before is still answered.

    Args:
        name: The name of the key.
        api_keys_file: The file given to a server as --api-keys-file.
    """
    general.apply()
    with changed_keys(api_keys_file) as keys:
        left = [key for key in keys if key.name != name]
        if len(left) == len(keys):
            raise ConfigError(f"{api_keys_file} has no key {name}; `pagoda keys list` shows them.")
        keys[:] = left
    output.stdout().print(f"{name} is revoked.")
    return 0
