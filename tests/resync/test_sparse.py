"""Resyncs that fetch only chosen records: the same rows as with exports, also if the repo changes meanwhile."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random
from time import time
from typing import Any, get_args

import asyncpg
import pytest

from indexer.atproto.cid import cid_of
from indexer.atproto.mst import encode_node
from indexer.atproto.syntax import CollectionFilter, tid_of
from indexer.db import Database
from indexer.db.write import MIN_COPIED
from indexer.demo.dag_cbor import encode
from indexer.demo.local_repo import Write, car
from indexer.net.http.http_client import Response
from indexer.net.pds.xrpc import XrpcError
from indexer.reasons import FetchFailure
from indexer.resync.sparse import SparseChoice, SparseDownload, SparseFetch, Stored
from indexer.sync.hints import Hint, plan_hint
from indexer.sync.policy import PlanContext, Policy
from tests.daemon.crafted_exports import SignedRepo
from tests.resync.resync_world import MIRROR, PDS, AccountOwner, ResyncWorld, SimulatedHosts
from tests.sync.signing_account import STORE_ALL, received_message

WANTED = "com.example.note"
SPARSE_CHOICES: tuple[SparseChoice, ...] = get_args(SparseChoice)
PATTERNS = (("com.example.a",), ("com.example.note.*", "com.example.a"), ("com.example.note",), ("com.other.*",))


def policy_of(*patterns: str, **fields: Any) -> Policy:
    scope = replace(STORE_ALL.scope, collections=CollectionFilter(patterns))
    return replace(STORE_ALL, scope=scope, **fields)


@pytest.fixture
async def world(db: Database, sql: asyncpg.Connection, tmp_path: Path) -> ResyncWorld:
    """Return the world of an account with wanted records between many others; nothing happens at random."""
    world = ResyncWorld(db, sql, tmp_path, policy=policy_of(WANTED))
    paths = [f"{name}/{number:03}" for name in ("com.example.a", WANTED, "com.other.b") for number in range(60)]
    world.owner.change(*(Write.create(path, {"path": path}) for path in paths))
    await db.repos.add([world.owner.did])
    return world


def kinds(world: ResyncWorld) -> list[str]:
    return [kind for kind, _ in world.hosts.requests]


async def test_head_that_moves_once_costs_one_more_proof(world: ResyncWorld) -> None:
    """A record of the range is written between the rounds: the blocks of the former head are gone."""

    async def write() -> None:
        world.owner.change(Write.create(f"{WANTED}/new", {"new": True}), Write.delete(f"{WANTED}/010"))

    for step in ("record fetched", "ask for blocks"):
        world.hosts.requests.clear()
        world.at[step] = write
        assert await world.attempt()
        assert kinds(world).count("record") == 2
        assert "export" not in kinds(world)
        assert await world.has_all_records()
        world.owner.change(Write.delete(f"{WANTED}/new"), Write.create(f"{WANTED}/010", {"again": True}))
        await world.db.repos.request_resyncs([world.owner.did])
    assert {host for _, host in world.hosts.requests} == {PDS}


async def test_head_that_moves_in_each_round_leads_to_the_export(world: ResyncWorld) -> None:
    async def write() -> None:
        number = len(world.hosts.requests)
        world.owner.change(*(Write.update(path, {"number": number, "path": path}) for path in world.owner.repo.records))
        world.at["ask for blocks"] = write

    world.at["ask for blocks"] = write
    assert await world.attempt()
    assert kinds(world).count("record") == kinds(world).count("blocks") == 4
    assert world.hosts.requests[-1] == ("export", MIRROR)
    assert await world.has_all_records()
    assert world.results == {"synchronized": 1}


async def test_scope_that_changes_while_the_records_are_fetched_ends_the_attempt(world: ResyncWorld) -> None:
    """Otherwise the records of the added collection would be missing although the repo counts as complete."""
    scope = await world.db.scope.begin(world.policy.scope)
    world.policy = replace(world.policy, scope=scope)

    async def widen() -> None:
        world.policy = replace(world.policy, scope=await world.db.scope.change(collections=[WANTED, "com.other.b"]))

    world.at["blocks fetched"] = widen
    assert await world.attempt()
    assert world.results == {"postponed": 1}
    assert await world.query("select rkey from indexer.record") == []


async def proofs(world: ResyncWorld) -> dict[str, str]:
    rows = await world.query("select rkey, proof from atproto.records where did = $1", world.owner.did)
    return {row["rkey"]: row["proof"] for row in rows}


@pytest.mark.parametrize("choices", [("always", "never"), ("never", "always")])
async def test_only_what_a_resync_changes_gets_its_proof(
    world: ResyncWorld, choices: tuple[SparseChoice, SparseChoice]
) -> None:
    """And a buffered commit is a commit, whatever the resync fetches. New records are copied or not."""
    first, second = ("range" if choice == "always" else "export" for choice in choices)
    writes = [Write.create(f"{WANTED}/live", {}), Write.update(f"{WANTED}/002", {"live": True})]

    async def buffer_commit() -> None:
        await world.live.deliver([received_message("commit", world.owner.commit(*writes))])

    world.sparse.choice = choices[0]
    assert await world.attempt()
    expected = {f"{number:03}": first for number in range(60)}
    assert await proofs(world) == expected
    world.sparse.choice, world.at["begin"] = choices[1], buffer_commit
    world.owner.change(Write.update(f"{WANTED}/001", {"lost": True}), Write.create(f"{WANTED}/few", {}))
    await world.db.repos.request_resyncs([world.owner.did])
    assert await world.attempt()
    expected |= {"001": second, "few": second, "002": "commit", "live": "commit"}
    assert await proofs(world) == expected
    world.owner.change(*(Write.create(f"{WANTED}/many{number}", {"number": number}) for number in range(MIN_COPIED)))
    await world.db.repos.request_resyncs([world.owner.did])
    assert await world.attempt()
    assert await proofs(world) == expected | {f"many{number}": second for number in range(MIN_COPIED)}
    assert world.results == {"synchronized": 3}
    assert {kind for kind, _ in world.hosts.requests} >= {"export", "record"}


def account_of(records: dict[str, int]) -> AccountOwner:
    """Return an account with so many records of each collection."""
    owner = AccountOwner("eve")
    paths = [f"{name}/{number:05}" for name, count in records.items() for number in range(count)]
    owner.repo.import_records({path: encode({"path": path}) for path in paths}, owner.key, owner.next_rev())
    owner.versions.append(owner.repo)
    return owner


FEW, MANY, FAR = "com.example.few", "com.example.many", "com.zzz.far"


@pytest.mark.parametrize(
    ("records", "patterns", "requests"),
    [
        ({FEW: 30, MANY: 3_000}, [FEW], 4),
        ({FEW: 10, MANY: 3_000, FAR: 10}, [FEW, FAR], 7),
        ({MANY: 3_000}, [FEW], 1),
        ({MANY: 3_000}, ["com.example.f.*"], 1),
        ({FEW: 300, MANY: 3_000}, [FEW], 10),
        ({FEW: 3_000, MANY: 300}, [FEW], None),
        ({FEW: 1_500, MANY: 1_500}, ["com.example.*"], None),
        ({FEW: 150, MANY: 200}, [FEW], None),
        ({FEW: 20, MANY: 10}, [FEW], 3),
        ({}, [FEW], 1),
    ],
    ids=str,
)
async def test_cheaper_way_is_chosen(
    tmp_path: Path, records: dict[str, int], patterns: list[str], requests: int | None
) -> None:
    """An export is chosen after at most a few answers. With `always`, all that is possible is fetched."""
    owner, policy = account_of(records), policy_of(*patterns)
    for choice in SPARSE_CHOICES:
        hosts: Any = SimulatedHosts(owner, tmp_path)
        opened: list[SparseDownload] = []
        download = await SparseFetch(hosts, choice).fetch(owner.did, PDS, policy, opened.append)
        if choice == "never" or (choice == "auto" and requests is None):
            assert download is None
            assert len(hosts.requests) <= (0 if choice == "never" else 3)
        else:
            assert download is not None
            assert requests is None or len(hosts.requests) <= requests
            assert opened == [download], "its server counts from the first answer on"
            assert (download.rate, download.complete) == (inf, False), "it is neither slow nor a usual export"
            snapshot = download.verify(owner.did, owner.key.public, policy.limits)
            wanted = [path for path in owner.repo.records if policy.scope.collections.matches(path.partition("/")[0])]
            assert [path.decode() for path, _ in snapshot.records()] == sorted(wanted)


async def test_export_is_fetched_of_what_needs_more_than_the_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many bytes, too many rounds, or values that would be omitted because a sparse download has fewer bytes."""
    owner, policy = account_of({FEW: 300, MANY: 300}), policy_of(FEW)
    hosts: Any = SimulatedHosts(owner, tmp_path)
    sparse = SparseFetch(hosts, "always")
    assert await sparse.fetch(owner.did, PDS, STORE_ALL) is None, "of all collections"
    for bound, value in (("MAX_BYTES", 50_000), ("MAX_ROUNDS", 2)):
        with monkeypatch.context() as patch:
            patch.setattr(f"indexer.resync.sparse.{bound}", value)
            assert await sparse.fetch(owner.did, PDS, policy) is None
    assert await sparse.fetch(owner.did, PDS, policy) is not None
    same = encode({"text": "x" * 100_000})
    many = {f"{FEW}/{number}": same for number in range(100)}
    owner.repo.import_records(many, owner.key, owner.next_rev())
    assert await sparse.fetch(owner.did, PDS, policy) is None
    download = await sparse.fetch(owner.did, PDS, replace(policy, store_values=False))
    assert download is not None, "no record is needed"
    assert cid_of(same) not in download.blocks


