"""A network, the real daemon on it and its database, and what tests ask of the three."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg

from indexer.atproto.crypto import PrivateKey
from indexer.demo import Comparison, compare
from indexer.localnet.account import Account
from indexer.localnet.network import LocalNetwork, Truth
from indexer.localnet.pds import GET_REPO
from indexer.localnet.relay import message_frame
from indexer.localnet.repo import Change
from indexer.run import Daemon
from tests.serving import saved, serving, settings_for, until

POST = "app.bsky.feed.post"
LIKE = "app.bsky.feed.like"
_REPO = """
    select *, (extract(epoch from next_attempt_at) - extract(epoch from now()))::float8 as wait
    from indexer.repo where did = $1
"""

FORGER = PrivateKey.from_seed("k256", b"a key that no account has")


class ChosenNetwork(LocalNetwork):
    """A network of which an indexer is to hold a part: the records that `chosen` (DID, collection) names."""

    def __init__(self, dids: Iterable[str] | None = None, collections: Iterable[str] | None = None) -> None:
        super().__init__()
        self.dids = None if dids is None else set(dids)
        self.collections = None if collections is None else set(collections)

    def truth(self) -> Truth:
        return {
            did: {
                path: cid
                for path, cid in records.items()
                if self.collections is None or path.partition("/")[0] in self.collections
            }
            for did, records in super().truth().items()
            if self.dids is None or did in self.dids
        }


@dataclass
class Stage:
    network: LocalNetwork
    running: Daemon
    dsn: str

    async def read(self) -> None:
        """Waits until all that the relay sent is in the database; the last of it must be a numbered message."""
        await saved(self.running, self.network.relay_url, self.network.relay.log[-1].seq)

    async def equal(self) -> Comparison:
        """Waits until everything is read and the database equals the network."""
        await self.read()
        comparison = Comparison(0, 0, ["not compared"])

        async def same() -> bool:
            nonlocal comparison
            comparison = await compare(self.network, self.running.store)
            return not comparison.differences

        await until(same, lambda: comparison.differences[:5])
        return comparison

    async def healed(self, account: Account) -> None:
        """Makes the account's repo due, which takes a minute or more by itself, until it is equal."""

        async def synchronized() -> bool:
            await self.execute("update indexer.repo set next_attempt_at = null where did = $1", account.did)
            return bool((await self.repo(account))["status"] == "synchronized")

        await until(synchronized)
        await self.equal()

    async def nothing_lost(self, account: Account) -> None:
        """Once all is read, the account's last commit is there, or its repo knows that something is missing."""
        await self.read()
        repo = await self.repo(account)
        assert repo["rev"] == account.rev or repo["status"] != "synchronized", await self.rejected()
        await self.healed(account)

    async def execute(self, statement: str, *values: Any) -> list[asyncpg.Record]:
        connection = await asyncpg.connect(self.dsn)
        try:
            rows: list[asyncpg.Record] = await connection.fetch(statement, *values)
            return rows
        finally:
            await connection.close()

    async def repo(self, account: Account) -> asyncpg.Record:
        """The account's row; `wait` is seconds from now to its next attempt, infinite if it is parked."""
        [row] = await self.execute(_REPO, account.did)
        return row

    async def stored(self, account: Account) -> list[asyncpg.Record]:
        """The account's rows as they stand, whether shown or not."""
        return await self.execute("select * from indexer.record where did = $1 order by collection, rkey", account.did)

    async def rejected(self) -> list[tuple[str | None, str]]:
        """DID and reason of each dead letter, in their order."""
        return [
            (did, reason) for did, reason in await self.execute("select did, reason from atproto.rejected order by id")
        ]

    def metric(self, name: str, **labels: str) -> float:
        value = self.running.metrics.registry.get_sample_value(f"indexer_{name}_total", labels)
        assert value is not None, (name, labels)
        return value

    def total(self, name: str) -> float:
        """The counter over all its labels."""
        return sum(
            sample.value
            for family in self.running.metrics.registry.collect()
            for sample in family.samples
            if sample.name == f"indexer_{name}_total"
        )

    async def counted(self, more_than: float, name: str, **labels: str) -> None:
        await until(lambda: self.metric(name, **labels) > more_than, lambda: (name, labels, self.running.status()))

    @property
    def exports(self) -> int:
        """How often an export was asked for at the hosts."""
        return sum(pds.requests[GET_REPO] for pds in self.network.pdses)

    def account(self, handle: str, records: int = 5) -> Account:
        """A new account with so many posts."""
        account = self.network.create_account(handle)
        for number in range(records):
            account.create(POST, post(number), rkey=f"{number:03}")  # the same tree every time
        return account

    def lose_commit(self, account: Account) -> None:
        """A commit that the relay drops, and one behind it."""
        dropped = self.network.relay.dropped[account.did]
        self.network.relay.drop(account.did)
        account.create(POST, post("lost"))
        assert self.network.relay.dropped[account.did] == dropped + 1
        account.create(POST, post("behind the lost one"))

    def inject(self, kind: str, payload: dict[str, Any]) -> None:
        """Sends a message of our own making, with the number that is its turn."""
        relay = self.network.relay
        relay.inject(message_frame(kind, payload | {"seq": relay.seq + 1}))


@asynccontextmanager
async def staged(
    dsn: str, directory: Path, network: LocalNetwork | None = None, **settings: Any
) -> AsyncIterator[Stage]:
    """A network, or the given one which is serving already, and the daemon at work on it."""
    if network is None:
        async with LocalNetwork() as new, staged(dsn, directory, new, **settings) as stage:
            yield stage
        return
    async with serving(settings_for(network.relay_url, network.plc_url, directory, **settings), dsn) as running:
        yield Stage(network, running, dsn)


def post(text: object) -> dict[str, Any]:
    return {"$type": POST, "text": str(text)}


def commit_payload(did: str, change: Change, time: str, **changes: Any) -> dict[str, Any]:
    """A `#commit` that says `change`, but for `changes`."""
    return {
        "repo": did,
        "commit": change.commit.cid,
        "rev": change.commit.rev,
        "since": change.since,
        "prevData": change.prev_data,
        "ops": change.ops,
        "blocks": change.blocks,
        "time": time,
        "blobs": [],
        "rebase": False,
        "tooBig": False,
    } | changes
