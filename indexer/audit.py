"""`indexer audit`: repos fetched again, and each of their records compared with the database. Nothing is written.

What is compared is what a resync would write: the head, and of each record of the chosen collections the CID and what
is made of its block. The network moves meanwhile, so an export that is older than our state is fetched again, and the
daemon is given some time to come up to one that is newer.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from itertools import islice
from time import monotonic, time
from typing import Any, NamedTuple, ParamSpec, TypeVar

from indexer.atproto.cid import SIZE, cid_text
from indexer.atproto.crypto import PublicKey, parse_did_key
from indexer.atproto.record import Problem, decode_record
from indexer.clients import pds_client_of, requests_of, resolver_of
from indexer.config import Settings
from indexer.errors import BrokenInvariantError, UnavailableError, UpstreamError
from indexer.identity import Resolver
from indexer.pds import PdsClient
from indexer.reasons import FetchFailure, Rejection
from indexer.store import DatabaseError, Reading, Store, StoredRecord
from indexer.sync.diff import Diff, Difference, without_value
from indexer.sync.planning import Policy, chosen, is_future
from indexer.sync.repo import Head, Repo, SyncStatus
from indexer.sync.verify import Snapshot, verify_snapshot

SHOWN = 100  # differences of one repo
MOST_AT_ONCE = 16  # repos: each may have a connection, and one thread compares for all of them
UNKNOWN = "not known here"
NOTHING = (None, None, None)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pace:
    """How often an export is fetched while it is older than our state; and seconds: that the daemon has to come up to
    a newer one, and between two looks at how far it is.
    """

    fetches: int = 5
    patience: float = 10.0
    poll: float = 0.2


class NotComparedError(Exception):
    """Why a repo can't be compared, as our own row has it: a kind of reason, and behind a colon what more there is."""


class Finding(NamedTuple):
    """A difference: what is so at `place`, the AT-URI of a record or a DID."""

    place: str
    what: str


@dataclass(slots=True)
class Verdict:
    """What came of one repo: how many records were compared, how many differences there are, and the first of them.

    `hindrance` says why it was not compared, or not all of it: a kind of reason, and behind a colon what more there is.
    """

    did: str
    records: int = 0
    differences: int = 0
    shown: list[Finding] = field(default_factory=list)
    hindrance: str | None = None

    def add(self, place: str, what: str) -> None:
        self.differences += 1
        if len(self.shown) < SHOWN:
            self.shown.append(Finding(place, what))


@dataclass(slots=True)
class Tally:
    """The verdicts on many repos. `repos` are those that were compared; of the others, why not, by kind of reason."""

    repos: int = 0
    equal: int = 0
    records: int = 0
    differences: int = 0
    hindrances: Counter[str] = field(default_factory=Counter)

    def add(self, verdict: Verdict) -> None:
        self.records += verdict.records
        self.differences += verdict.differences
        if verdict.hindrance is not None:
            self.hindrances[verdict.hindrance.partition(":")[0]] += 1
            return
        self.repos += 1
        self.equal += not verdict.differences

    @property
    def hindered(self) -> int:
        return self.hindrances.total()

    @property
    def unknown(self) -> int:
        return self.hindrances[UNKNOWN]


class Comparison:
    """A proven snapshot of a repo against its stored records, which come in chunks: `take` each in path order, then
    `end`. Holds one chunk at a time, and of the differences those that are shown.
    """

    def __init__(self, snapshot: Snapshot, policy: Policy) -> None:
        self.verdict = Verdict(snapshot.did)
        self._snapshot = snapshot
        self._policy = policy
        self._diff = Diff(entry for entry in snapshot.records() if chosen(entry[0], policy))
        self._unjudged = 0

    def take(self, chunk: Sequence[StoredRecord]) -> None:
        self.verdict.records += len(chunk)
        judged = {record.path: self._judge(record) for record in chunk}
        entries = [(path, without_value(cid) if judged[path] is False else cid) for path, cid, *_ in chunk]
        for difference in self._diff.against(entries):
            judged.pop(difference.path, None)
            self._note(difference)
        self._unjudged += sum(right is None for right in judged.values())

    def end(self) -> None:
        for difference in self._diff.rest():
            self._note(difference)
        if self._unjudged:
            self.verdict.hindrance = f"{FetchFailure.EXPORT_LACKS_RECORDS}: {self._unjudged} records"

    def _judge(self, record: StoredRecord) -> bool | None:
        """Whether what is stored beside a CID is what its block says; None if the export doesn't have the block.

        Where values are not kept, there is nothing to be judged but those of before.
        """
        stored = (record.value, record.problem, record.original)
        if stored == NOTHING and not self._policy.store_values:
            return True
        block = self._snapshot.block_of(record.cid)
        if block is None:
            return True if record.problem == Problem.MISSING else None
        value = decode_record(block, _collection(record.path), self._policy.limits)
        return stored[1:] == value[1:] and same_json(record.value, value.json)

    def _note(self, difference: Difference) -> None:
        path, ours, theirs = difference
        if ours is None:
            self.verdict.records += 1
            what = "missing here"
        elif theirs is None:
            kept = self._policy.collections.matches(_collection(path))
            what = "not in the repo" if kept else "not in the chosen collections"
        elif ours == without_value(theirs):
            what = "other value"
        else:
            what = f"other CID: ours {cid_text(ours[:SIZE])}, the host's {cid_text(theirs)}"
        self.verdict.add(f"at://{self.verdict.did}/{path.decode()}", what)


