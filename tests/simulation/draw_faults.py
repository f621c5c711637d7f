"""Draw single faults, with the actions that they need."""

from collections.abc import Callable, Sequence
from typing import get_args

from tests.simulation.drawn_world import DRAFT, EVERYTHING, HOSTS, LIKE, NOTE, SCOPES, DrawnWorld
from tests.simulation.fault_schedule import (
    AccountChange,
    Action,
    BrokenConnection,
    ChangedScope,
    Damage,
    DamagedCommit,
    DatabaseProblem,
    DelayedMessages,
    DirectoryProblem,
    ExportProblem,
    Fault,
    FaultyExport,
    ForgedMessage,
    Forgery,
    HostingStatus,
    KilledAtPoint,
    KilledDaemon,
    LostCommit,
    LostWindow,
    Migrate,
    Moment,
    RepeatedMessages,
    RestartedSequence,
    RotateKey,
    SetStatus,
    StoppedRelay,
    UndecodableMessages,
    UnreachableDatabase,
    UnreachableDirectory,
)

MIN_ACTIVE = 6
"""With fewer active accounts, an episode could lack accounts that no fault affects."""
MAX_REMAINING = 2
"""Messages that a relay may still have. An episode has more."""

Drawn = tuple[Sequence[Fault], Sequence[Action]]
Draw = Callable[[DrawnWorld, set[str]], Drawn]
"""Draws a fault. The set has the DIDs of the accounts that are taken: the draw adds those that it affects."""


def in_both(*points: str) -> list[Moment]:
    """Return the moments in the transactions, and after their COMMIT."""
    return [Moment(point, committed) for point in points for committed in (False, True)]


LIVE = [
    *map(Moment, ("shard.claimed", "stream.entered", "batch.taken", "batch.planned", "batch.settled")),
    *in_both("batch.written"),
]
"""Moments of each process."""
IDENTITY = [Moment("identity.resolved"), *in_both("identity.saved")]
"""Moments after a change of a key."""
RESYNC = [
    *in_both("claim.written", "resync.finished"),
    # The differences are inserted without a comparison if nothing of the repo is stored.
    *(Moment("resync.written", committed, other="resync.copied") for committed in (False, True)),
    *map(Moment, ("export.spooled", "export.verified", "resync.locked")),
]
"""Moments after a lost commit."""
FAILED_RESYNC = [Moment("resync.failed")]
GAP = [*in_both("gap.opened", "crawl.page", "gap.closed"), *map(Moment, ("crawl.saved", "reconciliation.compared"))]
"""Moments after a lost window."""
NARROWING = in_both("scope.narrowed")
WIDENING = in_both("scope.requested")


def _lost(world: DrawnWorld, taken: set[str]) -> Drawn:
    victim = world.victim(taken)
    return [LostCommit(victim.did)], [world.commit(victim, NOTE), world.commit(victim)]


def _damaged(world: DrawnWorld, taken: set[str]) -> Drawn:
    victim = world.victim(taken)
    damage = world.random.choice(get_args(Damage))
    return [DamagedCommit(victim.did, damage)], [world.commit(victim), world.commit(victim)]


def _delayed(world: DrawnWorld, taken: set[str]) -> Drawn:
    victim = world.victim(taken)
    relays = world.random.choice(((0,), (1,), (0, 1)))
    return [DelayedMessages(victim.did, relays)], [world.commit(victim), world.commit(victim)]


def _export(world: DrawnWorld, taken: set[str]) -> Drawn:
    victim = world.victim(taken)
    kind = world.random.choice(get_args(ExportProblem))
    times = 1 if kind == "hanging" else world.random.choice((1, 1, 2))
    return [FaultyExport(victim.did, kind, times)], [world.commit(victim), world.commit(victim)]


def _directory(world: DrawnWorld, taken: set[str]) -> Drawn:
    victim = world.victim(taken)
    kind = world.random.choice(get_args(DirectoryProblem))
    return [UnreachableDirectory(victim.did, kind)], [RotateKey(0, victim.did), world.commit(victim)]


def _rotation(world: DrawnWorld, taken: set[str]) -> Drawn:
    victim = world.victim(taken)
    return [AccountChange(victim.did, "rotate")], [RotateKey(0, victim.did), world.commit(victim)]


