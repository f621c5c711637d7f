"""A generated workload on disk: accounts, initial rows of the database, commits or exports, and the expected result.

It is generated once per `WorkloadSpec`, under the system's temporary directory, so that a benchmark measures neither
signing nor encoding. Commits are numbered from 1; the sequence number of a message is `SEQ_OFFSET` higher.

    accounts    one JSON object per line (`WorkloadAccount`)
    rows        the initial records, for COPY into indexer.record
    stream      websocket messages with their frame headers
    offsets     the offset of each message in stream, 8 bytes each
    exports     CAR files, one after another
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

from benchmarks.signing_accounts import SigningAccount
from indexer.atproto.cid import cid_of
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.record import decode_record
from indexer.demo.local_account import commit_payload
from indexer.demo.local_relay import message_frame
from indexer.demo.local_repo import LocalChange, LocalCommit
from indexer.sync.shard import bucket_of

FORMAT = 4
"""The format of the files. Workloads of other formats are not used."""
SEQ_OFFSET = 1_000_000
"""The sequence numbers up to this one are free for messages that a benchmark sends before the workload."""

Rows = dict[str, bytes]
"""Path to record CID."""


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """The parameters of a workload.

    Attributes:
        repos: The number of repos.
        records: The mean number of records of a repo.
        sigma: The standard deviation of the logarithm of the number of records.
        commits: The number of commits, distributed over the repos.
        huge: The number of records of one additional repo; 0: no such repo.
        exports: Generate a CAR file for each repo, as the repo is before its commits. Without commits, one in a hundred
            of the initial rows differs from it.
        seed: The seed of all random choices.
    """

    repos: int
    records: int
    sigma: float
    commits: int = 0
    huge: int = 0
    exports: bool = False
    seed: int = 0

    def sizes(self) -> list[int]:
        """Return the number of records of each repo."""
        random, mu = Random(self.seed), -(self.sigma**2) / 2
        drawn = [self.records * random.lognormvariate(mu, self.sigma) for _ in range(self.repos)]
        return [max(1, round(size)) for size in drawn] + [self.huge] * bool(self.huge)

    def commits_by_repo(self) -> list[list[int]]:
        """Return the commit numbers of each repo. In every round each repo has one commit, in random order."""
        random, commits = Random(self.seed), [list[int]() for _ in range(self.repos)]
        order = list(range(self.repos))
        for number in range(1, self.commits + 1):
            if (number - 1) % self.repos == 0:
                random.shuffle(order)
            commits[order[(number - 1) % self.repos]].append(number)
        return commits + [[]] * bool(self.huge)


@dataclass(frozen=True, slots=True)
class WorkloadHead:
    """A signed commit.

    Attributes:
        rev: The rev.
        data: The CID of the tree's root node, in hex.
        commit: The CID of the commit, in hex.
    """

    rev: str
    data: str
    commit: str


@dataclass(frozen=True, slots=True)
class WorkloadAccount:
    """One account, and the expected state of its repo.

    Attributes:
        did: The DID.
        key: The signing key as a did:key.
        before: The initial head in the database.
        exported: The head before the commits, which is that of the CAR file.
        after: The expected head.
        records: The expected number of records.
        digest: The digest of the expected records (`digest_of`).
        changes: The expected number of changes by action.
        commits: The numbers of its commits.
        export: Start and end of its CAR file in `exports`.
    """

    did: str
    key: str
    before: WorkloadHead
    exported: WorkloadHead
    after: WorkloadHead
    records: int
    digest: str
    changes: Mapping[str, int]
    commits: list[int]
    export: tuple[int, int]


def digest_of(rows: Rows) -> str:
    """Return the SHA-256 of path and CID of all records, in the order of (collection, rkey)."""
    digest = sha256()
    for path in sorted(rows, key=lambda path: path.split("/")):
        digest.update(path.encode() + rows[path])
    return digest.hexdigest()


class Workload:
    """A generated workload.

    Attributes:
        directory: The directory with the files.
        accounts: The accounts.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        lines = (directory / "accounts").read_bytes().splitlines()
        self.accounts = [_account(orjson.loads(line)) for line in lines]

    @cached_property
    def offsets(self) -> "array[int]":
        """The offset of each message in `stream`, and the end of the last one."""
        offsets = array("Q")
        offsets.frombytes((self.directory / "offsets").read_bytes())
        return offsets

    @cached_property
    def stream(self) -> mmap:
        """The websocket messages, each with its frame header."""
        return _map(self.directory / "stream")

    @cached_property
    def exports(self) -> mmap:
        """The CAR files."""
        return _map(self.directory / "exports")

    def frames(self, commits: range) -> Iterator[bytes]:
        """Yield the event stream frames of these commits, without the websocket frame headers."""
        for number in commits:
            message = self.stream[self.offsets[number - 1] : self.offsets[number]]
            yield message[_header_size(message[1]) :]


