"""Classify the sequence numbers of a connection: which one is next, and which one needs a confirmation."""

from enum import Enum, auto

MAX_STEP = 10_000_000
"""The largest step between two numbers that is not a leap. The largest relays use this many numbers within hours."""


class Step(Enum):
    """The relation of a message's number to the numbers before it.

    Attributes:
        NEXT: Above the last number. Numbers in between may be unused.
        REPEATED: Equal to the last number, or to the leap.
        LOWER: Below the last number.
        LEAP: More than `MAX_STEP` above the last number.
    """

    NEXT = auto()
    REPEATED = auto()
    LOWER = auto()
    LEAP = auto()


class SequenceOrder:
    """The numbers of the valid messages of one connection.

    A number that is more than `MAX_STEP` above the last one may be an error of the relay. If it counted, all later
    messages would be refused. So it counts only when the number of the next valid message is above it, too.

    Attributes:
        last: The last number that counts; 0 if there is none.
        leap: The number that waits for its confirmation; None if there is none.
    """

    def __init__(self, last: int) -> None:
        self.last = last
        self.leap: int | None = None

    def advance(self, seq: int) -> bool:
        """Return True if the number of a valid message is NEXT and no leap waits; else False, and change nothing.

        This is the fast path for the usual number. `classify` takes all others.
        """
        if self.leap is None and 0 < seq - self.last <= MAX_STEP:
            self.last = seq
            return True
        return False

    def classify(self, seq: int) -> Step:
        """Return the step from the numbers so far to the number of a valid message.

        After NEXT or LEAP, an earlier leap is confirmed if `last` is its number or above it.
        """
        if seq in (self.last, self.leap):
            return Step.REPEATED
        if self.leap is not None and seq > self.leap:
            self.last, self.leap = self.leap, None
        if seq < self.last:
            return Step.LOWER
        if seq - self.last > MAX_STEP:
            self.leap = seq
            return Step.LEAP
        self.last, self.leap = seq, None
        return Step.NEXT
