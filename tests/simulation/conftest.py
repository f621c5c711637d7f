"""The process whose forks are killed in tests of worlds, and a time limit of conditions that suits a slow machine."""

import pytest

from tests.daemon_forks import start_fork_server


@pytest.fixture(scope="session")
def fork_server() -> None:
    start_fork_server()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several worlds run at the same time."""
    monkeypatch.setattr("tests.waiting.TIMEOUT", 120.0)
