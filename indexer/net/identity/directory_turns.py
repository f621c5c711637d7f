"""The rate limit of the directories, shared among identities that are known and DIDs that were never seen."""

import asyncio
from collections import deque

BURST_SECONDS = 1.0
MAX_NEW = 96
"""Lookups of new DIDs that wait for a turn. If there is one more, the lookup in the middle of the queue ends."""


class DirectoryTurns:
    """Allows `rate` requests per second. Lookups of known identities come first.

    Anyone can invent DIDs. So a lookup of a new DID gets a turn only if no known identity waits for one; the budgets of
    `IdentityCache` leave at least a quarter of the rate. New DIDs get their turns alternately: the one
    that has waited for the shortest time, then the one that has waited for the longest time. So most lookups are fast
    again right after a flood of made-up DIDs, and none waits forever.
    """

    def __init__(self, rate: float) -> None:
        self._interval = 1 / rate
        self._burst = max(0.0, BURST_SECONDS - self._interval)
        self._next_turn = 0.0
        self._known: deque[asyncio.Future[bool]] = deque()
        self._new: deque[asyncio.Future[bool]] = deque()
        self._newest_is_next = True
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, *, known: bool) -> bool:
        """Wait for a turn; return False if too many new DIDs wait, so that there is none."""
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        waiting = self._known if known else self._new
        waiting.append(turn)
        self._hand_out()
        if len(self._new) > MAX_NEW:
            self._end_wait_of_middle()
        try:
            return await turn
        finally:
            if turn in waiting:  # the caller was cancelled
                waiting.remove(turn)

    def _hand_out(self) -> None:
        """Hand out the turns that the rate allows now. A timer calls this again if lookups still wait."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._next_turn = max(self._next_turn, now - self._burst)
        while (self._known or self._new) and self._next_turn <= now:
            turn = self._take()
            if not turn.done():
                turn.set_result(True)
                self._next_turn += self._interval
        if self._timer is None and (self._known or self._new):
            self._timer = loop.call_at(self._next_turn, self._continue)

    def _continue(self) -> None:
        self._timer = None
        self._hand_out()

    def _end_wait_of_middle(self) -> None:
        middle = self._new[len(self._new) // 2]
        del self._new[len(self._new) // 2]
        if not middle.done():
            middle.set_result(False)

    def _take(self) -> asyncio.Future[bool]:
        if self._known:
            return self._known.popleft()
        self._newest_is_next = not self._newest_is_next
        return self._new.popleft() if self._newest_is_next else self._new.pop()
