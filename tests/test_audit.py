"""Repos that were really resynced, then changed behind the daemon's back, or hosts that don't answer as they should."""

import asyncio
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import asyncpg
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from indexer import audit as audit_module
from indexer.atproto.car import split_car
from indexer.atproto.cid import cid_of, cid_text
from indexer.atproto.crypto import PrivateKey
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.syntax import CollectionFilter, tid_of
from indexer.audit import Comparison, Pace, Tally, Verdict, auditing, same_json
from indexer.config import Settings
from indexer.errors import UnavailableError
from indexer.localnet.account import Account
from indexer.localnet.network import LocalNetwork
from indexer.localnet.pds import GET_REPO
from indexer.localnet.repo import Repo, Write
from indexer.localnet.server import Fault
from indexer.pds import PdsClient, Spool
from indexer.reasons import FetchFailure
from indexer.store import DatabaseError, Store, StoredRecord
from indexer.store import records as records_module
from indexer.sync.planning import Policy, record_change
from indexer.sync.verify import Snapshot, VerifiedChange, verify_snapshot
from tests.serving import serving, settings_for, until
from tests.store.test_values import COLLECTION as ODD_COLLECTION
from tests.store.test_values import ODD
from tests.test_cli import ROOT, complaint, indexer

POST = "app.bsky.feed.post"
LIKE = "app.bsky.feed.like"
AT_ONCE = Pace(patience=0.0)
NOBODY = "did:plc:" + "a" * 24
SYNCHRONIZED = "select count(*) from indexer.repo where status = 'synchronized'"


