import pytest

from indexer.store import DatabaseCheck
from tests.database_proxy import DatabaseProxy


async def test_check_reports_an_outage_and_the_end_of_it(database: str) -> None:
    proxy = DatabaseProxy(database)
    async with proxy.serve():
        check = DatabaseCheck(proxy.dsn)
        assert await check.run() is None
        proxy.refuse()
        assert "unreachable" in (await check.run() or "")
        assert "unreachable" in (await check.run() or "")
        proxy.open()
        assert await check.run() is None
        check.close()


@pytest.mark.slow
async def test_check_does_not_wait_for_a_database_that_hangs(database: str) -> None:
    """On the open connection, and while it connects."""
    proxy = DatabaseProxy(database)
    async with proxy.serve():
        check = DatabaseCheck(proxy.dsn)
        assert await check.run() is None
        proxy.hang()
        for _ in range(2):
            assert "no answer" in (await check.run() or "")
        proxy.open()
        assert await check.run() is None
        check.close()
