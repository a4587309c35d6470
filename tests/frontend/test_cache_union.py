from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagoda.frontend.cache_union import CacheUnion
from pagoda.frontend.prefix_index import PrefixIndex, packed
from pagoda.messages.frontend import PrefixCacheUpdate

small = st.lists(st.integers(0, 7), unique=True)


@given(st.data())
def test_who_follows_knows_what_all_have_together(data: st.DataObject) -> None:
    union = CacheUnion()
    indexes: list[PrefixIndex] = []
    followers: list[PrefixIndex] = []
    for _ in range(data.draw(st.integers(0, 30))):
        action = data.draw(st.sampled_from(["join", "leave", "news", "anew", "clear", "follow"]))
        if action == "join":
            indexes.append(PrefixIndex(100))
            union.add(indexes[-1])
        elif action == "follow":
            follower = PrefixIndex(100)
            union.follow(follower.take)
            followers.append(follower)
        elif indexes:
            index = data.draw(st.sampled_from(indexes))
            stored = data.draw(small)
            if action == "leave":
                indexes.remove(index)
                union.remove(index)
            elif action == "clear":
                union.clear(index)
            else:
                removed = [key for key in data.draw(small) if key not in stored]
                is_new = action == "anew"
                union.take(
                    index, PrefixCacheUpdate(packed(stored), packed(removed), starts_anew=is_new)
                )
        whole: set[int] = set().union(*(index.told for index in indexes))
        assert all(follower.told == whole for follower in followers)


def test_who_unfollows_hears_nothing_more() -> None:
    union, index = CacheUnion(), PrefixIndex(10)
    union.add(index)
    heard: list[PrefixCacheUpdate] = []
    unfollow = union.follow(heard.append)
    assert heard == [PrefixCacheUpdate(b"", b"", starts_anew=True)]
    assert union.is_followed
    unfollow()
    assert not union.is_followed
    union.take(index, PrefixCacheUpdate(packed([1]), b""))
    assert len(heard) == 1


def test_what_changes_nothing_for_all_together_is_not_told() -> None:
    union, first, second = CacheUnion(), PrefixIndex(10), PrefixIndex(10)
    union.add(first)
    union.add(second)
    heard: list[PrefixCacheUpdate] = []
    union.follow(heard.append)
    union.take(first, PrefixCacheUpdate(packed([1]), b""))
    union.take(second, PrefixCacheUpdate(packed([1]), b""))
    union.clear(first)
    assert heard[1:] == [PrefixCacheUpdate(packed([1]), b"")]