@dataclass
class World:
    network: LocalNetwork
    store: Store
    dsn: str
    directory: Path

    def settings(self, **changes: Any) -> Settings:
        return settings_for(self.network.relay_url, self.network.plc_url, self.directory, **changes)

    def account(self, name: str, posts: int = 5) -> Account:
        account = self.network.create_account(f"{name}.test")
        account.apply_writes([Write.create(f"{POST}/{n:03}", {"$type": POST, "text": f"{n}"}) for n in range(posts)])
        return account

    async def fill(self, **changes: Any) -> None:
        """By resyncs alone: nothing is read from the relay."""
        await self.store.add(self.network.accounts)
        async with serving(self.settings(roles="resync", resync_source="pds", **changes), self.dsn):

            async def filled() -> bool:
                [[count]] = await self.sql(SYNCHRONIZED)
                return bool(count == len(self.network.accounts))

            await until(filled)

    async def sql(self, statement: str, *values: Any) -> list[asyncpg.Record]:
        connection = await asyncpg.connect(self.dsn)
        try:
            rows: list[asyncpg.Record] = await connection.fetch(statement, *values)
            return rows
        finally:
            await connection.close()

    async def delete(self, account: Account, rkey: str) -> None:
        """A post, behind the daemon's back."""
        assert await self.sql(f"delete from indexer.record {HERE} = $2 returning 1", account.did, rkey)  # noqa: S608

    async def contents(self) -> dict[str, list[str]]:
        """Every row of every table."""
        tables = await self.sql("select tablename from pg_tables where schemaname = 'indexer'")
        return {
            name: sorted(row for (row,) in await self.sql(f"select t::text from indexer.{name} t"))  # noqa: S608
            for (name,) in tables
        }

    async def audit(self, *accounts: Account | str, pace: Pace = AT_ONCE, **changes: Any) -> dict[str, Verdict]:
        dids = [account if isinstance(account, str) else account.did for account in accounts]
        async with (
            auditing(self.settings(**changes), self.store, pace) as audit,
            aclosing(audit.verdicts(dids)) as verdicts,
        ):
            return {verdict.did: verdict async for verdict in verdicts}

    async def lines(self, account: Account, **changes: Any) -> list[str]:
        """What differs in the one repo, which could be compared."""
        verdict = (await self.audit(account, **changes))[account.did]
        assert verdict.hindrance is None
        assert len(verdict.shown) == verdict.differences
        prefix = f"at://{account.did}/"
        return [f"{place.removeprefix(prefix)} {what}" for place, what in verdict.shown]

    async def hindrance(self, account: Account | str, **changes: Any) -> str:
        [verdict] = (await self.audit(account, **changes)).values()
        assert verdict.hindrance is not None
        return verdict.hindrance

    async def command(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return await asyncio.to_thread(indexer, "audit", *arguments, **self.environment() | environment)

    def environment(self) -> dict[str, str]:
        return {
            "INDEXER_DATABASE_URL": self.dsn,
            "INDEXER_DATA_DIR": str(self.directory),
            "INDEXER_PLC_URL": self.network.plc_url,
            "INDEXER_ALLOW_PRIVATE_HOSTS": "true",
        }


@asynccontextmanager
async def new_world(dsn: str, directory: Path, hosts: int = 2) -> AsyncIterator[World]:
    store = await Store.open(dsn, connections=5)
    try:
        async with LocalNetwork(pds=hosts) as network:
            yield World(network, store, dsn, directory)
    finally:
        await store.close()


@pytest.fixture
async def world(database: str, tmp_path: Path) -> AsyncIterator[World]:
    async with new_world(database, tmp_path) as world:
        yield world


@pytest.fixture
async def ada(world: World) -> Account:
    """An account as synchronized as its repo is odd."""
    ada = world.account("ada")
    ada.create(POST, {"$type": POST, "on": True, "n": 1, "big": -(2**63), "text": "é 雨"}, rkey="odd")
    ada.create(f"{POST}.more", {"$type": f"{POST}.more", "longer": 1, "b": []}, rkey="1")
    ada.create("app.bsky.feed-x.post", {"$type": "app.bsky.feed-x.post"}, rkey="1")
    ada.apply_writes(
        [
            Write.create(f"{ODD_COLLECTION}/{number}", block)
            for number, (what, (block, *_)) in enumerate(ODD.items())
            if what not in {"nothing", "bottomless"}  # no host sends the one, and the other takes a second each time
        ]
    )
    ada.create("nowhere", {"$type": "nowhere"}, rkey="a path that names no record")
    await world.fill()
    return ada


async def test_what_a_resync_wrote_is_equal(world: World, ada: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "AT_ONCE", 4)
    verdict = (await world.audit(ada))[ada.did]
    [[problems]] = await world.sql("select count(distinct value_problem) from indexer.record")
    assert problems >= 9, "so much is odd"
    assert verdict == Verdict(ada.did, records=len(ada.records) - 1)


HERE = "where did = $1 and collection = 'app.bsky.feed.post' and rkey"
RECORD, VALUE, ODD_VALUE = f"{POST}/001", f"{POST}/001 other value", f"{POST}/odd other value"
TAMPERING: dict[str, tuple[str, str, list[str]]] = {
    "a row deleted": ("delete from indexer.record", "= '001'", [f"{RECORD} missing here"]),
    "rows deleted": ("delete from indexer.record", "< 'n'", [f"{POST}/{n:03} missing here" for n in range(5)]),
    "an extra row": (
        "insert into indexer.record (did, collection, rkey, bucket, cid, rev) "  # noqa: ISC004 - one statement
        "select did, collection, 'zzz', bucket, cid, rev from indexer.record",
        "= '001'",
        [f"{POST}/zzz not in the repo"],
    ),
    "a row that names no record": (
        "update indexer.record set rkey = E'\\x1b[2J'",
        "= '001'",
        [f"{POST}/\x1b\\[2J not in the repo", f"{RECORD} missing here"],
    ),
    "a row that no path is made of": (
        "update indexer.record set collection = collection || '/a', rkey = '1'",
        "= '001'",
        ["did:.+ stored paths out of order: .+"],
    ),
    "another CID": (
        "update indexer.record set cid = decode('01711220', 'hex') || sha256('')",
        "= '001'",
        [f"{RECORD} other CID: ours {cid_text(cid_of(b''))}, the host's b.+"],
    ),
    "the CID of another record": (
        "update indexer.record set cid = (select cid from indexer.record where rkey = '000')",
        "= '001'",
        [f"{RECORD} other CID: ours b.+, the host's b.+"],
    ),
    "half a CID": (
        "update indexer.record set cid = substr(cid, 1, 20)",
        "= '001'",
        [f"{RECORD} other CID: ours b.+, the host's b.+"],
    ),
    "another value": ("""update indexer.record set value = '{"text": "one"}'""", "= '001'", [VALUE]),
    "a field more": ("""update indexer.record set value = value || '{"a": null}'""", "= '001'", [VALUE]),
    "no value": ("update indexer.record set value = null", "= '001'", [VALUE]),
    "a value that is null": ("update indexer.record set value = 'null'", "= '001'", [VALUE]),
    "missing": ("update indexer.record set value = null, value_problem = 'missing'", "= '001'", [VALUE]),
    "1 for true": ("update indexer.record set value = jsonb_set(value, '{on}', '1')", "= 'odd'", [ODD_VALUE]),
    "true for 1": ("update indexer.record set value = jsonb_set(value, '{n}', 'true')", "= 'odd'", [ODD_VALUE]),
    "1.0 for 1": ("update indexer.record set value = jsonb_set(value, '{n}', '1.0')", "= 'odd'", []),
    "one less": (
        "update indexer.record set value = jsonb_set(value, '{big}', '-9223372036854775807')",
        "= 'odd'",
        [ODD_VALUE],
    ),
    "bottomless": (
        "update indexer.record set value = (repeat('[', 2000) || repeat(']', 2000))::jsonb",
        "= 'odd'",
        [ODD_VALUE],
    ),
    "a problem": ("update indexer.record set value_problem = 'no-type'", "= '001'", [VALUE]),
    "an original": ("update indexer.record set original = ''", "= '001'", [VALUE]),
    "no original": (
        "update indexer.record set original = null",
        "is not null or value_problem = 'nul-character' and rkey = '4'",
        [f"{ODD_COLLECTION}/4 other value"],
    ),
}


@pytest.mark.slow
async def test_each_thing_changed_behind_the_daemons_back_is_told(
    world: World, ada: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records_module, "AT_ONCE", 3)
    await world.sql("create table kept as table indexer.record")
    for what, (statement, condition, expected) in TAMPERING.items():
        assert await world.sql(f"{statement} {HERE} {condition} returning rkey", ada.did), what
        lines = await world.lines(ada)
        assert len(lines) == len(expected), (what, lines)
        for line, pattern in zip(lines, expected, strict=True):
            assert re.fullmatch(pattern, line), (what, line)
        await world.sql("truncate indexer.record")
        await world.sql("insert into indexer.record table kept")
        assert await world.lines(ada) == [], what


async def test_another_head_is_told(world: World) -> None:
    ada = world.account("ada")
    await world.fill()
    await world.sql("update indexer.repo set data = commit")
    [line] = await world.lines(ada)
    root = ada.repo.head
    assert line == f"{ada.did} other data: ours {cid_text(root.cid)}, the host's {cid_text(root.data)}"
    await world.delete(ada, "002")
    assert await world.lines(ada) == [line, f"{POST}/002 missing here"]
    await world.sql("update indexer.repo set rev = '3aaaaaaaaaaaa'")
    assert await world.lines(ada) == [f"{ada.did} behind: ours 3aaaaaaaaaaaa, the host's {ada.rev}"]


@pytest.mark.slow
async def test_nothing_is_written_and_what_differs_is_printed(world: World, ada: Account) -> None:
    bob, cyd = world.account("bob"), world.account("cyd")
    await world.fill()
    message = b'{"error": "RepoNotFound", "message": "\\u001b[2J"}'
    cyd.pds.faults.append(Fault(GET_REPO, cyd.did, status=400, body=message))
    await world.sql("update indexer.record set rkey = E'\\x1b[2J' where rkey = '001' and did = $1", ada.did)
    await world.delete(ada, "002")
    await world.sql("update indexer.repo set active = false, hosting_status = 'deactivated' where did = $1", bob.did)
    name = (await world.sql("select current_database()"))[0][0]
    await world.sql(f"alter database {name} set default_transaction_read_only = on")
    before = await world.contents()
    result = await world.command(ada.did, bob.did, cyd.did, NOBODY, ada.did)
    assert await world.contents() == before
    uri = f"at://{ada.did}/{POST}"
    *lines, repos, records, hindered = result.stdout.splitlines()
    assert sorted(lines) == sorted(
        [
            repr(f"{uri}/\x1b[2J") + " not in the repo",
            f"{uri}/001 missing here",
            f"{uri}/002 missing here",
            f"{bob.did} not compared: inactive: deactivated",
            f"{cyd.did} not compared: " + repr("repo-not-found: 400 RepoNotFound \x1b[2J"),
            f"{NOBODY} not compared: not known here",
        ]
    )
    assert repos == "repos: 1 compared, 0 equal"
    assert records == f"records: {len(ada.records)} compared, 3 differences"
    assert hindered == "not compared: 3 (1 inactive, 1 not known here, 1 repo-not-found)"
    assert (result.returncode, result.stderr) == (5, "")
    assert not list((world.directory / "spool").iterdir())


@pytest.mark.slow
async def test_a_sample_by_default(world: World, ada: Account) -> None:
    bob = world.account("bob")
    await world.fill()
    result = await world.command()
    records = len(ada.records) - 1 + len(bob.records)
    assert result.stdout == f"repos: 2 compared, 2 equal\nrecords: {records} compared, 0 differences\n"
    assert (result.returncode, result.stderr) == (0, "")
    result = await world.command("--sample", "1")
    assert result.stdout.startswith("repos: 1 compared, 1 equal\n")
    assert result.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((NOBODY, "--sample", "5"), "Name DIDs, or give a --sample; see indexer audit"),
        (
            ("--sample", "0"),
            "Invalid value for '--sample': 0 is not in the range 1<=x<=1000000; see indexer audit",
        ),
        (("someone.example",), "Invalid value for '[DID…]': 'someone.example' is not a DID; see indexer audit"),
    ],
)
def test_bad_arguments(arguments: tuple[str, ...], expected: str) -> None:
    result = indexer("audit", *arguments, INDEXER_DATABASE_URL="postgresql://127.0.0.1:1/none")
    assert result.returncode == 2
    assert complaint(result) == f"{expected} --help"