async def test_removed_records_are_not_fetched(tmp_path: Path) -> None:
    """Not as the path of a proof either: it is sent with its record. Nor the records of a redacted collection."""
    owner, rkeys = account_of({FEW: 30, MANY: 30, FAR: 30}), ["self", "-", "00007"]
    owner.change(*(Write.create(f"{FEW}/{rkey}", {"secret": rkey}) for rkey in rkeys[:2]))
    removed = frozenset(f"{FEW}/{rkey}".encode() for rkey in rkeys)
    scope = replace(
        STORE_ALL.scope,
        collections=CollectionFilter(["com.example.*", MANY, FAR], [MANY]),
        removed={owner.did: removed},
    )
    policy = replace(STORE_ALL, scope=scope)
    for hint in ("", f"{FEW}/self", f"{MANY}/00001"):
        hosts: Any = SimulatedHosts(owner, tmp_path)
        download = await SparseFetch(hosts, "always", {owner.did: hint}).fetch(owner.did, PDS, policy)
        assert download is not None
        secret = {path for path in owner.repo.records if path.encode() in removed or path.startswith(MANY)}
        assert len(secret) == len(removed) + 30
        assert not {cid_of(owner.repo.records[path]) for path in secret} & download.blocks.keys()
        assert removed.isdisjoint(path.encode() for path in hosts.paths)
        snapshot = download.verify(owner.did, owner.key.public, policy.limits)
        records = snapshot.new_records(policy).next_chunk()
        assert records is not None
        stored = {f"{change.collection}/{change.rkey}" for change in records.changes}
        assert stored == owner.repo.records.keys() - secret
    only = replace(policy, scope=replace(scope, collections=CollectionFilter([MANY], [MANY])))
    assert await SparseFetch(hosts, "always").fetch(owner.did, PDS, only) is None


