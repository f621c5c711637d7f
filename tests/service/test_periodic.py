"""The shared loop of background tasks, and the handling of database errors."""

import asyncio
from time import monotonic

import pytest
from structlog.testing import capture_logs

from indexer.errors import UnavailableError
from indexer.reasons import FetchFailure
from indexer.service.periodic import DatabaseAttempt, run_periodically
from indexer.store import DatabaseError


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
        await run_periodically(work, 0.0)
    assert work.calls == 3


async def test_database_error_is_logged_and_work_repeated() -> None:
    work = ScriptedWork(DatabaseError(FetchFailure.TIMEOUT, "busy"), None, EndOfTestError())
    with capture_logs() as lines, pytest.raises(EndOfTestError):
        await asyncio.create_task(run_periodically(work, 0.0), name="erasure")
    assert work.calls == 3
    assert lines == [
        {"event": "database.unavailable", "log_level": "warning", "task": "erasure", "error": "timeout: busy"}
    ]


async def test_loop_pauses_between_calls() -> None:
    began = monotonic()
    with pytest.raises(EndOfTestError):
        await run_periodically(ScriptedWork(None, EndOfTestError()), 0.05)
    assert monotonic() - began >= 0.05


async def test_loop_pauses_before_the_first_call_if_asked_to() -> None:
    began = monotonic()
    with pytest.raises(EndOfTestError):
        await run_periodically(ScriptedWork(EndOfTestError()), 0.05, wait_first=True)
    assert monotonic() - began >= 0.05


async def test_attempt_reports_a_database_error() -> None:
    with capture_logs() as lines, DatabaseAttempt() as attempt:
        raise DatabaseError(FetchFailure.UNREACHABLE, "refused")
    assert attempt.error == "unreachable: refused"
    assert [line["event"] for line in lines] == ["database.unavailable"]


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
