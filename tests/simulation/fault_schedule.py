"""The schedule of one simulated world: pure data, drawn from a seed.

A schedule is a list of episodes. In an episode, accounts act while faults are in effect. Everything that the oracle has
to know is here: each action has the time that its commit carries, and each fault says which accounts it affects.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Value = Mapping[str, str | int | bool | None]
Damage = Literal["blocks cut", "bit flipped", "frame cut", "frame empty"]
ExportProblem = Literal["cut", "truncated", "hanging", "slow", "error", "foreign signature"]
DirectoryProblem = Literal["error", "hanging"]
ForgedMessage = Literal[
    "commit by another key",
    "sync by another key",
    "commit of another repo",
    "sync of another repo",
    "high-S signature",
    "future commit",
]
DatabaseProblem = Literal["refused", "hanging"]
HostProblem = Literal["dead", "forging", "old exports", "cut exports", "denying", "failing", "hanging", "slow"]
HostingStatus = Literal["deactivated", "takendown", "suspended", "deleted"]
RelayMode = Literal["all", "failover"]

MINUTE = 60_000_000
BEGINNING = 1_767_225_600_000_000
"""Microseconds since 1970 of the first action: 1 January 2026."""


@dataclass(frozen=True)
class Write:
    """A write of a commit. `value` is None for a delete."""

    action: Literal["create", "update", "delete"]
    path: str
    value: Value | None = None


@dataclass(frozen=True)
class Action:
    """One act of an account.

    Attributes:
        time: Microseconds since 1970: the time of its events, and of the rev of its commit if it makes one.
        did: The account.
    """

    time: int
    did: str


@dataclass(frozen=True)
class Join(Action):
    """The account is created on a host, with an empty repo."""

    handle: str
    host: int
    curve: Literal["k256", "p256"]


@dataclass(frozen=True)
class Commit(Action):
    """The account makes one commit of all writes."""

    writes: tuple[Write, ...]


@dataclass(frozen=True)
class RotateKey(Action):
    """The account gets a new signing key, and signs its repo again."""


@dataclass(frozen=True)
class Migrate(Action):
    """The account moves to another host, with a new key."""

    host: int


@dataclass(frozen=True)
class SetStatus(Action):
    """The host changes the status of the account; None: active."""

    status: HostingStatus | None


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong during an episode. The world records that it happened."""


@dataclass(frozen=True)
class AccountFault(Fault):
    """A fault that hits one account."""

    did: str


@dataclass(frozen=True)
class LostCommit(AccountFault):
    """The relays do not send the next commit of the account."""


@dataclass(frozen=True)
class OmittedCommit(AccountFault):
    """One relay does not send the next commit of the account. The others do."""

    relay: int


@dataclass(frozen=True)
class DamagedCommit(AccountFault):
    """The next commit of the account arrives damaged."""

    damage: Damage


@dataclass(frozen=True)
class DelayedMessages(AccountFault):
    """Relays send the messages of the account after all others of the episode."""

    relays: tuple[int, ...]


@dataclass(frozen=True)
class FaultyExport(AccountFault):
    """The relays lose a commit of the account, and its host does not serve the next exports correctly."""

    kind: ExportProblem
    times: int


@dataclass(frozen=True)
class UnreachableDirectory(AccountFault):
    """The directory does not answer while the account rotates its key."""

    kind: DirectoryProblem


@dataclass(frozen=True)
class AccountChange(AccountFault):
    """The account rotates its key, migrates, or changes its status: the actions of the episode say what."""

    kind: str


@dataclass(frozen=True)
class Forgery(AccountFault):
    """Relays send a message that claims to be of the account.

    Attributes:
        time: The time of its rev.
    """

    kind: ForgedMessage
    time: int


@dataclass(frozen=True)
class RepeatedMessages(Fault):
    """Relays send the newest messages again, with their old sequence numbers or with new ones.

    They do so before the actions of the episode, and once more after it.
    """

    count: int
    renumbered: bool


@dataclass(frozen=True)
class UndecodableMessages(Fault):
    """Relays send messages that are no frames.

    Attributes:
        count: How many.
        late: True: after the actions of the episode; False: before them.
    """

    count: int
    late: bool


@dataclass(frozen=True)
class BrokenConnection(Fault):
    """The relay breaks the connection after the actions of the episode."""


@dataclass(frozen=True)
class Moment:
    """A moment of the work of the daemon.

    Attributes:
        point: The name of a crash point of the daemon.
        committed: True: after the COMMIT of the transaction in which the point is reached; False: at the point.
        other: The point that the daemon reaches instead in another state of the database.
    """

    point: str
    committed: bool = False
    other: str | None = None