@pytest.mark.slow
async def test_exit_codes_go_by_what_is_worst(world: World) -> None:
    ada, bob, cyd = (world.account(name) for name in ("ada", "bob", "cyd"))
    await world.fill()
    assert (await world.command(ada.did, bob.did)).returncode == 0
    assert (await world.command(ada.did, NOBODY)).returncode == 4
    bob.deactivate()
    result = await world.command(ada.did, bob.did, NOBODY)
    assert f"{bob.did} not compared: repo-deactivated: 400 RepoDeactivated" in result.stdout
    assert result.returncode == 1
    await world.delete(cyd, "002")
    assert (await world.command(ada.did, bob.did, cyd.did, NOBODY)).returncode == 5


@pytest.mark.slow
async def test_of_many_differences_the_first_are_shown(world: World) -> None:
    ada = world.account("ada", posts=250)
    await world.fill()
    await world.sql("delete from indexer.record")
    result = await world.command(ada.did)
    *lines, more, _, records = result.stdout.splitlines()
    assert lines == [f"at://{ada.did}/{POST}/{number:03} missing here" for number in range(audit_module.SHOWN)]
    assert more == f"{ada.did} 150 more differences"
    assert records == "records: 250 compared, 250 differences"


async def test_settings_decide_what_there_is_to_be_compared(world: World) -> None:
    ada = world.account("ada", posts=2)
    ada.create(LIKE, {"$type": LIKE}, rkey="1")
    await world.fill(collections=POST, store_values="false")
    assert await world.lines(ada, collections=POST, store_values="false") == []
    assert await world.lines(ada, collections=POST) == [f"{POST}/{n:03} other value" for n in range(2)]
    assert await world.lines(ada, store_values="false") == [f"{LIKE}/1 missing here"]
    lines = await world.lines(ada, collections=LIKE, store_values="false")
    assert lines == [f"{LIKE}/1 missing here", *[f"{POST}/{n:03} not in the chosen collections" for n in range(2)]]


