"""Answers of hosts to requests: lists and states of repos, errors and compressed bodies."""

import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from indexer.atproto.cid import cid_text
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.core.spool import Spool
from indexer.errors import UnavailableError
from indexer.net.http.content_decoding import Decoder
from indexer.net.pds.pds_client import PdsClient
from indexer.net.pds.xrpc import ListedAccount, RepoStatus, fetch_repo_status, list_repos
from indexer.reasons import FetchFailure
from indexer.sync.events import MAX_STATUS_CHARACTERS, hosting_status
from tests.fuzz import syntax_reference as reference
from tests.fuzz.comparison import DifferenceError
from tests.fuzz.examples import DID, TID
from tests.fuzz.fixed_response import HostAnswers
from tests.fuzz.fuzz_target import FuzzTarget, MutateBytes
from tests.fuzz.outcome_counts import OutcomeCounts
from tests.fuzz.seeds import LINK

HOST = "https://pds.test"
STATUSES = (200, 200, 200, 400, 404, 429, 501, 503)
FAILURES = frozenset(
    {
        FetchFailure.BAD_ANSWER,
        FetchFailure.HTTP_STATUS,
        FetchFailure.REPO_DEACTIVATED,
        FetchFailure.REPO_NOT_FOUND,
        FetchFailure.REPO_SUSPENDED,
        FetchFailure.REPO_TAKENDOWN,
        FetchFailure.THROTTLED,
    }
)
"""The reasons that the answer of a host can be."""
HIDING_ERRORS = {"RepoTakendown": "takendown", "RepoSuspended": "suspended", "RepoDeactivated": "deactivated"}
"""The errors that mean a hosting status."""
CURSOR = "cursor-before"
MAX_BODY = 1 << 20
MAX_PIECE = 65_536