async def test_export_is_fetched_if_a_record_has_a_cid_that_cannot_be_hashed(tmp_path: Path) -> None:
    owner = account_of({FEW: 1})
    block = encode_node([f"{FEW}/00000".encode()], [b"\x01\x55\x00\x60" + bytes(96)], None, [None])
    commit = SignedRepo(owner.repo, owner.key).sign_commit(cid_of(block))
    hosts: Any = SimulatedHosts(owner, tmp_path)

    async def proof(*_: str) -> Response:
        return Response(200, {}, car({cid_of(commit): commit, cid_of(block): block}))

    hosts.fetch_record_proof = proof
    assert await SparseFetch(hosts, "always").fetch(owner.did, PDS, policy_of(FEW)) is None


async def stored(world: ResyncWorld) -> list[Any]:
    """Return the rows of records, and of the change log in its order, without the account and the times."""
    did = world.owner.did
    return [
        await world.query(
            """
            select collection, rkey, cid, value, value_problem, original from indexer.record where did = $1
            order by 1, 2
            """,
            did,
        ),
        await world.query(
            "select action, collection, rkey, cid, live from atproto.changes where did = $1 order by seq", did
        ),
        await world.query("select sync_status, sync_reason, scope_version from indexer.repo where did = $1", did),
    ]