async def test_values_of_before_are_compared_where_values_are_not_kept(world: World, ada: Account) -> None:
    assert await world.lines(ada, store_values="false") == []
    await world.sql("update indexer.record set value = '{}' where rkey = '001'")
    assert await world.lines(ada, store_values="false") == [VALUE]


UNCOMPARED: dict[str, tuple[Callable[[World, Account], Any], str]] = {
    "the host is down": (lambda _, ada: ada.pds.stop(), "unreachable: "),
    "the host fails": (lambda _, ada: ada.pds.faults.append(Fault(GET_REPO, status=500)), "http-status: 500"),
    "the host asks for a pause": (
        lambda _, ada: ada.pds.faults.append(Fault(GET_REPO, status=429, headers={"Retry-After": "9"})),
        "throttled: ",
    ),
    "the host doesn't know the repo": (lambda _, ada: ada.delete_account(), "repo-not-found: "),
    "a connection that is cut": (lambda _, ada: ada.pds.faults.append(Fault(GET_REPO, cut=700)), "unreachable: "),
    "an export without its end": (
        lambda _, ada: ada.pds.faults.append(Fault(GET_REPO, sections=3)),
        "export-incomplete: no node ",
    ),
    "an export without a record": (
        lambda _, ada: ada.pds.faults.append(Fault(GET_REPO, sections=len(list(ada.repo.export())) - 1)),
        "export-lacks-records: 1 records",
    ),
    "nonsense": (
        lambda _, ada: ada.pds.faults.append(Fault(GET_REPO, status=200, body=bytes(100))),
        "export-rejected: car-malformed",
    ),
    "another key": (lambda _, ada: rekeyed(ada), "export-rejected: signature-invalid"),
    "a revision of the future": (lambda _, ada: of_the_future(ada), "export-rejected: future-rev"),
    "no such DID": (lambda world, ada: world.network.plc.identities.pop(ada.did), "identity-missing: not registered"),
    "taken down": (
        lambda world, ada: world.sql(
            "update indexer.repo set active = false, hosting_status = 'takendown' where did = $1 returning did",
            ada.did,
        ),
        "inactive: takendown",
    ),
    "not synchronized": (
        lambda world, ada: world.store.mark_resync([ada.did]),
        "not synchronized: requested",
    ),
    "paused by the daemon": (
        lambda world, ada: world.sql(
            "update indexer.host set paused_until = now() + interval '1 hour', pause_reason = 'host-paused' "
            "where host = $1 returning host",
            ada.pds.url.removeprefix("http://"),
        ),
        "host-paused: ",
    ),
}


