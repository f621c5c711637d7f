"""Letters taken up again: each outcome, keys that are there now, and what happens beside it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from math import inf
from time import time
from typing import Any

import asyncpg
import pytest

from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.syntax import CollectionFilter
from indexer.errors import UnavailableError
from indexer.identity import Freshness, Identities
from indexer.localnet.relay import error_frame
from indexer.localnet.repo import Write
from indexer.metrics import Metrics
from indexer.reasons import Desync, FetchFailure, Rejection
from indexer.service.replay import TRIES, UNKNOWN, UNTRIED, Replay, Replayed
from indexer.store import Store
from indexer.sync.batch import DEAD_LETTER_BYTES
from indexer.sync.identity import StoredIdentity
from indexer.sync.plan import Batch, DeadLetter, KeptEvent, RepoWrite
from indexer.sync.planning import Policy
from indexer.sync.repo import Head, Outcome, Repo, SyncStatus
from tests.service.parties import COLLECTIONS, Owner
from tests.serving import until
from tests.store.rows import held_up
from tests.sync.people import EVERYTHING, frame

RELAY = "wss://relay.test"
PATH = f"{COLLECTIONS[0]}/new"
RECORD = {"$type": COLLECTIONS[0]}


class Directory:
    """Says of the owner what `key` and `pds` are; is down with `error`. `asked` are its look-ups."""

    def __init__(self, owner: Owner) -> None:
        self.key: str | None = owner.key.public.did_key()
        self.pds = "https://pds.test"
        self.error: UnavailableError | None = None
        self.asked: list[str] = []

    async def resolve(self, did: str) -> StoredIdentity:
        self.asked.append(did)
        if self.error is not None:
            raise self.error
        return StoredIdentity(did, None, self.pds, self.key, time(), problem=None if self.key else "no key")


class Desk:
    """A replay, and what it stands on."""

    def __init__(self, store: Store, sql: asyncpg.Connection) -> None:
        self.store = store
        self.sql = sql
        self.owner = Owner("ada")
        self.directory = Directory(self.owner)

    @asynccontextmanager
    async def replay(self, policy: Policy = EVERYTHING, *, of_pds: bool = False) -> AsyncIterator[Replay]:
        """As a process of its own: nothing but the database is remembered."""
        fresh = Freshness(missing=0.0)
        identities = Identities(self.directory, self.store, Metrics(), clock=time, refresh_rate=inf, freshness=fresh)
        try:
            yield Replay(self.store, identities, policy, of_pds=of_pds, patience=5.0)
        finally:
            await identities.close()

    async def take(self, number: int, policy: Policy = EVERYTHING, *, of_pds: bool = False) -> Replayed:
        async with self.replay(policy, of_pds=of_pds) as replay:
            return await replay.take(number)

    async def synchronized(self, **fields: Any) -> Repo:
        """The owner's row, at the head that it has now."""
        head = self.owner.repo.head
        repo = Repo(self.owner.did, 1, SyncStatus.SYNCHRONIZED, None, Head(head.rev, head.data, head.cid))
        repo = replace(repo, **fields)
        assert not await self.store.apply(Batch((RepoWrite(0, repo),)))
        return repo

    async def in_progress(self) -> Repo:
        """The owner's row, claimed by a worker; it had records before."""
        await self.synchronized(status=SyncStatus.DESYNCHRONIZED, reason=Desync.REQUESTED)
        [claimed] = await self.store.claim(1, range(256), 60.0, time())
        return claimed

    async def letter(self, kind: str, payload: dict[str, Any], **fields: Any) -> int:
        return await self.kept(frame(kind, payload), kind=kind, **fields)

    async def kept(self, message: bytes, **fields: Any) -> int:
        values = {"seq": 1, "did": self.owner.did, "kind": "", "reason": Rejection.SIGNATURE_INVALID, "detail": ""}
        await self.store.apply(Batch(dead_letters=(DeadLetter(RELAY, frame=message, **values | fields),)))  # type: ignore[arg-type]
        number: int = await self.sql.fetchval("select max(id) from indexer.dead_letter")
        return number

    async def repo(self) -> Repo | None:
        return (await self.store.repos([self.owner.did])).get(self.owner.did)

    async def left(self) -> list[tuple[int, str]]:
        """Number and reason of each letter that there is."""
        return [tuple(row) for row in await self.sql.fetch("select id, reason from indexer.dead_letter order by id")]

    async def records(self) -> set[str]:
        rows = await self.sql.fetch("select collection || '/' || rkey from indexer.record")
        return {path for (path,) in rows}


