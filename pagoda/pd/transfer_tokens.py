"""Which `KVSource` an engine of this cluster has made.

A source goes through the hands of clients and proxies. One that they made up would have an engine connect to
whatever address they name, or end the lease of somebody else: so the id in it is a seal that only holders of the
cluster's secret can make, over all that is believed.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from pagoda.messages.frontend import KVSource
from pagoda.messages.worker_config import CurveKeys

_TOKEN_CHARS = 32


class TransferTokens:
    """Makes transfer ids, and knows its own and those of others with the same secret."""

    def __init__(self, keys: CurveKeys) -> None:
        self._key = hashlib.blake2b(
            keys.secret_key.encode(), digest_size=32, person=b"pagoda-kv-source"
        ).digest()

    def new_id(self, address: str, engine_id: str) -> str:
        """Never given twice, and not to be guessed."""
        return self.id_of(address, engine_id, secrets.token_hex(_TOKEN_CHARS // 2))

    def id_of(self, address: str, engine_id: str, token: str) -> str:
        """The transfer id of the engine `engine_id` at `address`, with the token as its first part."""
        sealed = "\n".join((address, engine_id, token)).encode()
        seal = hmac.digest(self._key, sealed, "sha256").hex()[:_TOKEN_CHARS]
        return f"{token}-{seal}"

    def has_made(self, source: KVSource) -> bool:
        token = source.transfer_id.rpartition("-")[0]
        try:
            genuine = self.id_of(source.address, source.engine_id, token).encode()
            return hmac.compare_digest(genuine, source.transfer_id.encode())
        except UnicodeEncodeError:
            return False
