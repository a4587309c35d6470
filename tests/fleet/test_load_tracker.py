# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagoda.fleet.answer_lengths import AnswerLeft, AnswerLengths
from pagoda.fleet.load_tracker import LeastLoaded, ReplicaWork, RequestWork

REPLICAS = 3


@given(st.data())
def test_the_work_of_a_replica_is_that_of_its_requests_and_the_least_is_found(
    data: st.DataObject,
) -> None:
    least = LeastLoaded()
    replicas = [ReplicaWork(number) for number in range(REPLICAS)]
    for replica in replicas:
        least.add(replica)
    requests: list[RequestWork] = []
    lengths = AnswerLengths()
    for _ in range(data.draw(st.integers(0, 40))):
        action = data.draw(st.sampled_from(["open", "prompt", "output", "close"]))
        if action == "open":
            requests.append(
                RequestWork(
                    data.draw(st.sampled_from(replicas)),
                    data.draw(st.integers(0, 10_000)),
                    num_cached_tokens=data.draw(st.integers(0, 10_000)),
                    answer=AnswerLeft(
                        lengths,
                        data.draw(st.integers(0, 300)),
                        data.draw(st.integers(0, 5_000)),
                        data.draw(st.integers(0, 5_000)),
                    ),
                )
            )
        elif requests:
            request = data.draw(st.sampled_from(requests))
            if action == "output":
                request.output_progress(data.draw(st.integers(0, 300)))
            elif action == "prompt":
                request.prompt_progress(data.draw(st.integers(0, 12_000)))
            else:
                requests.remove(request)
                request.close()
                lengths.observe(data.draw(st.integers(0, 3_000)))
        for replica in replicas:
            mine = [request for request in requests if request.replica is replica]
            assert replica.pending_tokens == sum(request.pending_tokens for request in mine)
            assert replica.prompt_tokens == sum(request.prompt_tokens for request in mine)
            assert all(a.output_tokens >= 1 and a.prompt_tokens >= 0 for a in mine)
        [found] = least.first(1, ())
        fewest = min(replica.pending_tokens for replica in replicas)
        assert found.pending_tokens <= max(fewest + 32, fewest * 8 / 7 + 1)
        assert bool(found.pending_tokens) == bool(fewest)
    for request in requests:
        request.close()
    assert {replica.pending_tokens for replica in replicas} == {0}


def test_equally_loaded_replicas_take_turns() -> None:
    least = LeastLoaded()
    for number in range(4):
        least.add(ReplicaWork(number))
    chosen = []
    for _ in range(12):
        [replica] = least.first(1, ())
        chosen.append(replica.number)
        RequestWork(replica, 5, num_cached_tokens=0)
    assert sorted(chosen) == sorted([*range(4)] * 3)
    assert [work.number for work in least.first(9, {1, 2})] == [0, 3]
    least.discard(replica)
    assert len(least.first(9, ())) == 3
    least.add(replica)
    assert len(least.first(9, ())) == 4


def test_a_prompt_counts_until_the_first_token_and_an_answer_until_it_ends() -> None:
    replica = ReplicaWork(0)
    answer = AnswerLeft(AnswerLengths(), 0, 10, 10)
    request = RequestWork(replica, 1200, num_cached_tokens=200, answer=answer)
    assert replica.pending_tokens == 1010
    assert request.prompt_progress(200) == 0
    assert request.prompt_progress(700) == 500
    assert replica.pending_tokens == 510
    # After a preemption it is computed again: what is left was known before.
    assert request.prompt_progress(16) == 0
    assert request.output_progress(1) == 501
    assert replica.pending_tokens == 9
    request.output_progress(50)
    assert replica.pending_tokens == 1
    request.close()
    assert replica.pending_tokens == 0