@pytest.fixture
def desk(store: Store, sql: asyncpg.Connection) -> Desk:
    return Desk(store, sql)


async def test_what_extends_the_chain_is_applied(desk: Desk) -> None:
    await desk.synchronized()
    number = await desk.letter("commit", desk.owner.write(Write.create(PATH, RECORD)))
    assert await desk.take(number) == Replayed(number, Outcome.APPLIED)
    repo = await desk.repo()
    assert repo is not None
    assert repo.head is not None
    assert (repo.head.rev, repo.status) == (desk.owner.rev, SyncStatus.SYNCHRONIZED)
    assert await desk.records() == {PATH}
    assert await desk.left() == []
    assert await desk.sql.fetchval("select count(*) from indexer.cursor") == 0
    assert [row["action"] for row in await desk.sql.fetch("select action from atproto.changes")][-1] == "create"


async def test_what_is_superseded_changes_nothing(desk: Desk) -> None:
    number = await desk.letter("commit", desk.owner.write(Write.create(PATH, RECORD)))
    desk.owner.write(Write.delete(PATH))
    before = await desk.synchronized()
    assert await desk.take(number) == Replayed(number, Outcome.REPLAYED)
    assert (await desk.repo(), await desk.records(), await desk.left()) == (before, set(), [])


async def test_what_breaks_the_chain_has_the_repo_fetched(desk: Desk) -> None:
    await desk.synchronized()
    desk.owner.write(Write.create(PATH, RECORD))
    number = await desk.letter("commit", desk.owner.write(Write.delete(PATH)))
    assert await desk.take(number) == Replayed(number, Outcome.DESYNCHRONIZED, Desync.CHAIN_BREAK)
    repo = await desk.repo()
    assert repo is not None
    assert (repo.status, repo.reason) == (SyncStatus.DESYNCHRONIZED, Desync.CHAIN_BREAK)
    assert await desk.left() == []


async def test_what_comes_during_a_resync_is_kept_for_its_end(desk: Desk) -> None:
    claimed = await desk.in_progress()
    message = frame("commit", desk.owner.write(Write.create(PATH, RECORD)))
    number = await desk.kept(message)
    assert await desk.take(number) == Replayed(number, Outcome.BUFFERED)
    async with desk.store.resync(claimed) as transaction:
        locked = await transaction.lock()
        assert locked is not None
        assert (locked.buffered_events, locked.buffered_bytes) == (1, len(message))
        [kept] = await transaction.kept()
    assert (kept.relay, kept.frame) == (RELAY, message)
    assert await desk.left() == []


@pytest.mark.parametrize(
    "message",
    [frame("later", {}), frame("info", {"name": "x"}), error_frame("x", "y")],
    ids=["later", "info", "error"],
)
async def test_what_is_of_no_repo_is_ignored(desk: Desk, message: bytes) -> None:
    number = await desk.kept(message, did=None)
    assert await desk.take(number) == Replayed(number, Outcome.IGNORED)
    assert await desk.left() == []


async def test_the_choice_of_accounts_and_collections_holds(desk: Desk) -> None:
    payload = desk.owner.write(Write.create(PATH, RECORD), Write.create(f"{COLLECTIONS[1]}/b", RECORD))
    number = await desk.letter("commit", payload | {"since": None})
    assert await desk.take(number, replace(EVERYTHING, track_all=False)) == Replayed(number, Outcome.IGNORED)
    assert (await desk.repo(), await desk.left()) == (None, [])

    await desk.synchronized()
    number = await desk.letter(
        "commit",
        desk.owner.write(Write.create(f"{COLLECTIONS[0]}/c", RECORD), Write.create(f"{COLLECTIONS[1]}/d", RECORD)),
    )
    chosen = replace(EVERYTHING, collections=CollectionFilter([COLLECTIONS[1]]), track_all=False)
    assert await desk.take(number, chosen) == Replayed(number, Outcome.APPLIED)
    assert await desk.records() == {f"{COLLECTIONS[1]}/d"}


