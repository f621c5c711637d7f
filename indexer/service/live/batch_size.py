"""The size of the next batch: halved when the database refuses a batch, until the message that causes it is alone."""

MAX_FAILURES = 5
"""Failures in a row, each followed by an answer of the database, after which an error counts as caused by the batch."""


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
        """Note a batch of `count` messages that failed although the database answers.

        Args:
            count: The number of messages.
            certain: True if the batch is the cause. False if the connection may be the cause: then the error must occur
                `MAX_FAILURES` times in a row for the whole batch, and again for the message that remains alone.

        Returns:
            True if the batch is a single message, and it is the cause.
        """
        self._failures += 1
        halving = self.current < self._max_size and count > 1
        if not certain and not halving and self._failures < MAX_FAILURES:
            return False
        self._failures = 0
        self.current = max(1, count // 2)
        return count == 1
