"""Compare the database with the records that PDSes list."""

import asyncio
import json
from collections.abc import Mapping

from tests.db.change_log_helpers import connected
from tests.realnet.real_network import RealAccount, Records
from tests.waiting import until


async def records_of(*accounts: RealAccount) -> dict[str, Records]:
    """Return the records of each account, by DID, as its PDS lists them."""
    return {account.did: await asyncio.to_thread(account.records) for account in accounts}


async def visible_repos(dsn: str) -> dict[str, tuple[str, Records]]:
    """Return sync status and records by DID, from the public views."""
    async with connected(dsn) as sql, sql.transaction(isolation="repeatable_read", readonly=True):
        repos = await sql.fetch("select did, sync_status from atproto.repos where visible")
        rows = await sql.fetch("select did, collection || '/' || rkey, cid, value from atproto.records")
    found: dict[str, tuple[str, Records]] = {row["did"]: (row["sync_status"], {}) for row in repos}
    for did, path, cid, value in rows:
        found[did][1][path] = cid, json.loads(value)
    return found


async def wait_until_equal(dsn: str, expected: Mapping[str, Records]) -> None:
    """Wait until exactly these repos are visible, are synchronized, and have these records."""
    different = ["the database was not read"]

    async def equal() -> bool:
        nonlocal different
        different = differences(await visible_repos(dsn), expected)
        return not different

    await until(equal, lambda: different)


def differences(found: Mapping[str, tuple[str, Records]], expected: Mapping[str, Records]) -> list[str]:
    """Describe repos that are not visible, not synchronized, have other records, or are visible without a reason."""
    different = [f"{did} is visible" for did in found.keys() - expected.keys()]
    for did, records in expected.items():
        status, stored = found.get(did, ("not visible", {}))
        paths = [path for path in stored.keys() | records.keys() if stored.get(path) != records.get(path)]
        if status != "synchronized" or paths:
            different.append(f"{did} is {status}; {len(paths)} of {len(records)} records differ: {sorted(paths)[:5]}")
    return different
