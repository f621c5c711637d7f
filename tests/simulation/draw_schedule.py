"""Draw a schedule from a seed. The same seed always gives the same schedule."""

from base64 import b32encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import get_args

from tests.simulation.fault_schedule import (
    BEGINNING,
    MINUTE,
    AccountChange,
    Action,
    BrokenConnection,
    ChangedScope,
    Commit,
    Damage,
    DamagedCommit,
    DatabaseProblem,
    DelayedMessages,
    DirectoryProblem,
    Episode,
    ExportProblem,
    Fault,
    FaultyExport,
    ForgedMessage,
    Forgery,
    HostingStatus,
    Join,
    KilledDaemon,
    LostCommit,
    LostWindow,
    Migrate,
    RepeatedMessages,
    RestartedSequence,
    RotateKey,
    Schedule,
    SetStatus,
    StoppedRelay,
    UndecodableMessages,
    UnreachableDatabase,
    UnreachableDirectory,
    Value,
    Write,
)

HOSTS = 3
RELAYS = 2
ACCOUNTS = 7
BYSTANDERS = 2
MIN_ACTIVE = 6
"""With fewer active accounts, an episode could lack accounts that no fault affects."""
EPISODES = 5
JOIN_PROBABILITY = 0.2
MAX_REMAINING = 2
"""Messages that a relay may still have. An episode has more."""
NOTE, LIKE, DRAFT = "com.example.note", "com.example.like", "com.example.draft"
CORE = (NOTE, LIKE)
"""The collections that every scope has."""
ALL = ("com.example.*",)
NARROW = CORE

STREAM_FAULTS = ("lost", "damaged", "delayed", "export", "directory", "change", "forgery", "repeated", "undecodable")
"""Faults that combine with each other and with each of the following ones."""
PROCESS_FAULTS = ("broken", "killed", "stopped relay", "database", "window", "restarted", "scope", "nothing")
"""At most one of them is in an episode."""
LOSSES = ("window", "restarted")
"""With these faults, messages of everybody are lost."""


@dataclass
class _Account:
    """An account as the drawing of the schedule knows it."""

    did: str
    host: int
    status: HostingStatus | None = None
    paths: list[str] = field(default_factory=list)


class _Drawing:
    """The state while a schedule is drawn."""

    def __init__(self, seed: int) -> None:
        self.random = Random(f"simulation {seed}")
        self.accounts: list[_Account] = []
        self.bystanders: list[_Account] = []
        self._time = BEGINNING
        self._records = 0

    def time(self) -> int:
        self._time += MINUTE
        return self._time

    def join(self) -> Join:
        did = "did:plc:" + b32encode(self.random.randbytes(15)).decode().lower()
        account = _Account(did, self.random.randrange(HOSTS))
        self.accounts.append(account)
        return Join(self.time(), did, account.host, self.random.choice(("k256", "p256")))

    def commit(self, account: _Account) -> Commit:
        """Draw a commit of one to three writes to different records."""
        writes = [self._create(account)]
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

    def victim(self, taken: set[str]) -> _Account:
        """Draw an active account that is neither a bystander nor taken, and take it."""
        free = [account for account in self.active() if account.did not in taken and account not in self.bystanders]
        account = self.random.choice(free)
        taken.add(account.did)
        return account

    def active(self) -> list[_Account]:
        return [account for account in self.accounts if account.status is None]

    def _create(self, account: _Account) -> Write:
        self._records += 1
        path = f"{self.random.choice((NOTE, LIKE, DRAFT))}/r{self._records}"
        account.paths.append(path)
        return Write("create", path, self._value(path))

    def _value(self, path: str) -> Value:
        collection = path.partition("/")[0]
        return {"$type": collection, "text": f"text {self.random.randrange(10**9)}", "public": True}


def draw_schedule(seed: int) -> Schedule:
    """Return the schedule of a seed."""
    drawing = _Drawing(seed)
    first: list[Action] = [drawing.join() for _ in range(ACCOUNTS)]
    drawing.bystanders = drawing.accounts[:BYSTANDERS]
    first += [drawing.commit(account) for account in drawing.accounts]
    scope = drawing.random.choice((ALL, ALL, NARROW))
    episodes = [_draw_episode(drawing) for _ in range(EPISODES)]
    return Schedule(
        seed,
        HOSTS,
        RELAYS,
        scope,
        tuple(account.did for account in drawing.bystanders),
        tuple(first),
        tuple(episodes),
        tuple(drawing.commit(account) for account in drawing.active()),
    )