class Audit:
    """Repos compared, so many at once. `resolver` and `pds` ask the network."""

    def __init__(
        self,
        store: Store,
        resolver: Resolver,
        pds: PdsClient,
        policy: Policy,
        *,
        at_once: int,
        pace: Pace | None = None,
    ) -> None:
        self._store = store
        self._resolver = resolver
        self._pds = pds
        self._policy = policy
        self._at_once = at_once
        self._pace = pace or Pace()
        self._thread = ThreadPoolExecutor(1, "audit")  # so that downloads go on meanwhile

    async def verdicts(self, dids: Iterable[str]) -> AsyncGenerator[Verdict]:
        """One for each, as they come. Raises `DatabaseError`."""
        waiting = iter(dids)
        running: set[asyncio.Task[Verdict]] = set()
        try:
            while True:
                for did in islice(waiting, self._at_once - len(running)):
                    running.add(asyncio.create_task(self._verdict(did), name=f"audit of {did}"))
                if not running:
                    return
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    running.remove(task)
                    yield task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def close(self) -> None:
        self._thread.shutdown()

    async def _verdict(self, did: str) -> Verdict:
        try:
            return await self._compared(did)
        except DatabaseError:
            raise
        except (NotComparedError, UnavailableError) as error:
            return Verdict(did, hindrance=str(error))
        except UpstreamError as error:
            return Verdict(did, hindrance=f"{FetchFailure.EXPORT_REJECTED}: {error}")
        except BrokenInvariantError as error:  # rows that no path is made of, or an index that is damaged
            verdict = Verdict(did)
            verdict.add(did, str(error))
            return verdict

    async def _compared(self, did: str) -> Verdict:
        _standing((await self._store.repos([did])).get(did))
        identity = await self._resolver.resolve(did)
        if identity.signing_key is None or identity.pds is None:
            raise UnavailableError(FetchFailure.IDENTITY_MISSING, identity.problem or "")
        key = parse_did_key(identity.signing_key)
        left = self._pace.fetches
        while True:
            left -= 1
            try:
                return await self._fetched(did, identity.pds, key)
            except UnavailableError as error:
                if error.reason is not FetchFailure.EXPORT_STALE or not left:
                    raise

    async def _fetched(self, did: str, host: str, key: PublicKey) -> Verdict:
        async with self._pds.fetch_repo(did, host) as spool:
            proof = partial(verify_snapshot, did, spool.root, spool.block, key, self._policy.limits)
            snapshot = await self._in_thread(proof)
            if is_future(snapshot.head.rev, time(), self._policy.limits):
                raise UpstreamError(Rejection.FUTURE_REV, snapshot.head.rev)
            return await self._met(snapshot)

    async def _met(self, snapshot: Snapshot) -> Verdict:
        """The verdict at the moment when our state is the snapshot's, or when it should have been."""
        deadline = monotonic() + self._pace.patience
        theirs = snapshot.head
        while True:
            async with self._store.reading(snapshot.did) as reading:
                ours = _standing(await reading.repo())
                if ours.rev > theirs.rev:
                    raise UnavailableError(FetchFailure.EXPORT_STALE, f"{theirs.rev} < {ours.rev}")
                if ours.rev == theirs.rev:
                    return await self._compare(snapshot, ours, reading)
            if monotonic() >= deadline:
                verdict = Verdict(snapshot.did)
                verdict.add(snapshot.did, f"behind: ours {ours.rev}, the host's {theirs.rev}")
                return verdict
            await asyncio.sleep(self._pace.poll)

    async def _compare(self, snapshot: Snapshot, ours: Head, reading: Reading) -> Verdict:
        comparison = Comparison(snapshot, self._policy)
        if ours.data != snapshot.head.data:
            what = f"other data: ours {cid_text(ours.data)}, the host's {cid_text(snapshot.head.data)}"
            comparison.verdict.add(snapshot.did, what)
        async for chunk in reading.records():
            await self._in_thread(comparison.take, chunk)
        await self._in_thread(comparison.end)
        return comparison.verdict

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **_: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *args))


@asynccontextmanager
async def auditing(settings: Settings, store: Store, pace: Pace | None = None) -> AsyncIterator[Audit]:
    """An audit by the settings; hosts that the daemon leaves alone are left alone by it, too."""
    async with requests_of(settings) as outbound:
        outbound.hosts.load(await store.load_hosts())
        audit = Audit(
            store,
            resolver_of(settings, outbound),
            pds_client_of(settings, outbound),
            settings.policy,
            at_once=at_once(settings),
            pace=pace,
        )
        try:
            yield audit
        finally:
            audit.close()


def at_once(settings: Settings) -> int:
    """Repos at once, and connections to the database."""
    return min(settings.resync_workers, MOST_AT_ONCE)


def same_json(one: str | None, other: str | None) -> bool:
    """Whether two texts are the same JSON, as `jsonb` means it: numbers by their value, maps in any order."""
    if one is None or other is None:
        return one is other
    try:
        return bool(_parsed(one) == _parsed(other))
    except RecursionError:  # nothing that we have written is as deep
        return False


def _parsed(text: str) -> Any:
    return json.loads(text, parse_int=_number, parse_float=_number)


def _number(text: str) -> tuple[Decimal]:
    """Exact, and unlike `true`, which Python takes for 1."""
    return (Decimal(text),)


def _collection(path: bytes) -> str:
    return path.partition(b"/")[0].decode()


def _standing(repo: Repo | None) -> Head:
    """The state of a repo that can be compared; raises `NotComparedError` for any other."""
    if repo is None:
        raise NotComparedError(UNKNOWN)
    if not repo.active:
        raise NotComparedError(f"inactive: {repo.hosting_status or 'by the relay'}")
    if repo.status is not SyncStatus.SYNCHRONIZED or repo.head is None:
        raise NotComparedError(f"not synchronized: {repo.reason}")
    return repo.head