async def test_rows_and_change_log_are_those_of_an_export(
    db: Database, sql: asyncpg.Connection, tmp_path: Path
) -> None:
    """Two accounts have the same random history. The scope changes: records of former collections are stored."""
    store_values = True
    for seed in range(6):
        accounts = [ResyncWorld(db, sql, tmp_path, f"{seed} {name}", sparse=name) for name in ("always", "never")]
        for step in range(6):
            policy = policy_of(*PATTERNS[(seed + step) % len(PATTERNS)], store_values=store_values)
            for world in accounts:
                world.random.seed(f"{seed} {step}")
                world.policy, world.is_checked = policy, False
                for _ in range(world.random.choice([0, 1, 20])):
                    world.owner.change(*world.owner.some_writes(world.random))
                await db.repos.add([world.owner.did])
                await db.repos.request_resyncs([world.owner.did])
                assert await world.attempt()
                assert world.results.pop("synchronized") == 1
            assert await stored(accounts[0]) == await stored(accounts[1])
        assert "export" not in kinds(accounts[0])
        store_values = not store_values


def stored_of(records: dict[str, bytes], policy: Policy) -> dict[bytes, bytes]:
    """Return the entries of the chosen records."""
    wanted = policy.scope.collections.matches
    return {path.encode(): cid_of(records[path]) for path in sorted(records) if wanted(path.partition("/")[0])}


@pytest.mark.parametrize("patterns", PATTERNS, ids=str)
async def test_any_stored_entries_lead_to_the_same_records(tmp_path: Path, patterns: tuple[str, ...]) -> None:
    """They are right, or of other states, or made up. All records that they lack are fetched."""
    random, policy = Random(str(patterns)), policy_of(*patterns)
    fetched: dict[str, int] = {"right": 0, "none": 0}
    for name in ("right", "none", "old", "other", "disordered"):
        for _ in range(4):
            owner = account_of(dict.fromkeys(("com.example.a", WANTED, f"{WANTED}.draft", "com.other.x"), 40))
            stored = stored_of(owner.repo.records, policy)
            paths = random.sample(sorted(owner.repo.records), 5)
            owner.change(*(Write.update(path, {"changed": path}) for path in paths[:2]), Write.delete(paths[2]))
            owner.change(*(Write.create(f"{random.choice(paths[:2])}{number}", {"new": number}) for number in range(2)))
            match name:
                case "right":
                    stored = stored_of(owner.repo.records, policy)
                case "none":
                    stored = {}
                case "other":
                    keys = random.sample(sorted(stored), min(5, len(stored)))
                    stored = {path: cid + b"\0" if path in keys else cid for path, cid in stored.items()}
                    stored = dict(sorted((stored | {key + b"0": bytes(36) for key in keys}).items()))
                case "disordered":
                    stored = dict(random.sample(sorted(stored.items()), len(stored)))
            hosts: Any = SimulatedHosts(owner, tmp_path)
            hint = {owner.did: random.choice(paths)}
            download = await SparseFetch(hosts, "always", hint).fetch(
                owner.did, PDS, policy, stored=Stored(b"", stored)
            )
            assert download is not None
            snapshot = download.verify(owner.did, owner.key.public, policy.limits)
            entries = dict(snapshot.records())
            assert entries == stored_of(owner.repo.records, policy), name
            assert all(snapshot.block_of(cid) for path, cid in entries.items() if stored.get(path) != cid), name
            fetched[name] = fetched.get(name, 0) + len(download.blocks)
    assert fetched["right"] < fetched["none"] / 2


