"""In this folder, the database of each test is on a Citus cluster, whatever `--database` says."""

import pytest

from tests.citus_server import CitusServer


@pytest.fixture(scope="session")
def postgres(citus: CitusServer) -> CitusServer:
    return citus
