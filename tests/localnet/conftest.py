from collections.abc import AsyncIterator

import pytest

from indexer.localnet.local_network import LocalNetwork


@pytest.fixture
async def net() -> AsyncIterator[LocalNetwork]:
    async with LocalNetwork() as network:
        yield network
