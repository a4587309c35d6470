# SPDX-License-Identifier: Apache-2.0
"""Transfer ids that authenticate a `KVSource`.

A source passes through clients and proxies. A forged one could make an engine connect to any address, or end the
lease of another request. So the transfer id contains a MAC over address, engine and token, which only engines
with the cluster's secret can make.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from pagoda.messages.frontend import KVSource
from pagoda.messages.worker_config import CurveKeys

_TOKEN_CHARS = 32


class TransferTokens:
    def __init__(self, keys: CurveKeys) -> None:
        self._key = hashlib.blake2b(
            keys.secret_key.encode(), digest_size=32, person=b"pagoda-kv-source"
        ).digest()

    def new_id(self, address: str, engine_id: str) -> str:
        return self.id_of(address, engine_id, secrets.token_hex(_TOKEN_CHARS // 2))

    def id_of(self, address: str, engine_id: str, token: str) -> str:
        """Returns the transfer id of `token` at the engine `engine_id` at `address`."""
        signed = "\n".join((address, engine_id, token)).encode()
        mac = hmac.digest(self._key, signed, "sha256").hex()[:_TOKEN_CHARS]
        return f"{token}-{mac}"

    def has_made(self, source: KVSource) -> bool:
        token = source.transfer_id.rpartition("-")[0]
        try:
            genuine = self.id_of(source.address, source.engine_id, token).encode()
            return hmac.compare_digest(genuine, source.transfer_id.encode())
        except UnicodeEncodeError:
            return False
