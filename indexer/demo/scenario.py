"""Random but reproducible activity on a local network: posts, likes, follows, edits, and account events."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from random import Random
from typing import Any, NamedTuple

from indexer.atproto import cid
from indexer.atproto.syntax import tid_of
from indexer.demo.local_account import LocalAccount
from indexer.demo.local_network import LocalNetwork
from indexer.demo.local_repo import Write

_BEGINNING = datetime(2026, 1, 1, tzinfo=UTC)
_WORDS = ("sky", "ferry", "quiet", "lantern", "orbit", "maple", "signal", "été", "雨", "🦋", "harbour", "a\0b")
_MIN_ACCOUNTS = 4
_COMMIT_KINDS = ("empty", "one-op", "multi-op")
_JOIN_PROBABILITY = 0.03
_EDIT_PROBABILITY = 0.6
_REPLY_PROBABILITY = 0.3
_IMAGE_PROBABILITY = 0.2

PROFILE = "app.bsky.actor.profile"
POST = "app.bsky.feed.post"
LIKE = "app.bsky.feed.like"
REPOST = "app.bsky.feed.repost"
FOLLOW = "app.bsky.graph.follow"
NOTE = "com.example.note"
DRAFT = "com.example.note.draft"
"""Its name sorts after NOTE, but its paths sort before those of NOTE."""

_ACCOUNT_EVENTS = ("rotate key", "lose commit", "deactivate", "delete account")


class ScenarioEvent(NamedTuple):
    """One of the account events of a scenario, and its effect."""

    kind: str
    did: str
    detail: str


@dataclass(slots=True)
class ScenarioReport:
    """The activity of a scenario so far: operations by action, and commits by kind.

    The kinds are `empty`, `one-op`, `multi-op`, and `twice-a-path` (several operations on one path).
    """

    accounts: int = 0
    commits: Counter[str] = field(default_factory=Counter)
    ops: Counter[str] = field(default_factory=Counter)
    events: list[ScenarioEvent] = field(default_factory=list)


class Scenario:
    """Activity on `network`. The same seed gives the same keys and records; only the revs depend on the time.

    It begins with `accounts` accounts, on both curves, and grows to at most twice as many. It includes one key
    rotation, one lost commit, one deactivation and one deletion, each on a different account.

    Attributes:
        network: The network.
        report: The activity so far.

    Raises:
        ValueError: There are fewer accounts than account events.
    """

    def __init__(self, network: LocalNetwork, seed: int = 0, accounts: int = 8) -> None:
        if accounts < _MIN_ACCOUNTS:
            raise ValueError(f"a scenario needs {_MIN_ACCOUNTS} accounts")
        self.report = ScenarioReport()
        self.network = network
        self._random = Random(seed)
        self._accounts = accounts
        self._active: list[LocalAccount] = []
        self._without_event: list[LocalAccount] = []
        self._step = 0
        self._rkeys = 0

    async def run(self, seconds: float, rate: float) -> ScenarioReport:
        """Perform `seconds * rate` steps, at `rate` steps per second if the machine is fast enough."""
        steps, clock = round(seconds * rate), asyncio.get_running_loop().time
        began = clock()
        for step in range(steps):
            self.perform(step, steps)
            await asyncio.sleep(max(0.0, began + (step + 1) / rate - clock()))
        return self.report

    def perform(self, step: int, steps: int) -> None:
        """Perform step `step` of `steps`, counted from 0. A step is about one commit."""
        self._step = step
        if step == 0:
            for _ in range(self._accounts):
                self._join()
        due = {steps * number // 5: kind for number, kind in enumerate(_ACCOUNT_EVENTS, start=1)}
        if step in due:
            self._perform_account_event(due[step])
        elif len(self.network.accounts) < 2 * self._accounts and self._random.random() < _JOIN_PROBABILITY:
            self._join()
        else:
            account = self._random.choice(self._active)
            self._commit(account, self._activity(account))

    def _join(self) -> None:
        number = len(self.network.accounts)
        account = self.network.create_account(f"person{number}.test", curve=("k256", "p256")[number % 2])
        self._active.append(account)
        self._without_event.append(account)
        self.report.accounts += 1
        self._commit(account, [self._create(PROFILE, "self")])

    def _commit(self, account: LocalAccount, writes: list[Write], *, lost: bool = False) -> None:
        account.apply_writes(writes, lost=lost)
        self.report.ops.update(write.action for write in writes)
        repeated = len({write.path for write in writes}) < len(writes)
        self.report.commits["twice-a-path" if repeated else _COMMIT_KINDS[min(len(writes), 2)]] += 1

    def _perform_account_event(self, kind: str) -> None:
        account = self._without_event.pop(0)
        match kind:
            case "rotate key":
                account.rotate_key()
                self._commit(account, [self._create(POST)])
                detail = f"the key in the directory changed; commit {account.rev} is signed with the new key"
            case "lose commit":
                self._commit(account, [self._create(POST), self._create(LIKE)], lost=True)
                lost = account.rev
                self._commit(account, [self._create(POST)])
                detail = f"the relay did not send commit {lost}; the next commit is {account.rev}"
            case _:
                account.set_status("deactivated" if kind == "deactivate" else "deleted")
                self._active.remove(account)
                detail = f"#account {account.status}, seq {self.network.relay.seq}, with {len(account.records)} records"
        self.report.events.append(ScenarioEvent(kind, account.did, detail))

    def _activity(self, account: LocalAccount) -> list[Write]:
        own = list(account.records)
        match self._random.choices(("create", "change", "batch", "twice", "nothing"), (70, 18, 8, 3, 1))[0]:
            case "change":
                return [self._change(self._random.choice(own))]
            case "batch":
                changed = self._random.sample(own, min(len(own), self._random.randrange(4)))
                created = [self._create(self._collection()) for _ in range(self._random.randrange(2, 6))]
                return created + [self._change(path) for path in changed]
            case "twice":
                return self._twice()
            case "nothing":
                return []
            case _:
                return [self._create(self._collection())]

    def _twice(self) -> list[Write]:
        """Create a record and change it in the same commit, with another write in between."""
        first = self._create(NOTE)
        return [first, self._create(DRAFT), self._change(first.path)]

    def _collection(self) -> str:
        return self._random.choices((LIKE, POST, FOLLOW, REPOST, NOTE, DRAFT), (40, 30, 10, 10, 6, 4))[0]

    def _create(self, collection: str, rkey: str | None = None) -> Write:
        return Write.create(f"{collection}/{rkey or self._rkey(collection)}", self._record(collection))

    def _change(self, path: str) -> Write:
        """Update a profile, update or delete a note, delete any other record."""
        collection = path.partition("/")[0]
        edited = collection == PROFILE or (collection in (NOTE, DRAFT) and self._random.random() < _EDIT_PROBABILITY)
        return Write.update(path, self._record(collection)) if edited else Write.delete(path)

    def _rkey(self, collection: str) -> str:
        self._rkeys += 1
        if collection in (NOTE, DRAFT):
            return f"note:{self._rkeys}"
        return tid_of(int(_BEGINNING.timestamp()) * 1_000_000 + self._rkeys)

    def _record(self, collection: str) -> dict[str, Any]:
        moment = _BEGINNING + timedelta(seconds=self._step, milliseconds=self._random.randrange(1_000))
        created = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return {"$type": collection, "createdAt": created, **self._content(collection)}

    def _content(self, collection: str) -> dict[str, Any]:
        if collection == PROFILE:
            return {"displayName": self._text(2), "description": self._text(12), "avatar": self._blob()}
        if collection == POST:
            return self._post()
        if collection in (LIKE, REPOST):
            return {"subject": self._subject()}
        if collection == FOLLOW:
            return {"subject": self._random.choice(self._active).did}
        return {"text": self._text(30), "nonce": self._random.randbytes(24), "final": collection == NOTE}

    def _post(self) -> dict[str, Any]:
        post: dict[str, Any] = {"text": self._text(20), "langs": ["en"]}
        if self._random.random() < _REPLY_PROBABILITY:
            subject = self._subject()
            post["reply"] = {"root": subject, "parent": subject}
        if self._random.random() < _IMAGE_PROBABILITY:
            images = [{"alt": self._text(4), "image": self._blob(), "aspectRatio": {"width": 4, "height": 3}}]
            post["embed"] = {"$type": "app.bsky.embed.images", "images": images}
        return post

    def _subject(self) -> dict[str, str]:
        """Return a strong reference to a record of an active account."""
        account = self._random.choice(self._active)
        path = self._random.choice(list(account.records))
        return {"uri": f"at://{account.did}/{path}", "cid": cid.cid_text(cid.cid_of(account.records[path]))}

    def _blob(self) -> dict[str, Any]:
        link, size = cid.RAW + sha256(self._random.randbytes(8)).digest(), self._random.randrange(1 << 20)
        return {"$type": "blob", "ref": link, "mimeType": "image/jpeg", "size": size}

    def _text(self, words: int) -> str:
        return " ".join(self._random.choices(_WORDS, k=self._random.randint(1, words)))
