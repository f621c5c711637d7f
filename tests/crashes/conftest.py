"""The process whose forks are killed."""

import pytest

from tests.daemon_forks import start_fork_server


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    start_fork_server()
