from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagoda.frontend.load_tracker import Account, LoadTracker

REPLICAS = 3


@given(st.data())
def test_the_ledger_is_the_sum_of_its_open_accounts_and_zero_without_any(
    data: st.DataObject,
) -> None:
    ledger = LoadTracker(REPLICAS)
    accounts: list[Account] = []
    for _ in range(data.draw(st.integers(0, 40))):
        action = data.draw(st.sampled_from(["open", "reach", "advance", "close", "learn"]))
        if action == "open":
            accounts.append(
                ledger.open(
                    data.draw(st.integers(0, REPLICAS - 1)),
                    num_tokens=data.draw(st.integers(0, 10_000)),
                    num_cached_tokens=data.draw(st.integers(0, 10_000)),
                    max_output_tokens=data.draw(st.integers(-1, 5_000)),
                )
            )
        elif action == "learn":
            ledger.learn(data.draw(st.integers(0, 100_000)))
        elif accounts:
            account = data.draw(st.sampled_from(accounts))
            if action == "advance":
                ledger.advance(account, data.draw(st.integers(0, 300)))
            elif action == "reach":
                ledger.reach(account, data.draw(st.integers(0, 12_000)))
            else:
                accounts.remove(account)
                ledger.close(account)
        for replica in range(REPLICAS):
            mine = [account for account in accounts if account.replica == replica]
            assert ledger.num_requests[replica] == len(mine)
            assert ledger.pending_tokens[replica] == sum(
                account.prompt_tokens + account.output_tokens for account in mine
            )
            assert all(a.output_tokens >= 1 and a.prompt_tokens >= 0 for a in mine)
    for account in accounts:
        ledger.close(account)
    assert ledger.pending_tokens == ledger.num_requests == [0] * REPLICAS


def test_a_prompt_counts_until_the_first_token_and_an_answer_until_it_ends() -> None:
    ledger = LoadTracker(1)
    account = ledger.open(0, num_tokens=1200, num_cached_tokens=200, max_output_tokens=10)
    assert ledger.pending_tokens == [1010]
    ledger.reach(account, 200)
    assert ledger.pending_tokens == [1010]
    ledger.reach(account, 700)
    assert ledger.pending_tokens == [510]
    ledger.reach(account, 16)  # computed again after a preemption: what is left was known before
    assert ledger.pending_tokens == [510]
    ledger.advance(account, 0)
    assert ledger.pending_tokens == [510]
    ledger.advance(account, 1)
    assert ledger.pending_tokens == [9]
    ledger.advance(account, 50)
    assert ledger.pending_tokens == [1]
    ledger.close(account)
    assert ledger.pending_tokens == [0]


def test_an_answer_counts_as_one_of_the_usual_length() -> None:
    ledger = LoadTracker(1)
    for _ in range(1000):
        ledger.learn(300)
    ledger.open(0, num_tokens=0, num_cached_tokens=0, max_output_tokens=100_000)
    assert ledger.pending_tokens == [300]