async def test_a_key_that_the_directory_has_now(desk: Desk) -> None:
    """Whatever was known of it before, and however shortly."""
    await desk.synchronized()
    desk.owner.swap_key()
    number = await desk.letter("commit", desk.owner.write(Write.create(PATH, RECORD)))
    again = await desk.take(number)
    assert (again.outcome, again.why, again.stays) == (Outcome.REJECTED, Rejection.SIGNATURE_INVALID, True)

    desk.directory.key = None
    again = await desk.take(number)
    assert (again.why, again.before) == (Rejection.NO_SIGNING_KEY, Rejection.SIGNATURE_INVALID)
    assert await desk.left() == [(number, "no-signing-key")]

    desk.directory.key = desk.owner.key.public.did_key()
    assert await desk.take(number) == Replayed(number, Outcome.APPLIED)
    assert len(desk.directory.asked) == 4, "the first answer was asked for once more: a directory may be behind"
    assert await desk.left() == []


async def test_a_forged_one_stays_as_it_was(desk: Desk) -> None:
    before = await desk.synchronized()
    key, desk.owner.key = desk.owner.key, Owner("mallory").key
    number = await desk.letter("commit", desk.owner.write(Write.create(PATH, RECORD)))
    desk.owner.key = key
    stood = await desk.sql.fetchrow("select * from indexer.dead_letter")
    for _ in range(2):
        assert (await desk.take(number)).why is Rejection.SIGNATURE_INVALID
    assert await desk.sql.fetchrow("select * from indexer.dead_letter") == stood
    assert (await desk.repo(), await desk.records()) == (before, set())


@pytest.mark.slow
@pytest.mark.parametrize("claimed", [False, True])
@pytest.mark.parametrize("known", ["nothing", "a key", "a key that has changed"])
async def test_without_a_directory_nothing_is_believed_nor_settled(desk: Desk, claimed: bool, known: str) -> None:
    """On the stream the repo would be desynchronized, as its message would be lost."""
    before = await (desk.in_progress() if claimed else desk.synchronized())
    if known != "nothing":
        old = StoredIdentity(desk.owner.did, None, "https://pds.test", desk.directory.key, time())
        await desk.store.save([replace(old, stale=known != "a key")])
    desk.owner.swap_key()
    number = await desk.letter("commit", desk.owner.write(Write.create(PATH, RECORD)))
    desk.directory.error = UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, "502")
    replayed = await desk.take(number)
    assert (replayed.outcome, replayed.stays) == (UNTRIED, True)
    assert replayed.detail.startswith("identity-unavailable: ")
    assert (await desk.repo(), await desk.left()) == (before, [(number, "signature-invalid")])
    assert await desk.sql.fetchval("select count(*) from indexer.kept_event") == 0


async def test_a_limit_that_is_wider_now(desk: Desk) -> None:
    await desk.synchronized()
    number = await desk.letter(
        "commit", desk.owner.write(Write.create(PATH, RECORD)), reason=Rejection.FRAME_TOO_LARGE, did=None, seq=None
    )
    narrow = replace(EVERYTHING, limits=replace(DEFAULT_LIMITS, commit_ops=0))
    again = await desk.take(number, narrow)
    assert (again.why, again.before) == (Rejection.TOO_MANY_OPS, Rejection.FRAME_TOO_LARGE)
    row = await desk.sql.fetchrow(
        "select did, kind, reason, detail, bucket = indexer.bucket_of(did) from indexer.dead_letter"
    )
    assert tuple(row or ()) == (desk.owner.did, "#commit", "too-many-ops", "1 ops", True)
    assert await desk.take(number) == Replayed(number, Outcome.APPLIED)


