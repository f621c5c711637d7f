"""A seeded world: people who post, like, follow, change their minds, and now and then an accident."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from random import Random
from typing import Any

from indexer.atproto import cid
from indexer.errors import BrokenInvariantError
from indexer.localnet.account import Account
from indexer.localnet.clock import tid
from indexer.localnet.network import LocalNetwork
from indexer.localnet.repo import Write

_BEGINNING = datetime(2026, 1, 1, tzinfo=UTC)
_WORDS = ("sky", "ferry", "quiet", "lantern", "orbit", "maple", "signal", "été", "雨", "🦋", "harbour", "a\0b")
_FEWEST_ACCOUNTS = 4
_SIZES = ("empty", "one-op", "multi-op")
_JOINING, _EDITING, _REPLYING, _PICTURING = 0.03, 0.6, 0.3, 0.2

PROFILE = "app.bsky.actor.profile"
POST = "app.bsky.feed.post"
LIKE = "app.bsky.feed.like"
REPOST = "app.bsky.feed.repost"
FOLLOW = "app.bsky.graph.follow"
NOTE = "com.example.note"
DRAFT = "com.example.note.draft"  # its paths sort before NOTE's, its name behind


@dataclass(frozen=True, slots=True)
class Happening:
    """An event that was brought about on purpose, at `step`; `evidence` is what was then seen of it."""

    step: int
    what: str
    did: str
    evidence: str


@dataclass(slots=True)
class Report:
    """What a scenario did: `ops` by action, `commits` by kind (`empty`, `one-op`, `multi-op`, `twice-a-path`)."""

    accounts: int = 0
    commits: Counter[str] = field(default_factory=Counter)
    ops: Counter[str] = field(default_factory=Counter)
    happenings: list[Happening] = field(default_factory=list)


class Scenario:
    """Activity on `net` that `seed` determines down to every key and record; revisions are of their time.

    It begins with `accounts` accounts, on both curves, and grows to twice as many. On the way come one key
    rotation, one lost commit, one deactivation and one deletion, each at an account of its own.
    """

    def __init__(self, net: LocalNetwork, seed: int = 0, accounts: int = 8) -> None:
        if accounts < _FEWEST_ACCOUNTS:
            raise ValueError(f"a scenario needs {_FEWEST_ACCOUNTS} accounts")
        self.report = Report()
        self._net = net
        self._random = Random(seed)
        self._accounts = accounts
        self._living: list[Account] = []
        self._untouched: list[Account] = []
        self._step = 0
        self._named = 0

    async def run(self, seconds: float, rate: float) -> Report:
        """`seconds` times `rate` steps of about one commit each, at that rate if the machine keeps up."""
        clock = asyncio.get_running_loop().time
        steps, began = round(seconds * rate), clock()
        for step in range(steps):
            self.perform(step, steps)
            await asyncio.sleep(max(0.0, began + (step + 1) / rate - clock()))
        return self.report

    def perform(self, step: int, steps: int) -> None:
        """Step `step` of `steps`, counted from 0, at once."""
        self._step = step
        if step == 0:
            for _ in range(self._accounts):
                self._join()
        accidents = (self._rotate_key, self._lose_commit, self._deactivate, self._delete_account)
        due = {steps * place // 5: accident for place, accident in enumerate(accidents, start=1)}
        if step in due:
            self._happen(due[step])
        elif len(self._net.accounts) < 2 * self._accounts and self._random.random() < _JOINING:
            self._join()
        else:
            account = self._random.choice(self._living)
            self._commit(account, self._activity(account))

    def _join(self) -> None:
        number = len(self._net.accounts)
        account = self._net.create_account(f"person{number}.test", curve=("k256", "p256")[number % 2])
        self._living.append(account)
        self._untouched.append(account)
        self.report.accounts += 1
        self._commit(account, [self._create(PROFILE, "self")])

    def _commit(self, account: Account, writes: list[Write], *, lost: bool = False) -> None:
        account.apply_writes(writes, lost=lost)
        self.report.ops.update(write.action for write in writes)
        twice = len({write.path for write in writes}) < len(writes)
        self.report.commits["twice-a-path" if twice else _SIZES[min(len(writes), 2)]] += 1

    def _happen(self, accident: Callable[[Account], str]) -> None:
        account = self._untouched.pop(0)
        what = accident.__name__.removeprefix("_").replace("_", " ")
        self.report.happenings.append(Happening(self._step, what, account.did, accident(account)))

    def _rotate_key(self, account: Account) -> str:
        before = self._net.plc.identities[account.did]
        account.rotate_key()
        after = self._net.plc.identities[account.did]
        _expect(before is not None and after is not None and before.key != after.key, "the key stayed")
        self._commit(account, [self._create(POST)])
        return f"the directory's key changed, and commit {account.rev} is signed by the new one"

    def _lose_commit(self, account: Account) -> str:
        sent = len(self._net.relay.log)
        self._commit(account, [self._create(POST), self._create(LIKE)], lost=True)
        lost = account.rev
        _expect(len(self._net.relay.log) == sent, "the relay sent a commit that was to be lost")
        self._commit(account, [self._create(POST)])
        return f"the relay never sent commit {lost}; {account.rev} follows it"

    def _deactivate(self, account: Account) -> str:
        account.deactivate()
        return self._leave(account)

    def _delete_account(self, account: Account) -> str:
        account.delete_account()
        return self._leave(account)

    def _leave(self, account: Account) -> str:
        self._living.remove(account)
        last = self._net.relay.log[-1]
        _expect((last.kind, last.did) == ("#account", account.did), "the relay sent no #account")
        return f"#account {account.status}, seq {last.seq}, with {len(account.records)} records"

    def _activity(self, account: Account) -> list[Write]:
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
        """A record created and changed within one batch, with another between."""
        first = self._create(NOTE)
        return [first, self._create(DRAFT), self._change(first.path)]

    def _collection(self) -> str:
        return self._random.choices((LIKE, POST, FOLLOW, REPOST, NOTE, DRAFT), (40, 30, 10, 10, 6, 4))[0]

    def _create(self, collection: str, rkey: str | None = None) -> Write:
        return Write.create(f"{collection}/{rkey or self._rkey(collection)}", self._record(collection))

    def _change(self, path: str) -> Write:
        """Profiles and notes are edited or deleted, the rest is only deleted; a profile stays."""
        collection = path.partition("/")[0]
        edited = collection == PROFILE or (collection in (NOTE, DRAFT) and self._random.random() < _EDITING)
        return Write.update(path, self._record(collection)) if edited else Write.delete(path)

    def _rkey(self, collection: str) -> str:
        self._named += 1
        if collection in (NOTE, DRAFT):
            return f"note:{self._named}"
        return tid(int(_BEGINNING.timestamp()) * 1_000_000 + self._named)

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
            return {"subject": self._random.choice(self._living).did}
        return {"text": self._text(30), "seal": self._random.randbytes(24), "final": collection == NOTE}

    def _post(self) -> dict[str, Any]:
        post: dict[str, Any] = {"text": self._text(20), "langs": ["en"]}
        if self._random.random() < _REPLYING:
            subject = self._subject()
            post["reply"] = {"root": subject, "parent": subject}
        if self._random.random() < _PICTURING:
            images = [{"alt": self._text(4), "image": self._blob(), "aspectRatio": {"width": 4, "height": 3}}]
            post["embed"] = {"$type": "app.bsky.embed.images", "images": images}
        return post

    def _subject(self) -> dict[str, str]:
        """A strong reference to some living account's record."""
        account = self._random.choice(self._living)
        path = self._random.choice(list(account.records))
        return {"uri": f"at://{account.did}/{path}", "cid": cid.cid_text(cid.cid_of(account.records[path]))}

    def _blob(self) -> dict[str, Any]:
        link, size = cid.RAW + sha256(self._random.randbytes(8)).digest(), self._random.randrange(1 << 20)
        return {"$type": "blob", "ref": link, "mimeType": "image/jpeg", "size": size}

    def _text(self, words: int) -> str:
        return " ".join(self._random.choices(_WORDS, k=self._random.randint(1, words)))


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise BrokenInvariantError(otherwise)