def _account(fields: dict[str, object]) -> WorkloadAccount:
    heads = {name: WorkloadHead(**fields.pop(name)) for name in ("before", "exported", "after")}  # type: ignore[arg-type]
    return WorkloadAccount(**heads, **fields)  # type: ignore[arg-type]


def _map(path: Path) -> mmap:
    with path.open("rb") as file:
        return mmap(file.fileno(), 0, access=ACCESS_READ)


def load_workload(
    spec: WorkloadSpec, progress: Callable[[Iterable["GeneratedAccount"], int], Iterable["GeneratedAccount"]]
) -> Workload:
    """Return the workload of `spec`; generate it if it does not exist yet.

    `progress` gets an iterable and its length, and returns an iterable with the same items.
    """
    name = "-".join(str(item) for item in (FORMAT, *astuple(spec)))
    directory = Path(tempfile.gettempdir()) / f"indexer-benchmarks-{os.getuid()}" / name
    if not directory.exists():
        directory.parent.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
            _generate(spec, Path(temporary), progress)
            Path(temporary).rename(directory)
            Path(temporary).mkdir()  # TemporaryDirectory removes it
    return Workload(directory)


@dataclass(frozen=True, slots=True)
class GeneratedAccount:
    """One account as generated by a worker process.

    Attributes:
        account: The account. Its `export` is not set yet.
        rows: The initial records, for COPY.
        messages: Pairs of commit number and websocket message.
        export: The CAR file.
    """

    account: WorkloadAccount
    rows: bytes
    messages: list[tuple[int, bytes]]
    export: bytes


def _generate(
    spec: WorkloadSpec,
    directory: Path,
    progress: Callable[[Iterable[GeneratedAccount], int], Iterable[GeneratedAccount]],
) -> None:
    sizes, commits = spec.sizes(), spec.commits_by_repo()
    messages = [b""] * spec.commits
    end = 0
    with (
        ProcessPoolExecutor(mp_context=get_context("spawn")) as pool,
        (directory / "accounts").open("wb") as accounts,
        (directory / "rows").open("wb") as rows,
        (directory / "exports").open("wb") as exports,
    ):
        generated = pool.map(partial(_generate_account, spec), range(len(sizes)), sizes, commits, chunksize=4)
        for item in progress(generated, len(sizes)):
            start, end = end, end + len(item.export)
            accounts.write(orjson.dumps(asdict(item.account) | {"export": (start, end)}) + b"\n")
            rows.write(item.rows)
            exports.write(item.export)
            for number, message in item.messages:
                messages[number - 1] = message
    offsets = array("Q", [0])
    with (directory / "stream").open("wb") as stream:
        for message in messages:
            stream.write(message)
            offsets.append(stream.tell())
    (directory / "offsets").write_bytes(offsets.tobytes())


