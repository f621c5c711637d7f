"""A local network whose repos are synchronized with a database, and audits that compare the two."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg

from indexer.app.settings import Settings
from indexer.cli.audit import RepoAudit, audit
from indexer.db import Database
from indexer.demo.local_repo import Write
from tests.daemon_harness import run_daemon, settings_for
from tests.database_checks import fetch
from tests.faulty_network import FaultyAccount, FaultyNetwork
from tests.waiting import until

POST = "app.bsky.feed.post"
LIKE = "app.bsky.feed.like"
UNKNOWN_DID = "did:plc:" + "a" * 24
OF_POST = f"where did = $1 and collection = '{POST}' and rkey"


@dataclass
class AuditWorld:
    network: FaultyNetwork
    db: Database
    dsn: str
    directory: Path

    def settings(self, **changes: Any) -> Settings:
        return settings_for(self.network.relay_url, self.network.plc_url, self.directory, **changes)

    def create_account(self, name: str, posts: int = 5) -> FaultyAccount:
        account = self.network.create_account(f"{name}.test")
        account.apply_writes([Write.create(f"{POST}/{n:03}", {"$type": POST, "text": f"{n}"}) for n in range(posts)])
        return account

    async def synchronize(self, **changes: Any) -> None:
        """Synchronize all repos by resyncs; no event is consumed from the relay."""
        await self.db.repos.add(self.network.accounts)
        async with run_daemon(self.settings(roles="resync", resync_source="pds", **changes), self.dsn):

            async def all_synchronized() -> bool:
                [[count]] = await self.sql("select count(*) from indexer.repo where sync_status = 'synchronized'")
                return bool(count == len(self.network.accounts))

            await until(all_synchronized)

    async def sql(self, statement: str, *values: Any) -> list[asyncpg.Record]:
        return await fetch(self.dsn, statement, *values)

    async def delete_post(self, account: FaultyAccount, rkey: str) -> None:
        """Delete the row of a post from the database."""
        assert await self.sql(f"delete from indexer.record {OF_POST} = $2 returning 1", account.did, rkey)  # noqa: S608

    async def all_rows(self) -> dict[str, list[str]]:
        """Return every row of every table."""
        tables = await self.sql("select tablename from pg_tables where schemaname = 'indexer'")
        return {
            name: sorted(row for (row,) in await self.sql(f"select t::text from indexer.{name} t"))  # noqa: S608
            for (name,) in tables
        }

    async def audit(self, *accounts: FaultyAccount | str, **changes: Any) -> dict[str, RepoAudit]:
        """Audit the accounts and return the results by DID."""
        dids = [account if isinstance(account, str) else account.did for account in accounts]
        results: list[RepoAudit] = []
        await audit(self.settings(**changes), self.db, dids, results.append)
        return {result.did: result for result in results}

    async def differences(self, account: FaultyAccount, **changes: Any) -> list[str]:
        """Return the differences of one repo, one line each. The repo must not be skipped."""
        result = (await self.audit(account, **changes))[account.did]
        assert result.reason_skipped is None
        assert len(result.listed) == result.differences
        prefix = f"at://{account.did}/"
        return [f"{one['subject'].removeprefix(prefix)} {one['description']}" for one in result.listed]

    async def reason_skipped(self, account: FaultyAccount | str, **changes: Any) -> str:
        """Return the reason why one repo was skipped."""
        [result] = (await self.audit(account, **changes)).values()
        assert result.reason_skipped is not None
        return result.reason_skipped

    def environment(self) -> dict[str, str]:
        return {
            "INDEXER_DATABASE_URL": self.dsn,
            "INDEXER_DATA_DIR": str(self.directory),
            "INDEXER_PLC_URL": self.network.plc_url,
            "INDEXER_RELAYS": self.network.relay_url,
            "INDEXER_ALLOW_PRIVATE_HOSTS": "true",
        }


@asynccontextmanager
async def audit_world(dsn: str, directory: Path, hosts: int = 2) -> AsyncIterator[AuditWorld]:
    """Run a network without accounts, with an empty database."""
    db = await Database.open(dsn, connections=5)
    try:
        async with FaultyNetwork(pds=hosts) as network:
            yield AuditWorld(network, db, dsn, directory)
    finally:
        await db.close()
