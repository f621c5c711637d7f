"""Random operations on the accounts of real PDSes. A seed gives the operations."""

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from tests.realnet.real_network import RealAccount, RealPds

COLLECTIONS = ("com.example.thing", "com.example.note", "app.example.deep.list")
RKEYS = 12
"""Record keys of a collection, so few that records are updated and deleted."""
MIN_ACTIVE = 4
MAX_ACTIVE = 30

Write = dict[str, Any]


class RandomSteps:
    """Takes random steps. All calls block.

    Attributes:
        active: Accounts that are active.
        hidden: Accounts that are not active, by their hosting status.
        taken: Number of operations by name.
        count: Number of steps.
    """

    def __init__(self, pdses: list[RealPds], seed: int) -> None:
        self._pdses = pdses
        self._random = Random(seed)
        self._names = 0
        self._paths: dict[str, set[str]] = {}
        self._exports: dict[str, bytes] = {}
        self.active: list[RealAccount] = []
        self.hidden: dict[str, list[RealAccount]] = {"deactivated": [], "takendown": [], "deleted": []}
        self.count = 0
        self._steps: dict[Callable[[], None], int] = {
            self.write_record: 40, self.write_many: 12, self.write_blob: 4, self.create_account: 4,
            self.change_handle: 3, self.rotate_key: 4, self.migrate: 4, self.import_older: 4, self.lose_a_commit: 3,
            self.deactivate: 3, self.activate: 3, self.take_down: 3, self.reverse_takedown: 3, self.delete_account: 1,
        }  # fmt: skip
        self.taken: Counter[str] = Counter(dict.fromkeys(("create", "update", "delete"), 0))
        self.taken.update({step.__name__: 0 for step in self._steps})

    def run(self, count: int) -> None:
        """Take steps: first one of each kind, so that none is missing, then at random by weight."""
        kinds = list(self._steps)
        first = self._random.sample(kinds, len(kinds))
        for step in [*first, *self._random.choices(kinds, list(self._steps.values()), k=max(0, count - len(first)))]:
            step()
            self.taken[step.__name__] += 1
            self.count += 1

    def statuses(self) -> dict[str, str]:
        """Return the hosting status of each account that is not active, by DID."""
        return {account.did: status for status, accounts in self.hidden.items() for account in accounts}

    def write_record(self) -> None:
        """Create, update or delete one record."""
        account = self._any()
        self._apply(account, [self._write(account)])

    def write_many(self) -> None:
        """Make one commit with several writes."""
        account = self._any()
        writes = {(write["collection"], write["rkey"]): write for write in (self._write(account) for _ in range(15))}
        self._apply(account, list(writes.values()))

    def write_blob(self) -> None:
        """Upload a blob and create or update a record that refers to it."""
        account = self._any()
        blob = account.upload_blob(self._random.randbytes(500))
        self._apply(account, [self._write(account, {"blob": blob})])

    def create_account(self) -> None:
        """Create an account; if there are many, delete one first."""
        if len(self.active) >= MAX_ACTIVE:
            self.delete_account()
        self._names += 1
        account = self._random.choice(self._pdses).create_account(f"account{self._names}")
        self._paths[account.did] = set()
        self.active.append(account)

    def change_handle(self) -> None:
        """Change a handle."""
        self._any().set_handle(f"re{self._random.randrange(10**9)}")

    def rotate_key(self) -> None:
        """Change a signing key, and write with the new one."""
        account = self._any()
        self._exports[account.did] = account.export()
        account.rotate_key()
        self._apply(account, [self._write(account)])

    def migrate(self) -> None:
        """Move an account to another PDS, and write there. A copy that is left there of an earlier stay is deleted."""
        account = self._any()
        self._exports[account.did] = account.export()
        account.migrate(self._random.choice([pds for pds in self._pdses if pds is not account.pds]))
        self._apply(account, [self._write(account)])

    def import_older(self) -> None:
        """Replace a repo by an earlier export of it, which undoes the writes since then, and write.

        The export may be from before a migration or a rotation of the key.
        """
        account = self._any()
        export = self._exports.pop(account.did, None)
        if export is None:
            export = account.export()
            self._apply(account, [self._write(account)])
        account.import_repo(export)
        self._paths[account.did] = set(account.records())
        self._apply(account, [self._write(account)])

    def lose_a_commit(self) -> None:
        """Make a commit that is never sent, and one after it.

        Each record has a value of its own: if an import removes one of two equal records, the PDS deletes their common
        block, and refuses later exports of the repo.
        """
        account, number = self._any(), self._random.randrange(10**9)
        write = {"action": "create", "collection": COLLECTIONS[0], "rkey": f"lost{number}"}
        account.write_silently([write | {"record": {"$type": COLLECTIONS[0], "lost": number}}])
        self._apply(account, [self._write(account)])

    def deactivate(self) -> None:
        """Deactivate an account."""
        account = self._removed()
        account.deactivate()
        self.hidden["deactivated"].append(account)

    def activate(self) -> None:
        """Activate a deactivated account."""
        account = self._restored("deactivated", self.deactivate)
        account.activate()
        self.active.append(account)

    def take_down(self) -> None:
        """Take an account down."""
        account = self._removed()
        account.take_down(applied=True)
        self.hidden["takendown"].append(account)

    def reverse_takedown(self) -> None:
        """Reverse a takedown."""
        account = self._restored("takendown", self.take_down)
        account.take_down(applied=False)
        self.active.append(account)

    def delete_account(self) -> None:
        """Delete an account."""
        account = self._removed()
        account.delete_account()
        self.hidden["deleted"].append(account)

    def _any(self) -> RealAccount:
        """Return an active account."""
        while len(self.active) < MIN_ACTIVE:
            self.create_account()
        return self._random.choice(self.active)

    def _removed(self) -> RealAccount:
        """Take an account out of the active ones."""
        account = self._any()
        self.active.remove(account)
        return account

    def _restored(self, status: str, hide: Callable[[], None]) -> RealAccount:
        """Take an account out of those with this status; if there is none, hide one first."""
        if not self.hidden[status]:
            hide()
        return self.hidden[status].pop(self._random.randrange(len(self.hidden[status])))

    def _write(self, account: RealAccount, fields: dict[str, Any] | None = None) -> Write:
        """Return a write that creates a record that does not exist, or updates or deletes one that does.

        With these fields of a record, it does not delete one.
        """
        collection, rkey = self._random.choice(COLLECTIONS), f"r{self._random.randrange(RKEYS)}"
        exists = f"{collection}/{rkey}" in self._paths[account.did]
        action = self._random.choice(("update", "delete") if fields is None else ("update",)) if exists else "create"
        write = {"$type": f"com.atproto.repo.applyWrites#{action}", "collection": collection, "rkey": rkey}
        value = {"$type": collection} | self._record() | (fields or {})
        return write if action == "delete" else write | {"value": value}

    def _record(self) -> dict[str, Any]:
        values: tuple[Any, ...] = (
            *("", "é 日本語 😀", 0, -1, 2**53 - 1, True, None, [], {}, [1, ["a", {}]], {"$bytes": "AAEC/w"}),
            {"$link": "bafyreidfayvfuwqa7qlnopdjiqrxzs6blmoeu4rujcjtnci5beludirz2a"},
        )
        names = self._random.sample(("a", "text", "é", "list", "a.b", "x" * 70), self._random.randrange(4))
        return {"n": self._random.randrange(10**9)} | {name: self._random.choice(values) for name in names}

    def _apply(self, account: RealAccount, writes: list[Write]) -> None:
        account.apply(writes)
        paths = self._paths[account.did]
        for write in writes:
            action, path = write["$type"].partition("#")[2], f"{write['collection']}/{write['rkey']}"
            self.taken[action] += 1
            (paths.discard if action == "delete" else paths.add)(path)