def _draw_episode(drawing: _Drawing) -> Episode:
    """Draw one to three faults, with the actions that they need and a few more."""
    random, taken = drawing.random, set[str]()
    process = random.choice(PROCESS_FAULTS)
    kinds = random.sample(STREAM_FAULTS, random.choice((0, 1, 1, 2) if process != "nothing" else (1, 2, 2, 3)))
    if "directory" in kinds and "forgery" in kinds:
        kinds.remove("forgery")  # a message whose key cannot be fetched may cause a fetch
    faults: list[Fault] = []
    actions: list[Action] = []
    for kind in kinds:
        fault, needed = _STREAM[kind](drawing, taken)
        faults.append(fault)
        actions += needed
    others = drawing.active()
    if process in LOSSES:  # only messages that the relay really sends count as lost
        others = [each for each in others if each not in drawing.bystanders and each.did not in taken]
    actions += [drawing.commit(random.choice(others)) for _ in range(random.randrange(MAX_REMAINING + 1, 7))]
    if random.random() < JOIN_PROBABILITY and process not in LOSSES:
        actions += [drawing.join(), drawing.commit(drawing.accounts[-1])]
    actions = drawing.mix(actions)
    if process != "nothing":
        faults.append(_PROCESS[process](drawing))
    sent_last = [replace(fault, time=drawing.time()) if isinstance(fault, Forgery) else fault for fault in faults]
    after = drawing.commit(random.choice(others))
    return Episode(tuple(sent_last), tuple(actions), (after,))


Drawn = tuple[Fault, Sequence[Action]]


def _lost(drawing: _Drawing, taken: set[str]) -> Drawn:
    victim = drawing.victim(taken)
    return LostCommit(victim.did), [drawing.commit(victim), drawing.commit(victim)]


def _damaged(drawing: _Drawing, taken: set[str]) -> Drawn:
    victim = drawing.victim(taken)
    damage = drawing.random.choice(get_args(Damage))
    return DamagedCommit(victim.did, damage), [drawing.commit(victim), drawing.commit(victim)]


def _delayed(drawing: _Drawing, taken: set[str]) -> Drawn:
    victim = drawing.victim(taken)
    relays = drawing.random.choice(((0,), (1,), (0, 1)))
    return DelayedMessages(victim.did, relays), [drawing.commit(victim), drawing.commit(victim)]


def _export(drawing: _Drawing, taken: set[str]) -> Drawn:
    victim = drawing.victim(taken)
    kind = drawing.random.choice(get_args(ExportProblem))
    return FaultyExport(victim.did, kind, drawing.random.choice((1, 1, 2))), [
        drawing.commit(victim),
        drawing.commit(victim),
    ]


def _directory(drawing: _Drawing, taken: set[str]) -> Drawn:
    victim = drawing.victim(taken)
    kind = drawing.random.choice(get_args(DirectoryProblem))
    return UnreachableDirectory(victim.did, kind), [RotateKey(0, victim.did), drawing.commit(victim)]


def _change(drawing: _Drawing, taken: set[str]) -> Drawn:
    """Draw a rotation, a migration, or a change of the status. An inactive account may become active again."""
    random = drawing.random
    inactive = [account for account in drawing.accounts if account.status not in (None, "deleted")]
    if inactive and random.random() < 0.5:
        account = random.choice(inactive)
        account.status = None
        taken.add(account.did)
        return AccountChange(account.did, "activate"), [
            SetStatus(0, account.did, None),
            drawing.commit(account),
        ]
    victim = drawing.victim(taken)
    kind = random.choice(("rotate", "migrate", "status"))
    if kind == "rotate":
        return AccountChange(victim.did, kind), [RotateKey(0, victim.did), drawing.commit(victim)]
    if kind == "migrate":
        victim.host = (victim.host + 1) % HOSTS
        moved = Migrate(0, victim.did, victim.host)
        return AccountChange(victim.did, kind), [moved, drawing.commit(victim)]
    if len(drawing.active()) <= MIN_ACTIVE:
        return AccountChange(victim.did, "rotate"), [RotateKey(0, victim.did)]
    last = drawing.commit(victim)
    status: HostingStatus = random.choice(get_args(HostingStatus))
    victim.status = status
    return AccountChange(victim.did, status), [last, SetStatus(0, victim.did, status)]


def _forgery(drawing: _Drawing, taken: set[str]) -> Drawn:
    target = drawing.random.choice(drawing.bystanders)
    return Forgery(target.did, drawing.random.choice(get_args(ForgedMessage)), 0), []


def _repeated(drawing: _Drawing, taken: set[str]) -> Drawn:
    return RepeatedMessages(drawing.random.randrange(1, 6), drawing.random.random() < 0.5), []


def _undecodable(drawing: _Drawing, taken: set[str]) -> Drawn:
    return UndecodableMessages(drawing.random.randrange(1, 4)), []


_STREAM: dict[str, Callable[[_Drawing, set[str]], Drawn]] = {
    "lost": _lost,
    "damaged": _damaged,
    "delayed": _delayed,
    "export": _export,
    "directory": _directory,
    "change": _change,
    "forgery": _forgery,
    "repeated": _repeated,
    "undecodable": _undecodable,
}
_PROCESS: dict[str, Callable[[_Drawing], Fault]] = {
    "broken": lambda _: BrokenConnection(),
    "killed": lambda _: KilledDaemon(),
    "stopped relay": lambda _: StoppedRelay(),
    "database": lambda drawing: UnreachableDatabase(drawing.random.choice(get_args(DatabaseProblem))),
    "window": lambda drawing: LostWindow(drawing.random.randint(1, MAX_REMAINING), drawing.random.random() < 0.5),
    "restarted": lambda drawing: RestartedSequence(drawing.random.random() < 0.5),
    "scope": lambda drawing: ChangedScope(drawing.random.choice((ALL, NARROW))),
}
