"""How much work each replica has: every request counts on one replica, from its acceptance to its end.

A request's work is counted in tokens: those of its prompt that are not computed yet, as far as its engine says,
and those of its answer that are still to come. How long an answer will be nobody knows; until it ends it counts
as one of the usual length, and never as more than `max_tokens` allows.
"""

from __future__ import annotations

_USUAL_WEIGHT = 0.02
"""Of the latest answer in the moving average of their lengths."""


class Account:
    """One request on one replica."""

    __slots__ = ("num_tokens", "output_tokens", "prompt_tokens", "replica")

    def __init__(
        self, replica: int, *, num_tokens: int, prompt_tokens: int, output_tokens: int
    ) -> None:
        self.replica = replica
        self.num_tokens = num_tokens
        """That the replica was given, cached or not."""
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens

    @property
    def pending_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


class LoadTracker:
    """The open accounts of each replica, added up."""

    def __init__(self, num_replicas: int) -> None:
        self.pending_tokens = [0] * num_replicas
        """Zero exactly when no account of that replica is open."""
        self.num_requests = [0] * num_replicas
        self._usual_output_tokens = 64.0

    def add_replica(self) -> int:
        """Makes room for one more; returns its number, which is never given again."""
        self.pending_tokens.append(0)
        self.num_requests.append(0)
        return len(self.pending_tokens) - 1

    def open(
        self, replica: int, *, num_tokens: int, num_cached_tokens: int, max_output_tokens: int
    ) -> Account:
        """A request of `num_tokens`, of which the first are believed to be cached, was given to `replica`."""
        account = Account(
            replica,
            num_tokens=num_tokens,
            prompt_tokens=max(0, num_tokens - num_cached_tokens),
            output_tokens=max(1, min(max_output_tokens, round(self._usual_output_tokens))),
        )
        self.pending_tokens[replica] += account.pending_tokens
        self.num_requests[replica] += 1
        return account

    def advance(self, account: Account, num_tokens: int) -> int:
        """So many tokens of the answer have come; with the first of them the prompt is computed.

        Returns how many tokens have been computed for that.
        """
        if not num_tokens:
            return 0
        num_computed = num_tokens + account.prompt_tokens
        done = min(num_tokens, account.output_tokens - 1) + account.prompt_tokens
        account.output_tokens -= done - account.prompt_tokens
        account.prompt_tokens = 0
        self.pending_tokens[account.replica] -= done
        return num_computed

    def reach(self, account: Account, num_computed_tokens: int) -> int:
        """So many of the request's tokens have been computed, or were cached; returns how many more than known."""
        left = max(0, account.num_tokens - num_computed_tokens)
        done = max(0, account.prompt_tokens - left)
        account.prompt_tokens -= done
        self.pending_tokens[account.replica] -= done
        return done

    def close(self, account: Account) -> None:
        """The request has left the replica."""
        self.pending_tokens[account.replica] -= account.pending_tokens
        self.num_requests[account.replica] -= 1

    def learn(self, num_output_tokens: int) -> None:
        """An answer has ended with so many tokens."""
        self._usual_output_tokens += _USUAL_WEIGHT * (num_output_tokens - self._usual_output_tokens)