@pytest.mark.parametrize(
    ("size", "reason"), [(DEAD_LETTER_BYTES, Rejection.SIGNATURE_INVALID), (0, Rejection.FRAME_TOO_LARGE)]
)
async def test_a_frame_that_is_not_whole_is_left_alone(desk: Desk, size: int, reason: Rejection) -> None:
    number = await desk.kept(bytes(size), reason=reason)
    replayed = await desk.take(number)
    assert (replayed.outcome, replayed.stays) == (UNTRIED, True)
    assert "not kept whole" in replayed.detail
    assert await desk.left() == [(number, reason)]
    assert desk.directory.asked == []


async def test_an_empty_message_is_whole(desk: Desk) -> None:
    number = await desk.kept(b"", reason=Rejection.FRAME_MALFORMED, did=None)
    assert (await desk.take(number)).why is Rejection.FRAME_MALFORMED


async def test_an_unknown_letter(desk: Desk) -> None:
    replayed = await desk.take(5)
    assert (replayed.outcome, replayed.known, replayed.stays) == (UNKNOWN, False, False)


async def test_an_account_is_heard_in_its_order(desk: Desk) -> None:
    """What a relay said before its newest word is no news."""
    gone, back = desk.owner.account(active=False, status="deactivated"), desk.owner.account(active=True)
    before = await desk.synchronized(hosting_relay=RELAY, hosting_seq=back["seq"])
    number = await desk.letter("account", gone, reason=Rejection.FIELD_INVALID)
    assert await desk.take(number) == Replayed(number, Outcome.REPLAYED)
    assert await desk.repo() == before
    number = await desk.letter("account", gone | {"seq": 99}, reason=Rejection.FIELD_INVALID)
    assert await desk.take(number) == Replayed(number, Outcome.APPLIED)
    repo = await desk.repo()
    assert repo is not None
    assert (repo.active, repo.hosting_seq) == (False, 99)


async def test_a_change_of_identity_is_looked_up_at_once(desk: Desk) -> None:
    """A daemon beside it would not know that it has to."""
    await desk.synchronized()
    async with desk.replay() as replay:
        number = await desk.letter("commit", desk.owner.write(Write.create(PATH, RECORD)))
        assert (await replay.take(number)).outcome is Outcome.APPLIED
    desk.directory.key = Owner("bob").key.public.did_key()
    number = await desk.letter("identity", desk.owner.identity(), reason=Rejection.FIELD_INVALID)
    assert await desk.take(number) == Replayed(number, Outcome.APPLIED)
    stored = (await desk.store.load([desk.owner.did]))[desk.owner.did]
    assert (stored.signing_key, stored.stale) == (desk.directory.key, False)


async def test_a_stream_of_a_hosts_own_speaks_for_its_accounts_only(desk: Desk) -> None:
    await desk.synchronized()
    number = await desk.letter("commit", desk.owner.write(Write.create(PATH, RECORD)), reason=Rejection.WRONG_HOST)
    assert (await desk.take(number, of_pds=True)).why is Rejection.WRONG_HOST
    desk.directory.pds = RELAY.replace("wss", "https")
    assert await desk.take(number, of_pds=True) == Replayed(number, Outcome.APPLIED)


class Moving(Store):
    """Before each of the first `times` attempts to settle a letter, its repo changes."""

    times = 0
    move: Callable[[], Awaitable[object]]

    async def settle_letter(self, number: int, batch: Batch) -> bool:
        if self.times:
            self.times -= 1
            await self.move()
        return await super().settle_letter(number, batch)


@pytest.fixture
async def moving(desk: Desk, database: str) -> AsyncIterator[Moving]:
    store = await Moving.open(database, connections=2)
    store.move = lambda: desk.store.amend(desk.owner.did, lambda repo: replace(repo, version=repo.version + 1))
    desk.store = store
    yield store
    await store.close()


