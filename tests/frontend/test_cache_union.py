from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagoda.frontend.cache_union import CacheUnion
from pagoda.frontend.prefix_index import PrefixIndex, packed
from pagoda.messages.frontend import PrefixCacheUpdate

small = st.lists(st.integers(0, 7), unique=True)


@given(st.data())
def test_listeners_know_what_all_replicas_have_together(data: st.DataObject) -> None:
    union = CacheUnion()
    indexes: list[PrefixIndex] = []
    listeners: list[PrefixIndex] = []
    actions = ["join", "leave", "update", "anew", "clear", "listen"]
    for number in range(data.draw(st.integers(0, 30))):
        action = data.draw(st.sampled_from(actions))
        if action == "join":
            indexes.append(union.new_index(number, 100))
        elif action == "listen":
            listeners.append(PrefixIndex(100))
            union.listen(listeners[-1].apply)
        elif indexes:
            index = data.draw(st.sampled_from(indexes))
            stored = data.draw(small)
            if action in ("leave", "clear"):
                union.clear(index)
                if action == "leave":
                    indexes.remove(index)
            else:
                removed = [key for key in data.draw(small) if key not in stored]
                is_new = action == "anew"
                union.apply(
                    index, PrefixCacheUpdate(packed(stored), packed(removed), starts_anew=is_new)
                )
        whole: set[int] = set().union(*(index.told for index in indexes))
        assert all(listener.told == whole for listener in listeners)


def test_a_listener_that_has_ended_hears_nothing_more() -> None:
    union = CacheUnion()
    index = union.new_index(0, 10)
    heard: list[PrefixCacheUpdate] = []
    end = union.listen(heard.append)
    assert heard == [PrefixCacheUpdate(b"", b"", starts_anew=True)]
    assert union.has_listeners
    end()
    assert not union.has_listeners
    union.apply(index, PrefixCacheUpdate(packed([1]), b""))
    assert len(heard) == 1


def test_what_changes_nothing_for_all_together_is_not_told() -> None:
    union = CacheUnion()
    first, second = union.new_index(0, 10), union.new_index(1, 10)
    heard: list[PrefixCacheUpdate] = []
    union.listen(heard.append)
    union.apply(first, PrefixCacheUpdate(packed([1]), b""))
    union.apply(second, PrefixCacheUpdate(packed([1]), b""))
    union.clear(first)
    assert heard[1:] == [PrefixCacheUpdate(packed([1]), b"")]


def test_holders_of_the_longest_prefix_come_first() -> None:
    union = CacheUnion()
    chain = list(range(100, 116))
    told, sent, short, other = (union.new_index(number, 100) for number in range(4))
    union.apply(told, PrefixCacheUpdate(packed(chain[:12]), b""))
    sent.add(chain[:12])
    union.apply(short, PrefixCacheUpdate(packed(chain[:6]), b""))
    other.add([7, 8])
    assert union.holders(chain, 8) == [0, 1, 2]
    assert union.holders(chain, 1) == [0]
    assert union.holders([1, 2], 8) == []
    union.clear(told)
    assert union.holders(chain, 8) == [1, 2]
    union.clear(sent)
    assert union.holders(chain, 8) == [2]