def rekeyed(account: Account) -> None:
    """The directory has another key than that which signed."""
    account.swap_key()
    account.publish_key()


def of_the_future(account: Account) -> None:
    account.repo.write([], account.key, tid_of(2**52))


async def test_what_cannot_be_compared_says_why_and_holds_nobody_else_up(database: str, tmp_path: Path) -> None:
    async with new_world(database, tmp_path, hosts=len(UNCOMPARED) + 1) as world:
        accounts = {what: world.account(f"account{number}") for number, what in enumerate(UNCOMPARED)}
        bob = world.account("bob")
        await world.fill()
        for what, account in accounts.items():
            changing = UNCOMPARED[what][0](world, account)
            assert not asyncio.iscoroutine(changing) or await changing != [], what
        before, unfit = await world.contents(), [accounts[what] for what in ("taken down", "not synchronized")]
        exports = [account.pds.requests[GET_REPO] for account in unfit]
        verdicts = await world.audit(*accounts.values(), bob)
        assert await world.contents() == before
        assert [account.pds.requests[GET_REPO] for account in unfit] == exports, "nobody is asked in vain"
    for what, account in accounts.items():
        verdict = verdicts[account.did]
        assert (verdict.hindrance or "").startswith(UNCOMPARED[what][1]), (what, verdict.hindrance)
        assert verdict.differences == 0
        assert all(fault.fired == 1 for fault in account.pds.faults), what
    assert verdicts[bob.did] == Verdict(bob.did, records=5)


async def test_without_a_directory_nothing_is_compared(world: World) -> None:
    ada = world.account("ada")
    await world.fill()
    await world.network.plc.stop()
    assert (await world.hindrance(ada)).startswith("identity-unavailable: unreachable: ")


async def test_a_repo_that_is_hidden_here_is_compared_all_the_same(world: World) -> None:
    ada = world.account("ada")
    await world.fill()
    await world.store.takedown(ada.did, on=True)
    assert await world.lines(ada) == []


async def test_values_that_no_export_has_are_missing_on_both_sides(world: World) -> None:
    ada = world.account("ada")
    await world.fill()
    last = list(ada.repo.export())[-1]
    [[rkey]] = await world.sql(
        "update indexer.record set value = null, value_problem = 'missing' where position(cid in $1) > 0 "
        "returning rkey",
        last,
    )
    assert await world.lines(ada) == [f"{POST}/{rkey} other value"]
    ada.pds.faults.append(Fault(GET_REPO, sections=len(list(ada.repo.export())) - 1))
    assert await world.lines(ada) == []


def old_export(account: Account, times: int | None) -> Fault:
    """The present export, so often more."""
    headers = {"Content-Type": "application/vnd.ipld.car"}
    return Fault(GET_REPO, times=times, status=200, headers=headers, body=b"".join(account.repo.export()))


@pytest.mark.parametrize("times", [1, 4])
async def test_an_export_older_than_ours_is_fetched_again(world: World, times: int) -> None:
    ada = world.account("ada")
    fault = old_export(ada, times)
    ada.create(POST, {"$type": POST, "text": "newer"})
    await world.fill()
    ada.pds.faults.append(fault)
    before = ada.pds.requests[GET_REPO]
    assert await world.lines(ada) == []
    assert (fault.fired, ada.pds.requests[GET_REPO] - before) == (times, times + 1)


async def test_a_host_that_has_gone_back_is_not_fetched_for_ever(world: World) -> None:
    ada = world.account("ada")
    older, fault = ada.rev, old_export(ada, None)
    ada.create(POST, {"$type": POST, "text": "newer"})
    await world.fill()
    ada.pds.faults.append(fault)
    assert await world.hindrance(ada) == f"export-stale: {older} < {ada.rev}"
    assert fault.fired == AT_ONCE.fetches


