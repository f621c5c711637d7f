"""Classify the sequence numbers of a connection: which one is next, and which one needs a confirmation."""

from enum import Enum, auto

MAX_LEAP = 10_000_000
"""Numbers that a relay may leave out between two messages. The largest relays use this many in some hours."""


class Step(Enum):
    """The relation of a message's number to the numbers before it."""

    NEXT = auto()
    REPEATED = auto()
    LOWER = auto()
    LEAP = auto()


class SequenceOrder:
    """The numbers of the valid messages of one connection.

    A number that is more than `MAX_LEAP` above the last one may be an error of the relay. If it counted, all later
    messages would be refused. So it counts only when the number of the next valid message is above it, too.

    Attributes:
        last: The last number that counts; 0 if there is none.
        leap: The number that waits for its confirmation; None if there is none.
    """

    def __init__(self, last: int) -> None:
        self.last = last
        self.leap: int | None = None

    def advance(self, seq: int) -> bool:
        """Return True if a valid message has the next number, with no leap before it; else False, and nothing changes.

        It is the usual case of `place`, which classifies the other numbers.
        """
        if self.leap is None and 0 < seq - self.last <= MAX_LEAP:
            self.last = seq
            return True
        return False

    def place(self, seq: int) -> Step:
        """Return the step to the number of a valid message.

        A leap is confirmed if the step is NEXT or LEAP and `last` is the number of the earlier leap, or above it.
        """
        if seq in (self.last, self.leap):
            return Step.REPEATED
        if self.leap is not None and seq > self.leap:
            self.last, self.leap = self.leap, None
        if seq < self.last:
            return Step.LOWER
        if seq - self.last > MAX_LEAP:
            self.leap = seq
            return Step.LEAP
        self.last, self.leap = seq, None
        return Step.NEXT
