"""The database monitor tells an outage from single operations that fail."""

from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from indexer.app.monitor import DatabaseMonitor
from indexer.telemetry.conditions import Conditions
from indexer.telemetry.metrics import Metrics


class ScriptedCheck:
    error: str | None = None

    async def run(self) -> str | None:
        return self.error

    def close(self) -> None:
        pass


class Monitored:
    def __init__(self) -> None:
        self.check = ScriptedCheck()
        self.db = SimpleNamespace(failed_operations=0, last_error=None)
        db: Any = self.db
        check: Any = self.check
        self.conditions, self.metrics = Conditions(), Metrics()
        self.monitor = DatabaseMonitor(db, check, self.conditions, self.metrics)

    def fail(self, operations: int) -> None:
        self.db.failed_operations += operations
        self.db.last_error = "timeout: the statement took too long"

    @property
    def names(self) -> list[tuple[str, int]]:
        return [(condition.kind.name, condition.count) for condition in self.conditions.active()]

    def is_down(self) -> bool:
        return self.monitor.answering_since is None

    def up(self) -> float | None:
        return self.metrics.registry.get_sample_value("indexer_database_up")


@pytest.fixture
def monitored() -> Monitored:
    return Monitored()


async def test_outage_counts_all_operations_that_failed_and_is_over_when_the_database_answers(
    monitored: Monitored,
) -> None:
    with capture_logs() as lines:
        monitored.check.error = "unreachable: refused"
        for _ in range(3):
            monitored.fail(17)
            await monitored.monitor.check()
        assert (monitored.names, monitored.up()) == ([("database-unavailable", 51)], 0)
        assert monitored.is_down()
        monitored.check.error = None
        monitored.fail(1)
        await monitored.monitor.check()
    assert (monitored.names, monitored.up()) == ([], 1)
    assert not monitored.is_down()
    assert [line["event"] for line in lines] == ["condition.began", "condition.ended"]
    assert "unreachable: refused" in lines[0]["message"]


async def test_operations_that_fail_while_the_database_answers_are_another_condition(monitored: Monitored) -> None:
    monitored.fail(2)
    await monitored.monitor.check()
    await monitored.monitor.check()
    assert (monitored.names, monitored.up()) == ([("database-errors", 2)], 1)
    assert "timeout: the statement took too long" in monitored.conditions.active()[0].message
