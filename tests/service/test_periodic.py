"""The shared loop of background tasks, and the handling of database errors."""

import asyncio
from time import monotonic

import pytest
from structlog.testing import capture_logs

from indexer.concurrency.stage_progress import Work
from indexer.errors import UnavailableError
from indexer.reasons import FetchFailure
from indexer.service.periodic import DatabaseAttempt, run_periodically
from indexer.store import DatabaseError
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


async def test_work_is_repeated_until_it_fails() -> None:
    work = ScriptedWork(None, None, EndOfTestError())
    with pytest.raises(EndOfTestError):
        await run_periodically(work, 0.0, Work())
    assert work.calls == 3


async def test_database_error_is_suppressed_and_work_repeated() -> None:
    work = ScriptedWork(DatabaseError(FetchFailure.TIMEOUT, "busy"), None, EndOfTestError())
    with capture_logs() as lines, pytest.raises(EndOfTestError):
        await asyncio.create_task(run_periodically(work, 0.0, Work()), name="erasure")
    assert work.calls == 3
    assert lines == [
        {"event": "database.operation-failed", "log_level": "debug", "task": "erasure", "error": "timeout: busy"}
    ]


async def test_loop_pauses_between_calls() -> None:
    began = monotonic()
    with pytest.raises(EndOfTestError):
        await run_periodically(ScriptedWork(None, EndOfTestError()), 0.05, Work())
    assert monotonic() - began >= 0.05


async def test_loop_pauses_before_the_first_call_if_asked_to() -> None:
    began = monotonic()
    with pytest.raises(EndOfTestError):
        await run_periodically(ScriptedWork(EndOfTestError()), 0.05, Work(), wait_first=True)
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


async def attempt_that_fails(work: Work, reason: FetchFailure) -> None:
    with DatabaseAttempt(work):
        raise DatabaseError(reason, "the database")


async def test_stage_whose_statement_timed_out_still_waits_for_the_database() -> None:
    work = Work()
    await attempt_that_fails(work, FetchFailure.TIMEOUT)
    began = work.waits_since
    assert began is not None
    await attempt_that_fails(work, FetchFailure.TIMEOUT)
    assert work.waits_since == began, "the second attempt continues the same wait"
    with DatabaseAttempt(work):
        assert work.waits_since == began
    assert work.waits_since is None


async def test_stage_that_got_an_error_from_the_database_does_not_wait_but_fails() -> None:
    work = Work()
    await attempt_that_fails(work, FetchFailure.UNREACHABLE)
    failing_since = work.failing_since
    assert (work.waits_since, work.last_error) == (None, "unreachable: the database")
    await attempt_that_fails(work, FetchFailure.UNREACHABLE)
    assert failing_since is not None
    assert work.failing_since == failing_since
    with DatabaseAttempt(work):
        pass
    assert [work.last_error, work.failing_since] == [None, None]


async def test_attempt_reports_a_database_error() -> None:
    with capture_logs() as lines, DatabaseAttempt() as attempt:
        raise DatabaseError(FetchFailure.UNREACHABLE, "refused")
    assert attempt.error == "unreachable: refused"
    assert [line["event"] for line in lines] == ["database.operation-failed"]


async def test_attempt_without_an_error_logs_nothing() -> None:
    with capture_logs() as lines, DatabaseAttempt() as attempt:
        pass
    assert (attempt.error, lines) == (None, [])


@pytest.mark.parametrize("error", [UnavailableError(FetchFailure.TIMEOUT), ValueError(), asyncio.CancelledError()])
async def test_attempt_passes_other_exceptions_on(error: BaseException) -> None:
    attempt = DatabaseAttempt()
    with capture_logs() as lines, pytest.raises(type(error)), attempt:
        raise error
    assert (attempt.error, lines) == (None, [])