async def test_one_new_record_needs_few_requests(tmp_path: Path) -> None:
    """The proof of its path, and the nodes along the borders: with two more paths, or by CID."""
    owner, policy = account_of({"com.example.a": 1_000, WANTED: 100, "com.other.b": 1_000}), policy_of(WANTED)
    hosts: Any = SimulatedHosts(owner, tmp_path)
    sparse, used = SparseFetch(hosts, "auto"), set[str]()
    for number in range(10):
        stored, commit, path = stored_of(owner.repo.records, policy), owner.repo.head.cid, f"{WANTED}/000{number}0a"
        owner.change(Write.create(path, {"new": True}))
        sparse.hints[owner.did] = path
        hosts.requests.clear()
        hosts.paths.clear()
        download = await sparse.fetch(owner.did, PDS, policy, stored=Stored(commit, stored))
        assert download is not None
        assert len(dict(download.verify(owner.did, owner.key.public, policy.limits).records())) == 101 + number
        assert len(hosts.requests) <= 3
        assert hosts.paths[0] == path
        assert len(set(hosts.paths)) == len(hosts.paths)
        assert download.size < 10_000
        used.update(hosts.paths[1:])
    assert used == {f"{WANTED}/-", f"{WANTED}/~"}
    hosts.requests.clear()
    download = await sparse.fetch(owner.did, PDS, policy, stored=Stored(owner.repo.head.cid))
    assert download is not None
    assert hosts.requests == [("record", PDS)], "the stored state is the latest"
    assert download.rate == inf


async def test_host_that_refuses_the_paths_at_the_borders_is_asked_for_the_nodes(tmp_path: Path) -> None:
    owner, policy = account_of({"com.example.a": 1_000, WANTED: 100, "com.other.b": 1_000}), policy_of(WANTED)
    hosts: Any = SimulatedHosts(owner, tmp_path)
    fetch_proof, refused = hosts.fetch_record_proof, []

    async def refuse_absent(did: str, path: str, host: str) -> Response:
        if path not in owner.repo.records:
            refused.append(path)
            raise XrpcError(FetchFailure.HTTP_STATUS, "no such record", definite=True, name="RecordNotFound")
        response: Response = await fetch_proof(did, path, host)
        return response

    hosts.fetch_record_proof = refuse_absent
    stored = Stored(b"", stored_of(owner.repo.records, policy))
    hint = {owner.did: f"{WANTED}/00090"}
    download = await SparseFetch(hosts, "auto", hint).fetch(owner.did, PDS, policy, stored=stored)
    assert download is not None
    assert refused == [f"{WANTED}/-"]
    assert "blocks" in {kind for kind, _ in hosts.requests}
    sparse = SparseFetch(hosts, "auto", {owner.did: f"{WANTED}/gone"})
    with pytest.raises(XrpcError):  # a true delete
        await sparse.fetch(owner.did, PDS, policy, stored=stored)
    assert sparse.is_possible("", PDS, policy), "the next hint may name a present path"
    with pytest.raises(XrpcError):
        await sparse.fetch(owner.did, PDS, policy, stored=stored)
    assert not sparse.is_possible("", PDS, policy)


@pytest.mark.parametrize("hint", ["com.other.b/1", f"{WANTED}/a/b", WANTED, "", "\ud800", f"{WANTED}/{'a' * 600}"])
async def test_hint_that_is_no_wanted_path_is_ignored(tmp_path: Path, hint: str) -> None:
    owner = account_of({WANTED: 1})
    hosts: Any = SimulatedHosts(owner, tmp_path)
    sparse = SparseFetch(hosts, "always", {owner.did: hint})
    assert await sparse.fetch(owner.did, PDS, policy_of(WANTED)) is not None
    assert (hosts.paths, sparse.hints) == ([f"{WANTED}/self"], {})


async def synchronized(world: ResyncWorld) -> None:
    assert await world.attempt()
    assert world.results.pop("synchronized") == 1
    world.hosts.requests.clear()


async def hint(world: ResyncWorld, rev: str) -> None:
    """Let an unproven message name a rev."""
    assert await world.db.crawls.desynchronize_behind({world.owner.did: rev}, time()) == 1


async def hint_of_stream(world: ResyncWorld, rev: str) -> None:
    """Let an event of a Jetstream name a rev."""
    event = Hint("commit", world.owner.did, rev=rev, collection=WANTED)
    context = PlanContext(world.policy, time())
    assert await world.db.repos.update(world.owner.did, lambda repo: plan_hint(repo, event, context).repo)