async def test_the_daemon_is_given_time_to_come_up_to_the_host(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ada = world.account("ada")
    await world.fill()
    ada.create(POST, {"$type": POST, "text": "newer"})
    [line] = await world.lines(ada)
    assert re.fullmatch(rf"{ada.did} behind: ours \S+, the host's {ada.rev}", line)
    looks = 0
    reading = Store.reading

    def counted(self: Store, did: str) -> Any:
        nonlocal looks
        looks += 1
        return reading(self, did)

    monkeypatch.setattr(Store, "reading", counted)
    auditing_ = asyncio.create_task(world.audit(ada, pace=Pace(patience=60.0, poll=0.01)))
    await until(lambda: looks > 3)
    assert not auditing_.done()
    async with serving(world.settings(), world.dsn):
        verdict = (await auditing_)[ada.did]
    assert verdict == Verdict(ada.did, records=6)


async def test_a_repo_that_breaks_while_it_is_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ada = world.account("ada")
    await world.fill()
    ada.create(POST, {"$type": POST, "text": "newer"})
    fetch = PdsClient.fetch_repo

    @asynccontextmanager
    async def then_breaks(self: PdsClient, did: str, host: str) -> AsyncIterator[Spool]:
        async with fetch(self, did, host) as spool:
            await world.store.mark_resync([did])
            yield spool

    monkeypatch.setattr(PdsClient, "fetch_repo", then_breaks)
    assert await world.hindrance(ada) == "not synchronized: requested"


@pytest.mark.slow
async def test_commits_of_the_daemon_meanwhile_are_not_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon follows an account that writes, and each verdict is of one moment."""
    monkeypatch.setattr(records_module, "AT_ONCE", 1)
    ada = world.account("ada")
    await world.fill()
    async with serving(world.settings(), world.dsn):

        async def write() -> None:
            for number in range(10_000):
                ada.apply_writes(
                    [
                        Write.update(f"{POST}/{number % 5:03}", {"$type": POST, "text": f"again {number}"}),
                        Write.create(f"{POST}/new{number}", {"$type": POST}),
                        *([Write.delete(f"{POST}/new{number - 5}")] if number >= 5 else []),
                    ]
                )
                await asyncio.sleep(0.2)

        writing = asyncio.create_task(write())
        try:
            for _ in range(10):
                verdict = (await world.audit(ada, pace=Pace(fetches=20, patience=30.0, poll=0.01)))[ada.did]
                assert (verdict.differences, verdict.hindrance) == (0, None)
        finally:
            writing.cancel()


async def test_so_many_at_once_and_no_more(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    accounts = [world.account(f"account{number}") for number in range(7)]
    await world.fill()
    running, most, at_once = 0, 0, 3
    fetch = PdsClient.fetch_repo

    @asynccontextmanager
    async def counted(self: PdsClient, did: str, host: str) -> AsyncIterator[Spool]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            await until(lambda: most == at_once)
            async with fetch(self, did, host) as spool:
                yield spool
        finally:
            running -= 1

    monkeypatch.setattr(PdsClient, "fetch_repo", counted)
    verdicts = await world.audit(*accounts, resync_workers=str(at_once))
    assert verdicts == {account.did: Verdict(account.did, records=5) for account in accounts}
    assert most == at_once
    assert audit_module.at_once(world.settings(resync_workers="1000")) == audit_module.MOST_AT_ONCE


async def test_without_the_database_it_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing that was under way goes on."""
    accounts = [world.account(f"account{number}") for number in range(4)]
    await world.fill()

    def away(*_: object) -> None:
        raise DatabaseError(FetchFailure.UNREACHABLE, "away")

    monkeypatch.setattr(Store, "reading", away)
    with pytest.raises(DatabaseError, match="away"):
        await world.audit(*accounts)
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("audit of")]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("audit")]


@pytest.mark.slow
async def test_an_interrupt_ends_it_quietly(world: World) -> None:
    ada = world.account("ada", posts=200)
    await world.fill()
    ada.pds.faults.append(Fault(GET_REPO, rate=2_000))
    before = ada.pds.requests[GET_REPO]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "indexer", "audit", ada.did),
        cwd=ROOT,
        env=os.environ | world.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    await until(lambda: ada.pds.requests[GET_REPO] > before)
    process.send_signal(signal.SIGINT)
    written, complained = await asyncio.wait_for(process.communicate(), 30)
    assert (process.returncode, written, complained.strip()) == (130, b"", b"")
    assert not list((world.directory / "spool").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("together", [False, True])
async def test_progress_is_for_terminals_and_never_among_the_results(world: World, together: bool) -> None:
    """On one terminal with them, it makes room for each."""
    ada = world.account("ada")
    await world.fill()
    await world.delete(ada, "002")
    terminal, its_end = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "indexer", "audit", ada.did),
        cwd=ROOT,
        env=os.environ | world.environment() | {"TERM": "xterm", "COLUMNS": "100"},
        stdout=its_end if together else subprocess.PIPE,
        stderr=its_end,
    )
    os.close(its_end)
    (results, _), shown = await asyncio.gather(process.communicate(), asyncio.to_thread(heard, terminal))
    line = f"at://{ada.did}/{POST}/002 missing here"
    if together:
        before, _, _ = shown.partition(line)
        assert before.endswith("\x1b[2K"), "the terminal's line was cleared"
    else:
        assert results.decode().startswith(line)
        assert line not in shown
    assert "0/1" in shown
    assert "-:--:--" in shown


