"""The state of a world while its schedule is drawn."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

from indexer.demo.local_plc import did_of
from tests.simulation.fault_schedule import (
    BEGINNING,
    MINUTE,
    Action,
    Commit,
    HostingStatus,
    Join,
    RelayMode,
    Value,
    Write,
)

HOSTS = 3
RELAYS = 2
NOTE, LIKE, DRAFT = "com.example.note", "com.example.like", "com.example.draft"
EVERYTHING = ("com.example.*",)
SCOPES = (EVERYTHING, (NOTE, LIKE), (NOTE, DRAFT))


@dataclass
class DrawnAccount:
    """An account as the drawing knows it."""

    did: str
    host: int
    status: HostingStatus | None = None
    paths: list[str] = field(default_factory=list)


class DrawnWorld:
    """The accounts, the scope and the clock while a schedule is drawn.

    Attributes:
        seed: The seed of the schedule.
        random: The source of all that is drawn.
        accounts: All accounts in the order in which they joined.
        bystanders: Those that no fault affects.
        scope: The selected collections.
        mode: `all` if the daemon follows all relays at once, `failover` if it follows one of them.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = Random(f"simulation {seed}")
        self.accounts: list[DrawnAccount] = []
        self.bystanders: list[DrawnAccount] = []
        self.scope = self.random.choice(SCOPES)
        self.mode: RelayMode = "failover" if seed % 3 == 1 else "all"
        self._silent: list[DrawnAccount] = []
        self._time = BEGINNING
        self._records = 0

    def time(self) -> int:
        self._time += MINUTE
        return self._time

    def join(self) -> Join:
        handle = f"{self.random.randbytes(15).hex()}.test"
        account = DrawnAccount(did_of(handle), self.random.randrange(HOSTS))
        self.accounts.append(account)
        return Join(self.time(), account.did, handle, account.host, self.random.choice(("k256", "p256")))

    def commit(self, account: DrawnAccount, collection: str | None = None) -> Commit:
        """Draw a commit of one to three writes to different records; the first one creates one in this collection."""
        writes = [self._create(account, collection or self.random.choice((NOTE, LIKE, DRAFT)))]
        present = [path for path in account.paths if path != writes[0].path]
        for path in self.random.sample(present, min(len(present), self.random.choice((0, 0, 1, 2)))):
            if self.random.random() < 0.5:
                account.paths.remove(path)
                writes.append(Write("delete", path))
            else:
                writes.append(Write("update", path, self._value(path)))
        return Commit(self.time(), account.did, tuple(writes))

    def mix(self, actions: Sequence[Action]) -> list[Action]:
        """Return the actions in another order, each with a time; those of one account stay in theirs."""
        waiting: dict[str, list[Action]] = {}
        for action in actions:
            waiting.setdefault(action.did, []).append(action)
        order = [action.did for action in actions]
        self.random.shuffle(order)
        return [replace(waiting[did].pop(0), time=self.time()) for did in order]

    def victim(self, taken: set[str]) -> DrawnAccount:
        """Draw an active account that is neither a bystander nor taken, and take it."""
        account = self.random.choice([each for each in self.concerned() if each.did not in taken])
        taken.add(account.did)
        return account

    def active(self) -> list[DrawnAccount]:
        return [account for account in self.accounts if account.status is None]

    def concerned(self) -> list[DrawnAccount]:
        """Return the active accounts that faults may affect."""
        return [account for account in self.active() if account not in self.bystanders]

    def talkative(self) -> list[DrawnAccount]:
        """Return the active accounts that may act in an episode in which no messages are lost."""
        return [account for account in self.active() if account not in self._silent]

    def silence(self) -> None:
        """Let the first bystander not act until the end: from now on, gaps may be open while accounts act."""
        self._silent = self.bystanders[:1]

    def _create(self, account: DrawnAccount, collection: str) -> Write:
        self._records += 1
        path = f"{collection}/r{self._records}"
        account.paths.append(path)
        return Write("create", path, self._value(path))

    def _value(self, path: str) -> Value:
        collection = path.partition("/")[0]
        return {"$type": collection, "text": f"text {self.random.randrange(10**9)}", "public": True}
