"""The size of the next batch: halved when the database refuses a batch, until the message that causes it is alone."""

MAX_FAILURES = 5
"""Failures in a row, each followed by a write that succeeds, after which an error counts as caused by the batch."""
MAX_REFUSALS = 2
"""The same for a single message that the database refuses."""


class BatchSize:
    """The maximum number of messages in the next batch.

    A refused batch is halved. Each batch that is written doubles the size again. A message that is refused alone is the
    cause.

    Attributes:
        current: The maximum number of messages.
    """

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._failures = 0
        self.current = max_size

    def add_success(self) -> None:
        """Note a batch that was written."""
        self._failures = 0
        self.current = min(self._max_size, 2 * self.current)

    def add_failure(self, count: int, *, certain: bool) -> bool:
        """Note a batch of `count` messages that failed although the database stores an empty one.

        Args:
            count: The number of messages.
            certain: True if the database has refused the batch. False if the connection may be the cause: then the
                error must occur `MAX_FAILURES` times in a row for the whole batch, and again for the message that
                remains alone.

        Returns:
            True if the batch is a single message, and it is the cause.
        """
        self._failures += 1
        halving = count > 1 and (certain or self.current < self._max_size)
        if not halving and self._failures < (MAX_REFUSALS if certain else MAX_FAILURES):
            return False
        self._failures = 0
        self.current = max(1, count // 2)
        return count == 1