def heard(terminal: int) -> str:
    """All that comes until nobody has the other end."""
    found = bytearray()
    with suppress(OSError):
        while chunk := os.read(terminal, 1 << 16):
            found += chunk
    os.close(terminal)
    return found.decode()


# What follows holds the comparison against dictionaries, in random worlds.

KEY = PrivateKey.from_seed("k256", b"audit")
REV = "3jzfcijpj2z2b"
NAMES = ("com.example.a", "com.example.a.b", "com.example.ab", "com.example-x.a", "nowhere")
PATHS = st.sampled_from([f"{name}/{rkey}" for name in NAMES for rkey in "12:_~"])
BLOCKS = [
    b"\xa1\x65$type\x6dcom.example.a",
    b"\xa2\x61a\x01\x62bb\xf5",
    b"\xa1\x61a\xfb\x3f\xf8\x00\x00\x00\x00\x00\x00",
    b"\xa1\x61a\x61\x00",
    b"\x01",
    b"\xf6",
    b"\xff",
]
WORLDS = st.dictionaries(PATHS, st.sampled_from(BLOCKS))
POLICIES = st.builds(
    Policy,
    st.sampled_from([CollectionFilter(), CollectionFilter(["com.example.a"]), CollectionFilter(["com.example.a.*"])]),
    st.just(DEFAULT_LIMITS),
    st.booleans(),
)
FAULTS = st.dictionaries(
    PATHS, st.sampled_from(["deleted", "added", "cid", "value", "problem", "original", "missing", "nothing"])
)


def snapshot_of(truth: dict[str, bytes], lacking: set[bytes]) -> Snapshot:
    """Proven like any other; the export lacks these records."""
    repo = Repo("did:plc:" + "b" * 24, KEY, REV)
    repo.load(truth, KEY, REV)
    _, blocks = split_car(b"".join(repo.export()), DEFAULT_LIMITS, max_bytes=10**7)
    left = {cid: block for cid, block in blocks.items() if block not in lacking}
    return verify_snapshot(repo.did, repo.head.cid, left.get, KEY.public, DEFAULT_LIMITS)


def written(path: str, block: bytes, policy: Policy) -> StoredRecord | None:
    """What a resync writes, the value as Postgres gives it back."""
    change = record_change(VerifiedChange(path.encode(), None, cid_of(block), block), REV, policy)
    if change is None:
        return None
    value = change.value and json.dumps(json.loads(change.value), indent=1)
    return StoredRecord(path.encode(), cid_of(block), value, change.problem, change.original)


def faulty(path: str, record: StoredRecord | None, fault: str) -> StoredRecord | None:
    if record is None:
        return StoredRecord(path.encode(), cid_of(BLOCKS[0]), None, None, None) if fault == "added" else None
    changes: dict[str, dict[str, Any]] = {
        "added": {},
        "cid": {"cid": cid_of(b"another")},
        "value": {"value": '{"another": 1}'},
        "problem": {"problem": "another"},
        "original": {"original": b"another"},
        "missing": {"value": None, "problem": "missing", "original": None},
        "nothing": {"value": None, "problem": None, "original": None},
    }
    return None if fault == "deleted" else record._replace(**changes[fault])


def oracle(
    truth: dict[str, bytes], lacking: set[bytes], stored: dict[str, StoredRecord], policy: Policy
) -> tuple[dict[str, str], int]:
    """What differs at each path, and how many values could not be compared."""
    values = Policy(policy.collections, policy.limits)
    expected = {path: record for path, block in truth.items() if (record := written(path, block, values))}
    found, unjudged = {}, 0
    for path in sorted(stored.keys() | expected.keys()):
        ours, theirs = stored.get(path), expected.get(path)
        if ours is None:
            found[path] = "missing here"
        elif theirs is None:
            kept = policy.collections.matches(path.partition("/")[0])
            found[path] = "not in the repo" if kept else "not in the chosen collections"
        elif ours.cid != theirs.cid:
            found[path] = "other CID"
        elif ours[2:] == (None, None, None) and not policy.store_values:
            pass
        elif truth[path] in lacking:
            unjudged += ours.problem != "missing"
        elif ours != theirs:
            found[path] = "other value"
    return found, unjudged