@pytest.mark.parametrize("times", [1, TRIES - 1])
async def test_a_repo_that_moves_meanwhile(desk: Desk, moving: Moving, times: int) -> None:
    await desk.synchronized()
    number = await desk.letter("commit", desk.owner.write(Write.create(PATH, RECORD)))
    moving.times = times
    assert await desk.take(number) == Replayed(number, Outcome.APPLIED)
    repo = await desk.repo()
    assert repo is not None
    assert (repo.version, await desk.records(), await desk.left()) == (times + 2, {PATH}, [])


async def test_a_repo_that_never_stands_still(desk: Desk, moving: Moving) -> None:
    before = await desk.synchronized()
    number = await desk.letter("commit", desk.owner.write(Write.create(PATH, RECORD)))
    moving.times = TRIES + 1
    replayed = await desk.take(number)
    assert (replayed.outcome, moving.times) == (UNTRIED, 1)
    assert "changed under" in replayed.detail
    assert await desk.repo() == replace(before, version=before.version + TRIES)
    assert (await desk.records(), await desk.left()) == (set(), [(number, "signature-invalid")])


async def test_the_live_path_was_there_first(desk: Desk, moving: Moving) -> None:
    """The relay sent the commit again, and this time it was taken."""
    await desk.synchronized()
    message = frame("commit", desk.owner.write(Write.create(PATH, RECORD)))
    number, same = await desk.kept(message), await desk.kept(message)
    moving.move, moving.times = lambda: desk.take(same), 1
    assert await desk.take(number) == Replayed(number, Outcome.REPLAYED)
    assert (await desk.records(), await desk.left()) == ({PATH}, [])
    assert await desk.sql.fetchval("select count(*) from atproto.changes where action = 'create'") == 1


@pytest.mark.parametrize("kind", ["commit", "later"])
async def test_a_letter_that_two_take_up_is_settled_once(desk: Desk, kind: str) -> None:
    """Whether the first changes the repo or nothing at all: the other one waits for it, and finds nothing to do."""
    await desk.in_progress()
    number = await desk.letter(kind, desk.owner.write(Write.create(PATH, RECORD)))
    await desk.store.save([await desk.directory.resolve(desk.owner.did)])
    async with desk.sql.transaction():
        await desk.sql.execute("select from indexer.dead_letter for update")
        both = asyncio.gather(desk.take(number), desk.take(number))
        observer = await asyncpg.connect(dsn=desk.store._dsn)
        await until(lambda: held_up(observer, 2))
        await observer.close()
    one, other = sorted(await both, key=lambda replayed: not replayed.known)
    assert one.outcome is (Outcome.BUFFERED if kind == "commit" else Outcome.IGNORED)
    assert other == Replayed(number, UNKNOWN)
    repo = await desk.repo()
    assert repo is not None
    assert repo.buffered_events == (kind == "commit")
    assert await desk.sql.fetchval("select count(*) from indexer.kept_event") == (kind == "commit")


async def test_a_letter_that_was_dropped_meanwhile_has_no_effect(desk: Desk, moving: Moving) -> None:
    before = await desk.synchronized()
    number = await desk.letter("commit", desk.owner.write(Write.create(PATH, RECORD)))
    moving.move, moving.times = lambda: desk.sql.execute("delete from indexer.dead_letter"), 1
    assert await desk.take(number) == Replayed(number, UNKNOWN)
    assert (await desk.repo(), await desk.records()) == (before, set())
    assert await desk.sql.fetchval("select count(*) from atproto.changes where action = 'create'") == 0


async def test_what_was_kept_and_refused_by_the_drain_can_be_taken_up_too(desk: Desk) -> None:
    """Its relay is the one that it came from, whatever has come since."""
    await desk.synchronized()
    kept = KeptEvent(desk.owner.did, "wss://other.test", 7, b"")
    message = frame("account", desk.owner.account(active=False))
    await desk.store.apply(
        Batch(dead_letters=(DeadLetter(kept.relay, 7, kept.did, "account", Rejection.FIELD_INVALID, "", message),))
    )
    assert (await desk.take(1)).outcome is Outcome.APPLIED
    repo = await desk.repo()
    assert repo is not None
    assert repo.hosting_relay == "wss://other.test"
