"""What goes when the quota is nearly full; the scanner is a list of what it was asked for."""

from __future__ import annotations

from collections.abc import Sequence

from pagoda.kv.disk_index import DiskIndex
from pagoda.kv.disk_scanner import OWN, News, Removed
from pagoda.kv.evictor import Evictor

UNIT = 100
OTHER = 1


class Remover:
    """A scanner that only notes what it is to remove."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, list[bytes]]] = []

    def remove(self, directory: int, keys: Sequence[bytes]) -> None:
        self.asked.append((directory, list(keys)))

    def probe(self, probe_id: int, keys: Sequence[bytes]) -> None:
        raise NotImplementedError

    def forget(self, probe_id: int) -> None:
        raise NotImplementedError

    def rescan(self) -> None:
        raise NotImplementedError

    def poll(self) -> list[News]:
        raise NotImplementedError

    def fileno(self) -> int:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class Rig:
    def __init__(self, num_own: int, num_others: int = 0) -> None:
        self.index = DiskIndex()
        self.index.add_directory(OWN, UNIT)
        self.index.add_directory(OTHER, UNIT // 2)
        for number in range(num_others):
            self.index.add(OTHER, key(number), 64 * number)
        for number in range(num_own):
            self.index.add(OWN, key(number), 64 * (1000 + number))
        self.remover = Remover()
        self.evictor = Evictor(self.index, self.remover, 20 * UNIT, self.index.remove)


def key(number: int) -> bytes:
    return number.to_bytes(32)


def test_below_the_high_mark_nothing_goes() -> None:
    rig = Rig(num_own=15)
    assert rig.evictor.make_room(2, num_storing=2) == 2
    assert not rig.remover.asked


def test_the_oldest_go_first_whosever_they_are() -> None:
    rig = Rig(num_own=17, num_others=3)
    assert rig.evictor.make_room(1, num_storing=0) == 1
    assert rig.remover.asked == [(OTHER, [key(0), key(1), key(2)])]
    assert rig.evictor.is_removing(OTHER, key(1))
    assert not rig.evictor.is_removing(OWN, key(1))


def test_what_is_being_removed_takes_room_until_it_is_gone() -> None:
    rig = Rig(num_own=19)
    assert rig.evictor.make_room(5, num_storing=0) == 1
    assert rig.remover.asked == [(OWN, [key(0), key(1)])]
    assert rig.evictor.make_room(2, num_storing=1) == 0
    rig.evictor.removed(Removed(OWN, [key(0), key(1)]))
    assert not rig.evictor.is_removing(OWN, key(0))
    assert rig.evictor.make_room(2, num_storing=0) == 2


def test_what_others_wrote_is_noticed() -> None:
    rig = Rig(num_own=19)
    rig.evictor.check(num_storing=0)
    assert not rig.remover.asked
    rig.evictor.check(num_storing=1)
    assert rig.remover.asked == [(OWN, [key(0), key(1), key(2)])]


def test_what_is_not_good_is_removed_once() -> None:
    rig = Rig(num_own=2)
    rig.evictor.discard([key(0), key(7)])
    rig.evictor.discard([key(0)])
    assert rig.remover.asked == [(OWN, [key(0), key(7)])]
    assert not rig.index.find(OWN, key(0))
    assert rig.index.num_bytes == UNIT
