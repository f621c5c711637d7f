"""A host on loopback, and a client whose patience is short."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.outbound import Outbound, Patience
from indexer.pds import PdsClient
from tests.outbound.host import Host


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    async with Host() as serving:
        yield serving


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where exports are spooled; the client makes it."""
    return tmp_path / "data" / "spool"


@pytest.fixture
async def pds(directory: Path) -> AsyncIterator[PdsClient]:
    outbound = Outbound(user_agent="test", allow_private_hosts=True, patience=Patience(2.0, 0.3, 0.1))
    yield PdsClient(outbound, DEFAULT_LIMITS, directory)
    await outbound.close()