def _change(world: DrawnWorld, taken: set[str]) -> Drawn:
    """Draw a rotation, a migration, or a change of the status. An inactive account may become active again."""
    random = world.random
    inactive = [account for account in world.accounts if account.status not in (None, "deleted")]
    if inactive and random.random() < 0.5:
        account = random.choice(inactive)
        account.status = None
        taken.add(account.did)
        return [AccountChange(account.did, "activate")], [SetStatus(0, account.did, None), world.commit(account)]
    kind = random.choice(("rotate", "migrate", "status"))
    if kind == "rotate" or (kind == "status" and len(world.active()) <= MIN_ACTIVE):
        return _rotation(world, taken)
    victim = world.victim(taken)
    if kind == "migrate":
        victim.host = (victim.host + 1) % HOSTS
        return [AccountChange(victim.did, kind)], [Migrate(0, victim.did, victim.host), world.commit(victim)]
    last = world.commit(victim)
    status: HostingStatus = random.choice(get_args(HostingStatus))
    victim.status = status
    return [AccountChange(victim.did, status)], [last, SetStatus(0, victim.did, status)]


def _forgery(world: DrawnWorld, _taken: set[str]) -> Drawn:
    target = world.random.choice(world.bystanders)
    return [Forgery(target.did, world.random.choice(get_args(ForgedMessage)), 0)], []


def _repeated(world: DrawnWorld, _taken: set[str]) -> Drawn:
    return [RepeatedMessages(world.random.randrange(1, 6), world.random.random() < 0.5)], []


def _undecodable(world: DrawnWorld, _taken: set[str]) -> Drawn:
    return [UndecodableMessages(world.random.randrange(1, 4), world.random.random() < 0.5)], []


def nothing(_world: DrawnWorld, _taken: set[str]) -> Drawn:
    """Draw no fault."""
    return (), ()


def draw_kill_at_point(world: DrawnWorld, taken: set[str]) -> Drawn:
    """Draw the kill at a point that is in each world. Worlds with consecutive seeds have different moments."""
    causes: Sequence[tuple[list[Moment], Draw | None]] = (
        (LIVE, None), (IDENTITY, _rotation), (RESYNC, _lost), (FAILED_RESYNC, _failing_export)
    )  # fmt: skip
    pairs = [(moment, cause) for moments, cause in causes for moment in moments]
    moment, cause = pairs[world.seed % len(pairs)]
    faults, actions = cause(world, taken) if cause else ((), ())
    late = world.random.random() < 0.5
    # The first fetch of an account passes other points. So before, everything is fetched.
    return [*faults, KilledAtPoint(moment, late=late, quiet=cause is _lost)], actions


def _failing_export(world: DrawnWorld, taken: set[str]) -> Drawn:
    """Draw a resync that fails: the relay sends the daemon to the host, and then the daemon asks the host itself."""
    victim = world.victim(taken)
    return [FaultyExport(victim.did, "error", 2)], [world.commit(victim), world.commit(victim)]


def _window(world: DrawnWorld, _taken: set[str]) -> Drawn:
    moment = world.random.choice([*GAP, None])
    return [LostWindow(world.random.randint(1, MAX_REMAINING), world.random.random() < 0.5, moment)], []


def _scope(world: DrawnWorld, _taken: set[str]) -> Drawn:
    """Draw another scope than the present one. The daemon may be killed while it deletes or requests records."""
    before, world.scope = world.scope, world.random.choice([scope for scope in SCOPES if scope != world.scope])
    changed = ChangedScope(world.scope)
    removed = tuple(f"{name}/" for name in _names(before) - _names(world.scope))
    concerned = [account for account in world.active() if any(path.startswith(removed) for path in account.paths)]
    moments = WIDENING if world.scope == EVERYTHING else NARROWING if len(concerned) > 1 else []
    if not moments or world.random.random() < 0.5:
        return [changed], []
    # A resync that began before would delete the records of removed collections itself, or fetch those of added ones.
    return [KilledAtPoint(world.random.choice(moments), late=False, quiet=True), changed], []


def _names(scope: tuple[str, ...]) -> set[str]:
    return {NOTE, LIKE, DRAFT} if scope == EVERYTHING else set(scope)


STREAM_FAULTS: dict[str, Draw] = {
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
"""Faults that combine with each other and with each of the following ones."""

PROCESS_FAULTS: dict[str, Draw] = {
    "nothing": nothing,
    "broken": lambda _world, _taken: ([BrokenConnection()], ()),
    "killed": lambda _world, _taken: ([KilledDaemon()], ()),
    "stopped relay": lambda _world, _taken: ([StoppedRelay()], ()),
    "database": lambda world, _taken: ([UnreachableDatabase(world.random.choice(get_args(DatabaseProblem)))], ()),
    "window": _window,
    "restarted": lambda world, _taken: ([RestartedSequence(world.random.random() < 0.5)], ()),
    "scope": _scope,
}
"""At most one of them, or a kill at a point, is in an episode."""
