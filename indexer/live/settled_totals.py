"""Totals of settled messages and of rejections, to notice that most messages are rejected."""

from collections import Counter
from collections.abc import Iterable, Sequence

from indexer.reasons import Rejection
from indexer.sync.batch import SettledMessage
from indexer.sync.changes import DeadLetter


class SettledTotals:
    """Counts settled messages since the start of the process.

    Attributes:
        settled: The number of settled messages.
        rejected: The number of rejected messages by reason.
        examples: The newest rejected message of each reason, as text for people.
    """

    def __init__(self) -> None:
        self.settled = 0
        self.rejected = Counter[Rejection]()
        self.examples: dict[Rejection, str] = {}

    def add(self, settled: Sequence[SettledMessage], dead_letters: Iterable[DeadLetter]) -> None:
        """Add the messages of a batch that was written."""
        self.settled += len(settled)
        self.rejected.update([item.why for item in settled if isinstance(item.why, Rejection)])
        self.examples |= {dead_letter.reason: _describe(dead_letter) for dead_letter in dead_letters}


def _describe(rejected: DeadLetter) -> str:
    return f"{rejected.did or 'a message without a DID'}, seq {rejected.seq}: {rejected.detail or rejected.reason.text}"
