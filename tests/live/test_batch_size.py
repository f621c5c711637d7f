"""A message that the database refuses ends up alone in a batch, whatever its position."""

import pytest

from indexer.live.batch_writer import MAX_FAILURES, BatchSize

MAX_SIZE = 64


def isolate(queue: list[str]) -> tuple[list[str], list[str], int]:
    """Write a queue of messages; return the stored messages, the rejected ones, and the number of failed batches."""
    size, stored, rejected, failures = BatchSize(MAX_SIZE), list[str](), list[str](), 0
    while queue:
        batch = queue[: size.current]
        if "poison" not in batch:
            stored += batch
        else:
            failures += 1
            if not size.add_failure(len(batch)):
                continue
            rejected += batch
        size.add_success()
        queue = queue[len(batch) :]
    assert size.current <= MAX_SIZE
    return stored, rejected, failures


@pytest.mark.parametrize("position", [0, 1, 31, 62, 63, 64, 200])
def test_only_the_message_that_causes_the_failure_is_rejected(position: int) -> None:
    queue = [str(number) for number in range(300)]
    stored, rejected, failures = isolate([*queue[:position], "poison", *queue[position:]])
    assert (stored, rejected) == (queue, ["poison"])
    assert failures < 2 * MAX_FAILURES + MAX_SIZE.bit_length() ** 2


def test_size_recovers_after_batches_that_were_written() -> None:
    size = BatchSize(MAX_SIZE)
    while size.current > 1:
        assert not size.add_failure(size.current)
    for _ in range(6):
        size.add_success()
    assert size.current == MAX_SIZE


def test_message_is_rejected_when_it_has_failed_alone_several_times_in_a_row() -> None:
    size = BatchSize(MAX_SIZE)
    for count in (2, *[1] * (MAX_FAILURES - 1), 2, *[1] * (MAX_FAILURES - 1)):
        assert not size.add_failure(count)
    assert size.add_failure(1)


def test_message_counts_as_the_cause_until_it_is_rejected() -> None:
    size = BatchSize(MAX_SIZE)
    assert [size.add_failure(1) for _ in range(MAX_FAILURES + 2)] == [False] * (MAX_FAILURES - 1) + [True] * 3
