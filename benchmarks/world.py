"""A generated world on disk: accounts, what the database holds of them at first, commits or exports, and the truth.

It is made once for its `Spec` and kept under the system's temporary directory. Commits are signed and framed, exports
are whole CAR files, before any clock starts. Messages are numbered from 1; their sequence numbers are `AHEAD` more.

    accounts    a line of JSON each, see `Account`
    rows        what the database holds before, for COPY into indexer.record
    stream      websocket messages, each behind its frame header; `offsets` says where each begins, 8 bytes each
    exports     CAR files, one behind the other
"""

import os
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, astuple, dataclass
from functools import cached_property, partial
from hashlib import sha256
from mmap import ACCESS_READ, mmap
from multiprocessing import get_context
from pathlib import Path
from random import Random

import orjson

from benchmarks.people import Person
from indexer.atproto.cid import cid_of
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.record import decode_record
from indexer.localnet.relay import message_frame
from indexer.localnet.repo import Change, Commit
from indexer.sync.shard import bucket_of

FORMAT = 2  # of the files; another number makes every world anew
AHEAD = 1_000_000  # sequence numbers before the first message's, for what a benchmark sends ahead of them

Rows = dict[str, bytes]
"""Path to record CID."""


@dataclass(frozen=True, slots=True)
class Spec:
    """`repos` repos of `records` records on average, log-normal with `sigma`; then `commits` commits on them.

    `huge` is one more repo of so many records, if not 0. With `exports` there is a CAR file of each repo, and what the
    database holds at first differs from it in one record of a hundred.
    """

    repos: int
    records: int
    sigma: float
    commits: int = 0
    huge: int = 0
    exports: bool = False
    seed: int = 0

    def sizes(self) -> list[int]:
        random, mu = Random(self.seed), -(self.sigma**2) / 2
        drawn = [self.records * random.lognormvariate(mu, self.sigma) for _ in range(self.repos)]
        return [max(1, round(size)) for size in drawn] + [self.huge] * bool(self.huge)

    def turns(self) -> list[list[int]]:
        """The numbers of each repo's commits: in every round each repo has one, in another order."""
        random, turns = Random(self.seed), [list[int]() for _ in range(self.repos)]
        order = list(range(self.repos))
        for seq in range(1, self.commits + 1):
            if (seq - 1) % self.repos == 0:
                random.shuffle(order)
            turns[order[(seq - 1) % self.repos]].append(seq)
        return turns + [[]] * bool(self.huge)


@dataclass(frozen=True, slots=True)
class Head:
    """A signed commit; CIDs in hex."""

    rev: str
    data: str
    commit: str


@dataclass(frozen=True, slots=True)
class Account:
    """One account's repo, as the database has it `before` and must have it `after`.

    `key` is a did:key; `digest` is that of `digest_of` over the `records` records that there are in the end; `changes`
    is how many of them, by action, lead there; `seqs` are the numbers of its commits; `export` is where its CAR file
    begins and ends.
    """

    did: str
    key: str
    before: Head
    after: Head
    records: int
    digest: str
    changes: Mapping[str, int]
    seqs: list[int]
    export: tuple[int, int]


def digest_of(rows: Rows) -> str:
    """SHA-256 over path and CID of all records, in the order of (collection, rkey)."""
    digest = sha256()
    for path in sorted(rows, key=lambda path: path.split("/")):
        digest.update(path.encode() + rows[path])
    return digest.hexdigest()


class World:
    """A world that has been made."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        lines = (directory / "accounts").read_bytes().splitlines()
        self.accounts = [_account(orjson.loads(line)) for line in lines]

    @cached_property
    def offsets(self) -> "array[int]":
        offsets = array("Q")
        offsets.frombytes((self.directory / "offsets").read_bytes())
        return offsets

    @cached_property
    def stream(self) -> mmap:
        return _map(self.directory / "stream")

    @cached_property
    def exports(self) -> mmap:
        return _map(self.directory / "exports")

    def frames(self, seqs: range) -> Iterator[bytes]:
        """The messages numbered so, without the websocket's headers."""
        for seq in seqs:
            message = self.stream[self.offsets[seq - 1] : self.offsets[seq]]
            yield message[_header_size(message[1]) :]


def _account(fields: dict[str, object]) -> Account:
    before, after = Head(**fields.pop("before")), Head(**fields.pop("after"))  # type: ignore[arg-type]
    return Account(before=before, after=after, **fields)  # type: ignore[arg-type]


def _map(path: Path) -> mmap:
    with path.open("rb") as file:
        return mmap(file.fileno(), 0, access=ACCESS_READ)


def load_world(spec: Spec, progress: Callable[[Iterable["Grown"], int], Iterable["Grown"]]) -> World:
    """The world of `spec`, made if there is none yet; `progress` passes on what it is given, and shows how much."""
    name = "-".join(str(item) for item in (FORMAT, *astuple(spec)))
    directory = Path(tempfile.gettempdir()) / f"indexer-benchmarks-{os.getuid()}" / name
    if not directory.exists():
        directory.parent.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent) as making:
            _make(spec, Path(making), progress)
            Path(making).rename(directory)
            Path(making).mkdir()  # for its context to remove
    return World(directory)


@dataclass(frozen=True, slots=True)
class Grown:
    """One account as a worker hands it over; `account.export` is yet relative."""

    account: Account
    rows: bytes
    messages: list[tuple[int, bytes]]
    export: bytes