def _generate_account(spec: WorkloadSpec, number: int, size: int, commits: list[int]) -> GeneratedAccount:
    signing = SigningAccount(number, size, spec.seed)
    before = exported = signing.head
    records = dict(signing.records)
    export = signing.export() if spec.exports else b""
    expected = _rows(records)
    different = spec.exports and not spec.commits
    if different:
        stored = _with_differences(expected, Random(number))
        before = signing.first
    else:
        stored = expected
    rows = b"".join(_row(signing.did, path, cid, before.rev, records.get(path)) for path, cid in stored.items())
    changes = dict.fromkeys(("create", "update", "delete"), 0)
    messages = []
    for commit in commits:
        change = signing.commit()
        for op in change.ops:
            changes[op["action"]] += 1
        messages.append((commit, _message(signing.did, SEQ_OFFSET + commit, change)))
    if commits:
        expected = _rows(signing.records)
    if different:
        changes = _count_differences(stored, expected)
    account = WorkloadAccount(
        did=signing.did,
        key=signing.key.public.did_key(),
        before=_head(before),
        exported=_head(exported),
        after=_head(signing.head),
        records=len(expected),
        digest=digest_of(expected),
        changes=changes,
        commits=commits,
        export=(0, 0),
    )
    return GeneratedAccount(account, rows, messages, export)


def _rows(records: Mapping[str, bytes]) -> Rows:
    return {path: cid_of(block) for path, block in records.items()}


def _with_differences(expected: Rows, random: Random) -> Rows:
    """Return a copy in which one record in a hundred is missing, has another CID, or does not exist in the repo."""
    stored = dict(expected)
    for path in expected:
        match random.randrange(300):
            case 0:
                del stored[path]
            case 1:
                stored[path] = cid_of(path.encode())
            case 2:
                stored[f"{path}-gone"] = cid_of(path.encode())
    return stored


def _count_differences(stored: Rows, expected: Rows) -> dict[str, int]:
    return {
        "create": len(expected.keys() - stored.keys()),
        "update": sum(stored[path] != expected[path] for path in expected.keys() & stored.keys()),
        "delete": len(stored.keys() - expected.keys()),
    }


def _row(did: str, path: str, cid: bytes, rev: str, block: bytes | None) -> bytes:
    """Return a line for COPY: did, collection, rkey, bucket, cid, rev, value."""
    collection, _, rkey = path.partition("/")
    value = decode_record(block, collection, DEFAULT_LIMITS).json if block else None
    text = "\\N" if value is None else value.replace("\\", "\\\\")
    return f"{did}\t{collection}\t{rkey}\t{bucket_of(did)}\t\\\\x{cid.hex()}\t{rev}\t{text}\n".encode()


def _head(commit: LocalCommit) -> WorkloadHead:
    return WorkloadHead(commit.rev, commit.data.hex(), commit.cid.hex())


def _message(did: str, seq: int, change: LocalChange) -> bytes:
    payload = commit_payload(did, change, "2025-01-01T00:00:00.000Z")
    return framed(message_frame("#commit", payload | {"seq": seq}))


def old_commit_message(did: str, seq: int) -> bytes:
    """Return the message of a commit with a very old rev.

    The daemon looks up the key of a repo that it tracks, and then ignores the commit as a replay.
    """
    payload = {
        "seq": seq,
        "repo": did,
        "commit": cid_of(b""),
        "rev": _OLDEST_REV,
        "since": None,
        "ops": [],
        "blocks": b"",
    }
    return framed(message_frame("#commit", payload | {"time": "2025-01-01T00:00:00.000Z"}))


_OLDEST_REV = "2222222222222"
_BINARY = 0x82  # a binary message in one frame, not masked


def framed(message: bytes) -> bytes:
    """Return the message with a websocket frame header (RFC 6455, section 5.2)."""
    size = len(message)
    if size < 126:  # noqa: PLR2004
        return bytes([_BINARY, size]) + message
    if size < 1 << 16:
        return bytes([_BINARY, 126]) + size.to_bytes(2, "big") + message
    return bytes([_BINARY, 127]) + size.to_bytes(8, "big") + message


def _header_size(length: int) -> int:
    return {126: 4, 127: 10}.get(length, 2)
