"""Check by running it that tap does what docs/performance.md says about it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks import tap
from benchmarks.tap import Fetch, TapProcess, open_database, run_tap
from indexer.atproto.cid import cid_of, cid_text
from indexer.localnet.local_account import LocalAccount
from indexer.localnet.local_network import LocalNetwork
from indexer.localnet.local_pds import LocalPds
from indexer.localnet.local_repo import LocalRepo, Write
from tests.waiting import until

pytestmark = pytest.mark.slow

POST = "app.bsky.feed.post"


class RunningTap:
    """tap with SQLite on a local network, and questions about its tables."""

    def __init__(self, network: LocalNetwork, process: TapProcess, fetch: Fetch) -> None:
        self.network, self.process, self.fetch = network, process, fetch

    async def repo(self) -> tuple[Any, ...]:
        """Return state and rev of the only repo."""
        [row] = await self.fetch("select state, rev from repos")
        return row

    async def stored(self) -> dict[str, str]:
        """Return the CIDs of all stored records by path."""
        return dict(await self.fetch("select collection || '/' || rkey, cid from repo_records"))

    async def wait_for_cursor(self) -> None:
        """Wait until tap has handled all messages of the relay. It saves its cursor once a second."""

        async def handled() -> bool:
            return await self.fetch("select cursor from firehose_cursors") == [(self.network.relay.seq,)]

        await until(handled, lambda: self.process.log.read_text()[-1_000:])

    async def wait_for_head(self, account: LocalAccount) -> None:
        """Wait until the repo is active at the account's latest rev."""

        async def reached() -> bool:
            return await self.repo() == ("active", account.rev)

        await until(reached, lambda: self.process.log.read_text()[-1_000:])

    async def events(self, count: int) -> list[dict[str, Any]]:
        """Return the record events, as soon as there are this many."""
        await self.process.wait_for_events(count)
        events = [orjson.loads(line) for line in self.process.events.read_bytes().splitlines()]
        return [event["record"] for event in events if event["type"] == "record"]


@asynccontextmanager
async def running(tmp_path: Path, records: int) -> AsyncIterator[tuple[RunningTap, LocalAccount]]:
    """Run tap until it has synchronized one account with the records `0`, `1` and so on."""
    program = tap.find_tap(tmp_path)
    if program is None:
        pytest.skip(f"no program in {tap.SHARED}")
    url = f"sqlite://{tmp_path / 'tap.db'}"
    async with LocalNetwork(pds=1) as network:
        account = network.create_account("ada.test")
        identity = network.plc.identities[account.did]
        assert identity is not None
        network.plc.identities[account.did] = replace(identity, handle="")  # tap would ask the system's name servers
        for number in range(records):
            account.create(POST, post(number), rkey=str(number))
        settings = {"relay_url": network.relay.url, "plc_url": network.plc_url}
        async with run_tap(program, tmp_path, url, **settings) as process, open_database(url) as fetch:
            subject = RunningTap(network, process, fetch)
            await until(lambda: network.relay.subscribers == 1)
            await process.add_repos([account.did])
            await subject.wait_for_head(account)
            yield subject, account
            await process.stop()


def post(text: object) -> dict[str, str]:
    return {"$type": POST, "text": str(text), "createdAt": "2025-01-01T00:00:00.000Z"}


def paths(*rkeys: str) -> set[str]:
    return {f"{POST}/{rkey}" for rkey in rkeys}


def expected(account: LocalAccount) -> dict[str, str]:
    return {path: cid_text(cid_of(block)) for path, block in account.records.items()}


async def test_tap_stores_cids_and_sends_values(tmp_path: Path) -> None:
    async with running(tmp_path, records=2) as (subject, account):
        account.create(POST, post("live"), rkey="live")
        account.delete(f"{POST}/0")
        await subject.wait_for_head(account)
        assert await subject.stored() == expected(account)
        columns = await subject.fetch("select name from pragma_table_info('repo_records')")
        assert [name for (name,) in columns] == ["did", "collection", "rkey", "cid"]
        sent = [(event["live"], event["action"], event["rkey"]) for event in await subject.events(4)]
        assert sorted(sent[:2]) == [(False, "create", "0"), (False, "create", "1")]
        assert sent[2:] == [(True, "create", "live"), (True, "delete", "0")]
        assert (await subject.events(4))[2]["record"] == post("live")


async def test_tap_drops_a_commit_with_a_wrong_signature_and_stays_active(tmp_path: Path) -> None:
    async with running(tmp_path, records=1) as (subject, account):
        before = await subject.repo()
        account.swap_key()
        account.create(POST, post("forged"), rkey="forged")
        await subject.wait_for_cursor()
        assert await subject.repo() == before == ("active", before[1])
        assert before[1] < account.rev
        assert (await subject.stored()).keys() == paths("0")


async def test_tap_drops_a_commit_whose_operations_do_not_invert_and_stays_active(tmp_path: Path) -> None:
    async with running(tmp_path, records=1) as (subject, account):
        before = await subject.repo()
        shortened = []

        def leave_out_operations(pds: LocalPds, did: str, kind: str, payload: dict[str, Any]) -> None:
            shortened.append(payload["ops"][1:])
            subject.network.relay.receive(pds, did, kind, payload | {"ops": payload["ops"][:1]})

        account.pds.listeners[:] = [leave_out_operations]
        account.apply_writes([Write.create(f"{POST}/{rkey}", post(rkey)) for rkey in ("one", "two")])
        assert len(shortened[0]) == 1
        await subject.wait_for_cursor()
        assert await subject.repo() == before == ("active", before[1])
        assert (await subject.stored()).keys() == paths("0")


async def test_resync_by_tap_keeps_records_that_no_longer_exist(tmp_path: Path) -> None:
    async with running(tmp_path, records=2) as (subject, account):
        subject.network.relay.drop(account.did)
        account.delete(f"{POST}/0")
        account.create(POST, post("next"), rkey="next")
        await subject.wait_for_head(account)
        assert account.records.keys() == paths("1", "next")
        assert (await subject.stored()).keys() == paths("0", "1", "next")
        assert "delete" not in {event["action"] for event in await subject.events(3)}


async def test_tap_accepts_an_export_that_ends_after_some_of_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = LocalRepo.export
    monkeypatch.setattr(LocalRepo, "export", lambda repo: list(export(repo))[:-1])
    async with running(tmp_path, records=20) as (subject, account):
        assert await subject.repo() == ("active", account.rev)
        assert (await subject.stored()).keys() < account.records.keys()