def _make(spec: Spec, directory: Path, progress: Callable[[Iterable[Grown], int], Iterable[Grown]]) -> None:
    sizes, turns = spec.sizes(), spec.turns()
    messages = [b""] * spec.commits
    end = 0
    with (
        ProcessPoolExecutor(mp_context=get_context("spawn")) as pool,
        (directory / "accounts").open("wb") as accounts,
        (directory / "rows").open("wb") as rows,
        (directory / "exports").open("wb") as exports,
    ):
        grown = pool.map(partial(_grow, spec), range(len(sizes)), sizes, turns, chunksize=4)
        for item in progress(grown, len(sizes)):
            start, end = end, end + len(item.export)
            accounts.write(orjson.dumps(asdict(item.account) | {"export": (start, end)}) + b"\n")
            rows.write(item.rows)
            exports.write(item.export)
            for seq, message in item.messages:
                messages[seq - 1] = message
    offsets = array("Q", [0])
    with (directory / "stream").open("wb") as stream:
        for message in messages:
            stream.write(message)
            offsets.append(stream.tell())
    (directory / "offsets").write_bytes(offsets.tobytes())


def _grow(spec: Spec, number: int, size: int, turns: list[int]) -> Grown:
    person = Person(number, size, spec.seed)
    before, records = person.head, dict(person.records)
    truth = _rows(records)
    if spec.exports:
        stored = _one_in_a_hundred_wrong(truth, Random(number))
        before = person.first
    else:
        stored = truth
    rows = b"".join(_row(person.did, path, cid, before.rev, records.get(path)) for path, cid in stored.items())
    changes = dict.fromkeys(("create", "update", "delete"), 0)
    messages = []
    for seq in turns:
        change = person.act()
        for op in change.ops:
            changes[op["action"]] += 1
        messages.append((seq, _message(person.did, AHEAD + seq, change)))
    if turns:
        truth = _rows(person.records)
    if spec.exports:
        changes = _differences(stored, truth)
    account = Account(
        did=person.did,
        key=person.key.public.did_key(),
        before=_head(before),
        after=_head(person.head),
        records=len(truth),
        digest=digest_of(truth),
        changes=changes,
        seqs=turns,
        export=(0, 0),
    )
    return Grown(account, rows, messages, person.export() if spec.exports else b"")


def _rows(records: Mapping[str, bytes]) -> Rows:
    return {path: cid_of(block) for path, block in records.items()}


def _one_in_a_hundred_wrong(truth: Rows, random: Random) -> Rows:
    """Of a hundred records one is missing, is another one, or is there though it isn't in the repo any more."""
    stored = dict(truth)
    for path in truth:
        match random.randrange(300):
            case 0:
                del stored[path]
            case 1:
                stored[path] = cid_of(path.encode())
            case 2:
                stored[f"{path}-gone"] = cid_of(path.encode())
    return stored


def _differences(stored: Rows, truth: Rows) -> dict[str, int]:
    return {
        "create": len(truth.keys() - stored.keys()),
        "update": sum(stored[path] != truth[path] for path in truth.keys() & stored.keys()),
        "delete": len(stored.keys() - truth.keys()),
    }


def _row(did: str, path: str, cid: bytes, rev: str, block: bytes | None) -> bytes:
    """A line of COPY: did, collection, rkey, bucket, cid, rev, value."""
    collection, _, rkey = path.partition("/")
    value = decode_record(block, collection, DEFAULT_LIMITS).json if block else None
    text = "\\N" if value is None else value.replace("\\", "\\\\")
    return f"{did}\t{collection}\t{rkey}\t{bucket_of(did)}\t\\\\x{cid.hex()}\t{rev}\t{text}\n".encode()


def _head(commit: Commit) -> Head:
    return Head(commit.rev, commit.data.hex(), commit.cid.hex())


def _message(did: str, seq: int, change: Change) -> bytes:
    payload = {
        "seq": seq,
        "repo": did,
        "commit": change.commit.cid,
        "rev": change.commit.rev,
        "since": change.since,
        "prevData": change.prev_data,
        "ops": change.ops,
        "blocks": change.blocks,
        "time": "2025-01-01T00:00:00.000Z",
        "blobs": [],
        "rebase": False,
        "tooBig": False,
    }
    return framed(message_frame("#commit", payload))


def greeting(did: str, seq: int) -> bytes:
    """The message of a commit of long ago: whoever knows the repo has its key looked up, and sees nothing new in it."""
    payload = {
        "seq": seq,
        "repo": did,
        "commit": cid_of(b""),
        "rev": _LONG_AGO,
        "since": None,
        "ops": [],
        "blocks": b"",
    }
    return framed(message_frame("#commit", payload | {"time": "2025-01-01T00:00:00.000Z"}))


_LONG_AGO = "2222222222222"
_BINARY = 0x82  # a whole message of bytes, from a server


def framed(message: bytes) -> bytes:
    """The message behind its websocket frame header (RFC 6455, 5.2)."""
    size = len(message)
    if size < 126:  # noqa: PLR2004
        return bytes([_BINARY, size]) + message
    if size < 1 << 16:
        return bytes([_BINARY, 126]) + size.to_bytes(2, "big") + message
    return bytes([_BINARY, 127]) + size.to_bytes(8, "big") + message


def _header_size(length: int) -> int:
    return {126: 4, 127: 10}.get(length, 2)
