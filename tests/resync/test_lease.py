import asyncio
from typing import Any

import pytest

from indexer.db import DatabaseError
from indexer.reasons import FetchFailure
from indexer.resync.queue import ClaimLostError, run_under_lease
from indexer.sync.repo import Repo
from tests.waiting import until

CLAIMED = Repo("did:plc:a", version=2, lease=1)


class LeaseDatabase:
    """Answers renewals one by one; the last answer repeats."""

    def __init__(self, *answers: bool | DatabaseError) -> None:
        self.resyncs = self
        self.answers = list(answers)
        self.renewals = 0

    async def renew(self, _did: str, _lease: int, _seconds: float) -> bool:
        self.renewals += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, DatabaseError):
            raise answer
        return answer


async def under_lease(db: LeaseDatabase, attempt: Any) -> Any:
    any_db: Any = db
    return await run_under_lease(any_db, CLAIMED, 0.003, attempt)


async def test_result_of_the_attempt_is_returned_while_the_lease_is_renewed() -> None:
    db = LeaseDatabase(True)

    async def attempt() -> str:
        await until(lambda: db.renewals >= 3)
        return "synchronized"

    assert await under_lease(db, attempt()) == "synchronized"


async def test_attempt_is_cancelled_when_the_claim_is_lost() -> None:
    cancelled = asyncio.Event()

    async def attempt() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(ClaimLostError):
        await under_lease(LeaseDatabase(True, False), attempt())
    assert cancelled.is_set()


async def test_database_error_does_not_end_the_heartbeat() -> None:
    db = LeaseDatabase(DatabaseError(FetchFailure.UNREACHABLE), True)

    async def attempt() -> str:
        await until(lambda: db.renewals >= 2)
        return "synchronized"

    assert await under_lease(db, attempt()) == "synchronized"


async def test_cancellation_ends_both_tasks() -> None:
    before = asyncio.all_tasks()
    db = LeaseDatabase(True)
    task = asyncio.create_task(under_lease(db, asyncio.Event().wait()))
    await until(lambda: db.renewals > 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == before
