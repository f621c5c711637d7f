"""The shared loop of background tasks, and the handling of database errors."""

import asyncio
from time import monotonic

import pytest
from structlog.testing import capture_logs

from indexer.concurrency.stage_progress import Work
from indexer.db import DatabaseError
from indexer.db.periodic import DatabaseAttempt, run_periodically
from indexer.errors import UnavailableError
from indexer.reasons import FetchFailure
from tests.waiting import until


class EndOfTestError(Exception):
    """Ends a loop that has no other end."""


class ScriptedWork:
    """Raises the given errors, one for each call; None stands for a call that succeeds."""

    def __init__(self, *errors: Exception | None) -> None:
        self._errors = list(errors)
        self.calls = 0

    async def __call__(self) -> None:
        self.calls += 1
        if (error := self._errors.pop(0)) is not None:
            raise error


async def test_work_is_repeated_until_it_fails_but_not_because_of_the_database() -> None:
    work = ScriptedWork(None, DatabaseError(FetchFailure.TIMEOUT, "busy"), None, EndOfTestError())
    with capture_logs() as lines, pytest.raises(EndOfTestError):
        await asyncio.create_task(run_periodically(work, 0.0, Work()), name="erasure")
    assert work.calls == 4
    assert lines == [
        {"event": "database.operation-failed", "log_level": "debug", "task": "erasure", "error": "timeout: busy"}
    ]


@pytest.mark.parametrize("wait_first", [False, True])
async def test_loop_pauses_between_calls_and_before_the_first_one_if_asked_to(*, wait_first: bool) -> None:
    began, work = monotonic(), ScriptedWork(*[None] * (not wait_first), EndOfTestError())
    with pytest.raises(EndOfTestError):
        await run_periodically(work, 0.05, Work(), wait_first=wait_first)
    assert monotonic() - began >= 0.05


async def test_each_call_is_work_of_the_stage_and_the_pause_is_not() -> None:
    stage, seen = Work(), list[float | None]()

    async def work() -> None:
        seen.append(stage.waits_since)

    running = asyncio.create_task(run_periodically(work, 60.0, stage))
    await until(lambda: bool(seen))
    await asyncio.sleep(0)
    assert (seen[0] is not None, stage.waits_since) == (True, None)
    running.cancel()
    await asyncio.wait([running])


@pytest.mark.parametrize("reason", [FetchFailure.TIMEOUT, FetchFailure.UNREACHABLE])
async def test_stage_waits_for_a_database_that_does_not_answer_and_fails_at_another_error(reason: FetchFailure) -> None:
    """A second attempt continues the same wait, or the same failure."""
    work, states = Work(), []
    for _ in range(2):
        with DatabaseAttempt(work) as attempt:
            raise DatabaseError(reason, "the database")
        assert attempt.error == f"{reason}: the database"
        states.append((work.waits_since, work.failing_since, work.last_error))
    assert states[0] == states[1]
    if reason is FetchFailure.TIMEOUT:
        assert states[0][0] is not None
    else:
        assert (states[0][0], states[0][1] is None, states[0][2]) == (None, False, "unreachable: the database")
    with capture_logs() as lines, DatabaseAttempt(work) as attempt:
        pass
    assert (attempt.error, lines) == (None, [])
    assert (work.waits_since, work.failing_since, work.last_error) == (None, None, None)


@pytest.mark.parametrize("error", [UnavailableError(FetchFailure.TIMEOUT), ValueError(), asyncio.CancelledError()])
async def test_attempt_passes_other_exceptions_on(error: BaseException) -> None:
    attempt = DatabaseAttempt()
    with capture_logs() as lines, pytest.raises(type(error)), attempt:
        raise error
    assert (attempt.error, lines) == (None, [])