@given(WORLDS, WORLDS, FAULTS, st.sets(st.sampled_from(BLOCKS)), POLICIES, st.booleans(), st.integers(1, 5))
@hypothesis_settings(deadline=None)
def test_the_merge_finds_what_dictionaries_find(
    truth: dict[str, bytes],
    before: dict[str, bytes],
    faults: dict[str, str],
    lacking: set[bytes],
    policy: Policy,
    valued: bool,
    size: int,
) -> None:
    """`before` is what our records were made of where it names a path: older versions, and records since deleted."""
    writing = Policy(policy.collections, policy.limits, store_values=valued)
    right = {path: record for path, block in (truth | before).items() if (record := written(path, block, writing))}
    stored = {
        path: record
        for path in right.keys() | faults.keys()
        if (record := faulty(path, right.get(path), faults.get(path, "added")) if path in faults else right.get(path))
    }
    rows = [stored[path] for path in sorted(stored)]
    comparison = Comparison(snapshot_of(truth, lacking), policy)
    for start in range(0, len(rows), size):
        comparison.take(rows[start : start + size])
    comparison.end()
    verdict = comparison.verdict
    found, unjudged = oracle(truth, lacking, stored, policy)
    prefix = f"at://{verdict.did}/"
    assert [(place.removeprefix(prefix), what.partition(":")[0]) for place, what in verdict.shown] == [*found.items()]
    assert verdict.differences == len(found)
    assert verdict.records == len(stored) + list(found.values()).count("missing here")
    assert verdict.hindrance == (f"export-lacks-records: {unjudged} records" if unjudged else None)


TEXTS = ("0", "-0.0", "1", "1.0", "1e0", "true", "false", "null", '"1"', '""', "1e300", f"1{'0' * 300}", "[]", "{}")
NUMBERS = ("18446744073709551615", "18446744073709551616", "0.1", "0.10", "0.1000000000000000055511151231257827")


def some_json(random: Random, depth: int = 3) -> str:
    kind = random.randrange(4) if depth else 0
    if kind <= 1:
        return random.choice(TEXTS + NUMBERS)
    items = [some_json(random, depth - 1) for _ in range(random.randrange(3))]
    if kind == 2:
        return f"[{', '.join(items)}]"
    keys = random.sample("abc", len(items))
    return "{" + ",".join(f'"{key}" :{item}' for key, item in zip(keys, items, strict=True)) + "}"


async def test_json_is_the_same_as_postgres_says(sql: asyncpg.Connection) -> None:
    random = Random(5)
    pairs = [(one, other) for one in TEXTS + NUMBERS for other in TEXTS + NUMBERS]
    pairs += [(some_json(random, 1), some_json(random, 1)) for _ in range(20_000)]
    pairs += [(text, json.dumps(json.loads(text), sort_keys=True)) for text in map(some_json, [random] * 1_000)]
    ones, others = zip(*pairs, strict=True)
    rows = await sql.fetch(
        "select one::jsonb = other::jsonb, one::jsonb::text from unnest($1::text[], $2::text[]) p(one, other)",
        ones,
        others,
    )
    assert 1_000 < sum(same for same, _ in rows) < len(rows) - 1_000
    for (one, other), (same, back) in zip(pairs, rows, strict=True):
        assert same_json(one, other) is same, (one, other)
        assert same_json(back, one), one
    assert not same_json(None, "null")
    assert same_json(None, None)


def test_a_tally_is_by_the_kind_of_reason() -> None:
    tally = Tally()
    broken = str(UnavailableError(FetchFailure.UNREACHABLE, "one: two"))
    for verdict in (
        Verdict("did:web:a", 5),
        Verdict("did:web:b", 7, differences=2),
        Verdict("did:web:c", hindrance=broken),
        Verdict("did:web:d", hindrance=audit_module.UNKNOWN),
        Verdict("did:web:e", 3, differences=1, hindrance="export-lacks-records: 2 records"),
    ):
        tally.add(verdict)
    assert (tally.repos, tally.equal, tally.records, tally.differences) == (2, 1, 15, 3)
    assert tally.hindrances == {"unreachable": 1, "not known here": 1, "export-lacks-records": 1}
    assert (tally.hindered, tally.unknown) == (3, 1)
