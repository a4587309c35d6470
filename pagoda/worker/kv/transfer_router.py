"""Router of one rank's KV transfers: to its tiers, or to other engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagoda.messages.transfers import KVPeer, RemoteBlocks, Transfer, TransferEnd
from pagoda.worker.kv.handoff import KVHandoff
from pagoda.worker.kv.tiers import KVTiers


class TransferRouter:
    """A `TransferWorker` that hands each transfer to the tiers or to the connector of its peer."""

    def __init__(
        self, tiers: KVTiers, handoff: KVHandoff | None, on_end: Callable[[], None]
    ) -> None:
        self._tiers = tiers.transfers(on_end)
        self._handoff = handoff
        self._exchange = None if handoff is None else handoff.exchange(on_end)

    def add_peers(self, peers: Sequence[KVPeer]) -> None:
        if self._exchange is not None:
            self._exchange.add_peers(peers)

    def remove_peers(self, peer_ids: Sequence[str]) -> None:
        if self._exchange is not None:
            self._exchange.remove_peers(peer_ids)

    def start(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            if self._exchange is not None and isinstance(transfer.source, RemoteBlocks):
                self._exchange.start([transfer])
            else:
                self._tiers.start([transfer])

    def step_done(self, step: int) -> None:
        self._tiers.step_done(step)
        if self._exchange is not None:
            self._exchange.step_done(step)

    def poll(self) -> list[TransferEnd]:
        ends = self._tiers.poll()
        return ends if self._exchange is None else ends + self._exchange.poll()

    def close(self) -> None:
        """Ends exports to others and all transfers."""
        if self._handoff is not None:
            self._handoff.close()
        if self._exchange is not None:
            self._exchange.close()
        self._tiers.close()
