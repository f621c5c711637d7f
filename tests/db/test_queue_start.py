"""The start of the queue of change batches never passes one that appears later."""

import random

import pytest

from indexer.cluster.numbering import Queue, QueueStart


class Log:
    """Transactions that queue change batches, and what a snapshot shows of them.

    As in Postgres, a snapshot ends after the last transaction that has ended. It knows no later one, even if it runs.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._next_id = self._drawn = self._snapshot_end = 0
        self._running: dict[int, list[int]] = {}
        self.queue: set[int] = set()

    def step(self) -> None:
        """Begin a transaction, let one draw a place, or end one."""
        match self._chance.choice("bdde"):
            case "b":
                self._running[self._next_id] = []
                self._next_id += 1
            case "d" if self._running:
                self._drawn += 1
                self._running[self._chance.choice(list(self._running))].append(self._drawn)
            case "e" if self._running:
                self.end(self._chance.choice(list(self._running)))

    def end(self, transaction: int) -> None:
        places = self._running.pop(transaction)
        self._snapshot_end = max(self._snapshot_end, transaction + 1)
        self.queue |= set(places) if self._chance.random() < 0.8 else set()

    def end_all(self) -> None:
        for transaction in list(self._running):
            self.end(transaction)

    def read(self, start: int) -> Queue:
        shown = dict.fromkeys(sorted(place for place in self.queue if place > start), 0.0)
        queue = Queue(shown, min([*self._running, self._snapshot_end]), self._drawn)
        for _ in range(self._chance.randrange(3)):  # places may be drawn after the snapshot
            self.step()
        return queue._replace(drawn=self._drawn)

    def new_transaction(self) -> int:
        """Return the ID of a transaction that ends at once."""
        self._running[self._next_id] = []
        self._next_id += 1
        self.end(self._next_id - 1)
        return self._next_id - 1


@pytest.mark.slow
def test_start_passes_no_batch_that_appears_later_and_follows_the_queue() -> None:
    passed = 0
    for seed in range(300):
        chance = random.Random(seed)
        log, start = Log(chance), QueueStart()
        for _ in range(chance.randrange(200)):
            log.step()
            if chance.random() < 0.3:
                queue = log.read(start.place)
                start.advance(queue)
                if start.needs_mark and chance.random() < 0.5:
                    start.mark(log.new_transaction())
                log.queue -= {place for place in queue.batches if chance.random() < 0.7}
            assert all(place > start.place for place in log.queue), f"seed {seed}"
        log.end_all()
        assert all(place > start.place for place in log.queue), f"seed {seed}"
        log.queue.clear()
        for _ in range(6):
            start.advance(log.read(start.place))
            if start.needs_mark:
                start.mark(log.new_transaction())
            log.end_all()
            log.queue.clear()
        passed += start.place > 0
    assert passed > 250, "the start moves"