@pytest.mark.parametrize("moved", [False, True])
async def test_false_hint_causes_no_export_if_no_lookup_is_allowed(world: ResyncWorld, *, moved: bool) -> None:
    """The account may have moved, and an export would not show it. The repo waits longer after each such hint."""
    await synchronized(world)
    world.directory.cached = world.directory.identity(PDS, time() - 3_600)
    world.directory.refreshes = False
    if moved:
        world.owner.change(Write.create(f"{WANTED}/new", {"new": True}))
    await hint_of_stream(world, tid_of(int((time() + 60) * 1e6)))
    assert await world.attempt()
    row = await world.row()
    assert "export" not in kinds(world)
    assert row.last_failure is FetchFailure.EXPORT_STALE
    assert row.attempts == 2
    assert (row.next_attempt_at or 0) > time() + 60


async def test_true_hints_look_up_no_identity_and_all_they_bring_is_live(
    world: ResyncWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one comes during the resync."""
    await synchronized(world)
    refreshes, lookup = [], world.directory.lookup

    async def counted(did: str, *, refresh: bool = False, **options: Any) -> Any:
        refreshes.append(refresh)
        return await lookup(did, refresh=refresh, **options)

    monkeypatch.setattr(world.directory, "lookup", counted)
    world.owner.change(Write.create(f"{WANTED}/one", {"n": 1}))
    await hint_of_stream(world, world.owner.rev)

    async def write() -> None:
        world.owner.change(Write.create(f"{WANTED}/two", {"n": 2}))
        await hint_of_stream(world, world.owner.rev)

    world.at["begin"] = write
    for status in ("desynchronized", "synchronized"):
        assert await world.attempt()
        row = await world.row()
        assert row.sync_status == status
    assert row.attempts == 0
    assert refreshes == [False, False]
    changes = await world.query("select rkey, live from atproto.changes where rkey in ('one', 'two') order by seq")
    assert [tuple(change) for change in changes] == [("one", True), ("two", True)]
    world.owner.change(*(Write.create(f"{WANTED}/many{number}", {"n": number}) for number in range(MIN_COPIED)))
    await hint_of_stream(world, world.owner.rev)
    await world.query("update indexer.repo set next_attempt_at = null")
    assert await world.attempt()
    update = world.owner.commit(Write.update(f"{WANTED}/one", {"n": 3}), Write.update(f"{WANTED}/001", {"n": 3}))
    await world.live.deliver([received_message("commit", update)])
    seen = await world.query("select first_seen_live, proof, count(*) from atproto.records group by 1, 2 order by 1, 2")
    assert [tuple(row) for row in seen] == [
        (False, "commit", 1), (False, "range", 59), (True, "commit", 1), (True, "range", 1 + MIN_COPIED),
    ]  # fmt: skip


async def test_true_hints_of_a_costly_repo_wait_longer_each_time(
    world: ResyncWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    await synchronized(world)
    monkeypatch.setattr("indexer.resync.apply.COSTLY_BYTES", 1)
    waits = []
    for number in range(3):
        world.owner.change(Write.create(f"{WANTED}/x{number}", {"n": number}))
        await hint_of_stream(world, world.owner.rev)
        waits.append(max(0.0, ((await world.row()).next_attempt_at or 0) - time()))
        await world.query("update indexer.repo set next_attempt_at = null")
        assert await world.attempt()
    assert waits[0] == 0
    assert 40 < waits[1] < 80 < waits[2]


CHANGES_OF_STORED = {
    "a record vanishes": "delete from indexer.record where rkey = '020'",
    "all records vanish": "delete from indexer.record",
    "a value vanishes": "update indexer.record set value = null, value_problem = 'missing' where rkey = '020'",
    "a record becomes another one": "update indexer.record set cid = cid_other where rkey = '020'",
}


@pytest.mark.parametrize("failed_before", [False, True])
@pytest.mark.parametrize("change", CHANGES_OF_STORED)
async def test_stored_record_that_changes_meanwhile_leads_to_the_export(
    world: ResyncWorld, change: str, failed_before: bool
) -> None:
    """Its block was not fetched. Neither is it stored without its value, nor is another record deleted."""
    await synchronized(world)
    world.owner.change(Write.create(f"{WANTED}/new", {"new": True}))
    await hint(world, world.owner.rev)
    if failed_before:  # then an export without the blocks of some records would be accepted
        await world.query(
            "update indexer.repo set last_failure = $1, last_error = ''", FetchFailure.EXPORT_LACKS_RECORDS
        )
    statement = CHANGES_OF_STORED[change].replace("cid_other", f"'\\x{bytes(36).hex()}'")
    world.is_checked = False

    async def change_stored() -> None:
        await world.query(statement)

    world.at["begin"] = change_stored
    assert await world.attempt()
    assert kinds(world)[-1] == "export"
    assert world.results == {"synchronized": 1}
    assert await world.has_all_records()
    assert await world.query("select rkey from indexer.record where value is null or cid = $1", bytes(36)) == []


async def test_too_many_stored_records_are_not_used(world: ResyncWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    await synchronized(world)
    fetched = []
    for bound in (60, 59):
        monkeypatch.setattr("indexer.resync.apply.MAX_STORED", bound)
        world.hosts.blocks = 0
        world.owner.change(Write.update(f"{WANTED}/010", {"bound": bound}))
        await hint(world, world.owner.rev)
        assert await world.attempt()
        assert await world.has_all_records()
        fetched.append(world.hosts.blocks)
    assert fetched[0] < 10
    assert fetched[1] >= 60


async def test_repo_in_doubt_uses_no_stored_record(world: ResyncWorld) -> None:
    """A requested resync fetches every record again."""
    await synchronized(world)
    world.is_checked = False
    await world.query("update indexer.record set value = '{}'")
    await world.db.repos.request_resyncs([world.owner.did])
    await world.query("update indexer.record set value = null, value_problem = 'missing'")
    assert await world.attempt()
    assert await world.query("select rkey from indexer.record where value is null") == []


FUTURE = "3zzzzzzzzzzzz"
"""A rev that no host has."""


async def changed(world: ResyncWorld) -> None:
    world.owner.change(Write.create(f"{WANTED}/new", {"new": True}))


async def unchanged(_world: ResyncWorld) -> None: ...


@pytest.mark.parametrize(
    ("change", "result", "requests"),
    [
        (unchanged, "unchanged", [("record", PDS)]),
        (changed, "synchronized", [("record", PDS), ("record", PDS), ("head", MIRROR)]),
    ],
)
async def test_made_up_rev_causes_no_export_if_the_pds_is_certain(
    world: ResyncWorld, change: Callable[[ResyncWorld], Awaitable[None]], result: str, requests: list[tuple[str, str]]
) -> None:
    """Also beside a relay, which is asked whether it knows a newer rev."""
    await synchronized(world)
    await change(world)
    await hint(world, FUTURE)
    assert await world.attempt()
    assert world.results == {result: 1}
    assert [request for request in world.hosts.requests if request[0] != "blocks"] == requests
    assert (await world.row()).sync_status == "synchronized"
    assert await world.has_all_records()


async def behind_a_relay(world: ResyncWorld) -> None:
    """Let the PDS lack the newest of two commits, as if a backup was restored."""
    await changed(world)
    world.owner.change(Write.create(f"{WANTED}/newest", {"new": True}))
    world.hosts.missing[PDS] = 1
    await hint(world, world.owner.rev)


async def behind_a_verified_commit(world: ResyncWorld) -> None:
    await changed(world)
    await world.live.deliver([received_message("commit", world.owner.commit())])
    world.hosts.missing[PDS] = 1


async def at_the_stored_commit(world: ResyncWorld) -> None:
    await behind_a_verified_commit(world)
    world.hosts.missing[PDS] = 2


async def at_a_former_pds(world: ResyncWorld) -> None:
    """Let the limits of the directory allow no lookup, so that the PDS may be a former one."""
    await behind_a_relay(world)
    world.directory.cached = world.directory.identity(PDS, time() - 86_400)
    world.directory.refreshes = False


async def at_a_former_pds_with_the_stored_commit(world: ResyncWorld) -> None:
    await at_a_former_pds(world)
    world.hosts.missing[PDS] = 2


@pytest.mark.parametrize(
    "state",
    [
        *(behind_a_relay, behind_a_verified_commit, at_the_stored_commit),
        *(at_a_former_pds, at_a_former_pds_with_the_stored_commit),
    ],
)
async def test_old_state_is_not_taken_while_the_relay_may_have_a_newer_one(
    world: ResyncWorld, state: Callable[[ResyncWorld], Awaitable[None]]
) -> None:
    await synchronized(world)
    await state(world)
    await world.query("update indexer.repo set attempts = 0")
    assert await world.attempt()
    assert world.results == {"synchronized": 1}
    assert world.hosts.requests[0] == ("record", PDS)
    assert world.hosts.requests[-1] == ("export", MIRROR)
    assert await world.has_all_records()


async def test_another_tree_with_the_stored_rev_is_taken_only_from_the_last_source(world: ResyncWorld) -> None:
    await synchronized(world)
    world.is_checked = False
    world.owner.repo.write([Write.create(f"{WANTED}/new", {"new": True})], world.owner.key, world.owner.rev)
    world.owner.versions.append(world.owner.repo)
    await hint(world, FUTURE)
    assert await world.attempt()
    assert kinds(world).count("export") == 2
    assert world.results == {"synchronized": 1}


async def test_pds_that_moved_is_looked_up_before_its_old_state_is_taken(world: ResyncWorld) -> None:
    await synchronized(world)
    await changed(world)
    await hint(world, FUTURE)
    world.directory.cached = world.directory.identity("https://former-pds.test", time() - 86_400)
    assert await world.attempt()
    assert world.results == {"postponed": 1}


async def test_export_is_asked_for_if_all_are_below_a_verified_rev(world: ResyncWorld) -> None:
    await synchronized(world)
    await behind_a_verified_commit(world)
    world.hosts.missing[MIRROR] = 1
    await world.query("update indexer.repo set attempts = 0")
    assert await world.attempt()
    assert world.results == {"stale-export": 1}
    assert ("export", PDS) in world.hosts.requests


@pytest.mark.parametrize("records", [500, 700, 2_000])
async def test_two_changes_of_a_repo_with_many_wanted_records_cost_no_export(tmp_path: Path, records: int) -> None:
    owner, policy = account_of({WANTED: records}), policy_of(WANTED)
    stored = Stored(owner.repo.head.cid, stored_of(owner.repo.records, policy))
    paths = [f"{WANTED}/{records // 5:05}", f"{WANTED}/{records // 2:05}"]
    owner.change(*(Write.update(path, {"changed": path}) for path in paths))
    hosts: Any = SimulatedHosts(owner, tmp_path)
    download = await SparseFetch(hosts, "auto", {owner.did: paths[0]}).fetch(owner.did, PDS, policy, stored=stored)
    assert download is not None
    assert dict(download.verify(owner.did, owner.key.public, policy.limits).records()) == stored_of(
        owner.repo.records, policy
    )
    assert download.size < 10_000


async def test_stored_entries_are_read_in_the_order_of_paths(
    db: Database, sql: asyncpg.Connection, tmp_path: Path
) -> None:
    """It differs from that of collections. A record without its value has no CID that is in any tree."""
    world = ResyncWorld(db, sql, tmp_path, policy=policy_of("com.example.note", "com.example.note.draft"))
    paths = [f"{name}/{number}" for name in ("com.example.note.draft", "com.example.note") for number in range(3)]
    world.owner.change(*(Write.create(path, {"path": path}) for path in paths))
    await db.repos.add([world.owner.did])
    assert await world.attempt()
    stored = stored_of(world.owner.repo.records, world.policy)
    assert list((await db.resyncs.entries(world.owner.did, 6)).items()) == list(stored.items())
    world.is_checked = False
    await world.query("update indexer.record set value = null, value_problem = 'missing' where rkey = '0'")
    found = await db.resyncs.entries(world.owner.did, 6)
    assert {path for path, cid in found.items() if cid != stored[path]} == {paths[0].encode(), paths[3].encode()}
    assert len(await db.resyncs.entries(world.owner.did, 5)) == 5


@pytest.mark.parametrize("records", [60, 150])
async def test_new_record_of_a_small_repo_costs_no_export(tmp_path: Path, records: int) -> None:
    owner, policy = account_of({FEW: records, MANY: 20}), policy_of(FEW)
    stored, path = Stored(owner.repo.head.cid, stored_of(owner.repo.records, policy)), f"{FEW}/{records // 2:05}a"
    owner.change(Write.create(path, {"new": True}))
    hosts: Any = SimulatedHosts(owner, tmp_path)
    assert await SparseFetch(hosts, "auto", {owner.did: path}).fetch(owner.did, PDS, policy, stored=stored) is not None