class RepoLists(HostAnswers):
    """Pages of `listRepos` and, for half of the inputs, of `listReposByCollection`."""

    def __init__(self) -> None:
        super().__init__(STATUSES)
        self.counts = OutcomeCounts("pages", "last pages", "accounts", "invalid entries", "refused")

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return pages of up to 30 accounts, and errors."""
        entries = [
            {"did": DID, "head": cid_text(LINK), "rev": TID, "active": True},
            {"did": DID, "head": "", "rev": "", "active": False, "status": "takendown"},
            {"did": "did:web:bob.test"},
            {"did": "did:plc:"},
            {"did": DID, "rev": "x"},
        ]
        pages = [
            {"cursor": cursor, "repos": random.choices(entries, k=size)}
            for size in (0, 1, 3, 30)
            for cursor in ("10", None, "", CURSOR)
        ]
        bodies = [json.dumps(page).encode() for page in [*pages, {"repos": []}, _error("RepoNotFound")]]
        return [bytes([n % len(STATUSES)]) + bodies[n % len(bodies)] for n in range(count)]

    def compare(self, data: bytes) -> None:
        """Read a page. Raises `DifferenceError`."""
        self.counts.executions += 1
        status, collection = self.answer(data), "app.bsky.feed.post" if len(data) % 2 else ""
        try:
            page = self._loop.run_until_complete(list_repos(self._client, HOST, collection, CURSOR))
        except UnavailableError as error:
            _check_failure(error, status)
            self.counts.add("refused")
            return
        body = json.loads(data[1:].decode("utf-8-sig", "replace"), parse_int=_integer)
        accounts = [_listed(entry) for entry in body["repos"] if _has_did(entry)]
        cursor = body.get("cursor")
        cursor = str(cursor) if isinstance(cursor, int) else cursor or None
        expected = (accounts, sum(not _is_account(entry) for entry in body["repos"]), cursor)
        if status != 200 or (list(page.entries), len(page.invalid), page.cursor) != expected:
            raise DifferenceError(f"reference: {expected}\nfound: {page}")
        if page.cursor in ("", CURSOR) or "\0" in (page.cursor or "") or len(page.cursor or "") > 2_048:
            raise DifferenceError(f"the cursor {page.cursor!r} cannot be stored, or leads to itself")
        self.counts.add("pages" if page.cursor else "last pages")
        self.counts.add("accounts", len(page.entries))
        self.counts.add("invalid entries", len(page.invalid))


def _has_did(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("did"), str) and reference.is_did(entry["did"])


def _integer(digits: str) -> float:
    """Return an integer of JSON as orjson does: a float, if it has more than 64 bits."""
    number = int(digits)
    return number if -(1 << 63) <= number < 1 << 64 else float(digits)


def _is_account(entry: Any) -> bool:
    """Return True if an entry of a list has a DID, a TID or nothing as rev, and a boolean or nothing as `active`."""
    if not _has_did(entry) or not isinstance(entry.get("active", True), bool):
        return False
    return entry.get("rev") in (None, "") or _rev(entry) is not None


def _rev(fields: dict[str, Any]) -> str | None:
    rev = fields.get("rev")
    return rev if isinstance(rev, str) and reference.is_tid(rev) else None


def _listed(entry: dict[str, Any]) -> ListedAccount:
    """Return the account of an entry with a DID."""
    active = entry.get("active", True) is not False
    return ListedAccount(entry["did"], _rev(entry), active, None if active else hosting_status(entry))


class RepoStates(HostAnswers):
    """Answers to `getRepoStatus` and `getLatestCommit`, and error bodies."""

    def __init__(self) -> None:
        super().__init__(STATUSES)
        self._directory = TemporaryDirectory(prefix="indexer-fuzz-")
        self._pds = PdsClient(self._client, DEFAULT_LIMITS, Path(self._directory.name), Spool)
        self.counts = OutcomeCounts("states", "commits", "errors", "known errors", "bad answers")

    def close(self) -> None:
        """Close the event loop, and remove the directory."""
        super().close()
        self._directory.cleanup()

    def seeds(self, _: Random, count: int) -> list[bytes]:
        """Return states, commits and errors."""
        names = ("RepoNotFound", "RepoTakendown", "RepoSuspended", "RepoDeactivated", "RateLimitExceeded", "Other")
        bodies = [
            {"did": DID, "active": True, "rev": TID},
            {"did": DID, "active": False, "status": "takendown" * 20},
            {"cid": cid_text(LINK), "rev": TID},
            *map(_error, (*names, "MethodNotImplemented")),
        ]
        made = [json.dumps(body).encode() for body in bodies] + [b"<html>", b""]
        return [bytes([n % len(STATUSES)]) + made[n % len(made)] for n in range(count)]

    def compare(self, data: bytes) -> None:
        """Read an answer as one to each of the two requests. Raises `DifferenceError`."""
        self.counts.executions += 1
        status = self.answer(data)
        try:
            state = self._loop.run_until_complete(fetch_repo_status(self._client, HOST, DID))
        except UnavailableError as error:
            self._count(error, status)
        else:
            body = json.loads(data[1:].decode("utf-8-sig", "replace"), parse_int=_integer)
            expected = _state(body) if status == 200 else RepoStatus(False, HIDING_ERRORS.get(body["error"]))
            long = len(state.status or "") > MAX_STATUS_CHARACTERS
            if state != expected or long:
                raise DifferenceError(f"reference: {expected}\nfound: {state}")
            self.counts.add("states")
        try:
            cid, rev = self._loop.run_until_complete(self._pds.fetch_latest_commit(DID, HOST))
        except UnavailableError as error:
            self._count(error, status)
        else:
            body = json.loads(data[1:].decode("utf-8-sig", "replace"), parse_int=_integer)
            if (cid_text(cid), rev) != (body["cid"], body["rev"]) or not reference.is_tid(rev) or status != 200:
                raise DifferenceError(f"the latest commit {cid_text(cid)} at {rev}")
            self.counts.add("commits")

    def _count(self, error: UnavailableError, status: int) -> None:
        _check_failure(error, status)
        known = FAILURES - {FetchFailure.BAD_ANSWER, FetchFailure.HTTP_STATUS}
        self.counts.add("bad answers" if status == 200 else "known errors" if error.reason in known else "errors")


def _state(body: dict[str, Any]) -> RepoStatus:
    return RepoStatus(body["active"], hosting_status(body), _rev(body))


def _error(name: str) -> dict[str, str]:
    return {"error": name, "message": f"Could not do it: {name}"}


def _check_failure(error: UnavailableError, status: int) -> None:
    """Raise `DifferenceError` unless the reason is documented, and that of a bad answer has the status 200."""
    if error.reason not in FAILURES or (error.reason is FetchFailure.BAD_ANSWER) != (status == 200):
        raise DifferenceError(f"undocumented reason {error.reason} for the status {status}") from error
    if len(str(error)) > 500:
        raise DifferenceError(f"a message of {len(str(error))} characters") from error


class Bodies(FuzzTarget):
    """Bodies, after one byte that selects the content encoding: in pieces, they are what the library reads at once."""

    ENCODINGS = ("gzip", "identity", "br")
    AT_ONCE: tuple[Callable[[bytes], bytes], ...] = (gzip.decompress, lambda data: data)

    def __init__(self) -> None:
        self.counts = OutcomeCounts("decoded", "larger than the limit", "refused", "cut off")

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return bodies of one or two members, some of which are cut off or become large."""
        made = []
        for number in range(count):
            texts = [random.choice((b"", b"text" * 10, random.randbytes(3_000), bytes(1 << 21)))]
            texts += [b"another member"] * random.randrange(2)
            encoding = number % len(self.ENCODINGS)
            body = b"".join(map((gzip.compress, bytes, bytes)[encoding], texts))[:16_000]
            made.append(bytes([encoding]) + (body if number % 5 else body[: len(body) // 2]))
        return made

    def mutate(self, data: bytes, random: Random, mutate_bytes: MutateBytes) -> bytes:
        """Return mutated bytes, or the encoding of a mutated text."""
        if random.random() < 0.5 or not data:
            return mutate_bytes(data)
        return bytes(1) + gzip.compress(mutate_bytes(data[-200:])) + data[-40:]

    def compare(self, data: bytes) -> None:
        """Decode a body. Raises `DifferenceError`."""
        self.counts.executions += 1
        encoding, body = (data or b"\1")[0] % len(self.ENCODINGS), data[1:]
        step = len(data) % 700 + 1
        whole = self._decoded(encoding, [body])
        pieces = self._decoded(encoding, (body[start : start + step] for start in range(0, len(body), step)))
        if MAX_BODY in (len(whole.text), len(pieces.text)):  # the reader stops there, and sees no later mistake
            self.counts.add("larger than the limit")
        elif whole != pieces:
            raise DifferenceError(f"whole: {whole!r:.300}\nin pieces of {step}: {pieces!r:.300}")
        elif whole.failure is not None:
            self.counts.add("cut off" if whole.failure is FetchFailure.UNREACHABLE else "refused")
        elif whole.text != (self.AT_ONCE[encoding](body) if body else b""):
            raise DifferenceError(f"another text of {len(whole.text)} bytes")
        else:
            self.counts.add("decoded")

    def _decoded(self, encoding: int, chunks: Iterable[bytes]) -> "Decoded":
        """Return the first `MAX_BODY` bytes of a text, or the failure."""
        text = bytearray()
        try:
            decoder = Decoder(self.ENCODINGS[encoding])
            for chunk in chunks:
                for piece in decoder.feed(chunk):
                    text += piece
                    if encoding < 2 and len(piece) > MAX_PIECE:
                        raise DifferenceError(f"a piece of {len(piece)} bytes")
                    if len(text) >= MAX_BODY:
                        return Decoded(bytes(text[:MAX_BODY]))
            decoder.close()
        except UnavailableError as error:
            if error.reason not in (FetchFailure.BAD_ANSWER, FetchFailure.UNREACHABLE):
                raise DifferenceError(f"undocumented reason {error.reason}") from error
            return Decoded(b"", error.reason)
        return Decoded(bytes(text))


class Decoded(NamedTuple):
    """The text of a body, or why there is none."""

    text: bytes
    failure: FetchFailure | None = None