@dataclass(frozen=True)
class KilledDaemon(Fault):
    """The daemon is killed with SIGKILL before the actions of the episode, and starts again after them."""


@dataclass(frozen=True)
class KilledAtPoint(Fault):
    """The daemon is killed before the actions of the episode. The next process kills itself at a moment of its work.

    Attributes:
        moment: The moment. The actions and the other faults of the episode cause the work.
        late: True: this process starts after the actions; False: before them.
        quiet: True: before, the daemon has fetched everything that it had to fetch.
    """

    moment: Moment
    late: bool
    quiet: bool = False


@dataclass(frozen=True)
class LostWindow(Fault):
    """The daemon is away during the episode, and the relay has only the newest messages when it returns.

    Attributes:
        remaining: How many messages the relay still has.
        announced: True if the relay says that the cursor is outdated.
        moment: The daemon that returns kills itself at this moment, and another one follows; None: it does not.
    """

    remaining: int
    announced: bool
    moment: Moment | None = None


@dataclass(frozen=True)
class RestartedSequence(Fault):
    """The relay starts a new sequence after the actions of the episode, and loses all messages before.

    Attributes:
        announced: True if the relay says that the cursor of the daemon is in the future.
    """

    announced: bool


@dataclass(frozen=True)
class StoppedRelay(Fault):
    """A relay that the daemon follows stops. With `failover`, the daemon changes over to another one."""


@dataclass(frozen=True)
class UnreachableDatabase(Fault):
    """The database breaks all connections, or does not answer."""

    kind: DatabaseProblem


@dataclass(frozen=True)
class ChangedScope(Fault):
    """The operator selects other collections before the actions of the episode."""

    collections: tuple[str, ...]


@dataclass(frozen=True)
class BrokenHost(Fault):
    """A host does not serve correct exports any more, to the end of the world.

    `dead`: it does not answer. `forging`: it serves exports that its accounts have not signed. `old exports`: it serves
    the exports of before. `cut exports`: each export ends too early. `denying`: it denies that it has the repos.
    `failing`: it answers with an error. `hanging`: it accepts requests and does not answer. `slow`: it sends exports
    much too slowly.
    """

    host: int
    kind: HostProblem


@dataclass(frozen=True)
class LyingHost(Fault):
    """A host lists accounts that do not exist, and those of other hosts with false revs and statuses.

    Meanwhile, the lists of all hosts are read. Before, the daemon has fetched everything that it had to fetch.

    Attributes:
        invented: The DIDs that do not exist.
        rev: The false rev.
    """

    host: int
    invented: tuple[str, ...]
    rev: str


@dataclass(frozen=True)
class Episode:
    """Actions while faults are in effect.

    Attributes:
        faults: They begin in their order, and end in the opposite order.
        actions: The actions meanwhile.
        after: The actions after the end of the faults.
    """

    faults: tuple[Fault, ...] = ()
    actions: tuple[Action, ...] = ()
    after: tuple[Action, ...] = ()


NO_EPISODE = Episode()


@dataclass(frozen=True)
class Schedule:
    """A whole world.

    Attributes:
        hosts: The number of hosts (PDSes).
        relays: The number of relays.
        mode: `all` if the daemon follows all relays at once, `failover` if it follows one of them.
        collections: The collections that are selected at the beginning.
        bystanders: Accounts that no fault affects, and that do not act while messages are lost. The first one does not
            act either between the first fault that may open a gap and `last`.
        first: The actions before the first episode. The world waits until all of them are stored.
        episodes: The episodes.
        last: The actions after the last episode: each active account makes a commit. The world waits until all of them
            are stored.
        ending: An episode whose faults do not end.
    """

    seed: int
    hosts: int
    relays: int
    mode: RelayMode
    collections: tuple[str, ...]
    bystanders: tuple[str, ...]
    first: tuple[Action, ...]
    episodes: tuple[Episode, ...] = field(default=())
    last: tuple[Action, ...] = field(default=())
    ending: Episode = NO_EPISODE

    @property
    def before_ending(self) -> "Schedule":
        """The schedule without its ending."""
        return replace(self, ending=NO_EPISODE)

    @property
    def actions(self) -> tuple[Action, ...]:
        """All actions in their order."""
        during = tuple(action for episode in self.episodes for action in episode.actions + episode.after)
        return self.first + during + self.last + self.ending.actions

    @property
    def faults(self) -> tuple[Fault, ...]:
        """All faults in their order."""
        return tuple(fault for episode in (*self.episodes, self.ending) for fault in episode.faults)
