"""Draw a schedule from a seed. The same seed always gives the same schedule."""

from dataclasses import replace
from typing import get_args

from tests.simulation.draw_faults import (
    MAX_REMAINING,
    PROCESS_FAULTS,
    STREAM_FAULTS,
    Draw,
    draw_kill_at_point,
    nothing,
)
from tests.simulation.draw_lies import with_lies
from tests.simulation.draw_omissions import with_omissions
from tests.simulation.draw_status_changes import with_status_changes
from tests.simulation.drawn_world import HOSTS, RELAYS, DrawnWorld
from tests.simulation.fault_schedule import (
    Action,
    BrokenHost,
    Episode,
    Fault,
    Forgery,
    HostProblem,
    LostCommit,
    LostWindow,
    RestartedSequence,
    Schedule,
    UndecodableMessages,
)
from tests.simulation.world_oracle import GAPS

ACCOUNTS = 7
BYSTANDERS = 2
EPISODES = 4
JOIN_PROBABILITY = 0.2


def draw_schedule(seed: int) -> Schedule:
    """Return the schedule of a seed."""
    world = DrawnWorld(seed)
    first: list[Action] = [world.join() for _ in range(ACCOUNTS)]
    world.bystanders = world.accounts[:BYSTANDERS]
    first += [world.commit(account) for account in world.accounts]
    scope = world.scope
    processes: list[Draw] = [world.random.choice(list(PROCESS_FAULTS.values())) for _ in range(EPISODES)]
    processes[world.random.randrange(EPISODES)] = draw_kill_at_point
    episodes = [_draw_episode(world, process) for process in processes]
    last = [world.commit(account) for account in world.active()]
    schedule = Schedule(
        seed,
        HOSTS,
        RELAYS,
        world.mode,
        scope,
        tuple(account.did for account in world.bystanders),
        tuple(first),
        tuple(episodes),
        tuple(last),
        _draw_ending(world),
    )
    return with_lies(with_omissions(with_status_changes(schedule)))


def _draw_episode(world: DrawnWorld, process: Draw) -> Episode:
    """Draw one to three faults, with the actions that they need and a few more."""
    random, taken = world.random, set[str]()
    kinds = random.sample(list(STREAM_FAULTS), random.choice((1, 2, 2, 3) if process is nothing else (0, 1, 1, 2)))
    if "directory" in kinds and "forgery" in kinds:
        kinds.remove("forgery")  # a message whose key cannot be fetched may cause a fetch
    if "directory" in kinds and process is draw_kill_at_point:
        kinds.remove("directory")  # the daemon might not reach the point
    faults: list[Fault] = []
    actions: list[Action] = []
    for draw in [*(STREAM_FAULTS[kind] for kind in kinds), process]:
        drawn, needed = draw(world, taken)
        faults += drawn
        actions += needed
    lost = any(isinstance(fault, LostWindow | RestartedSequence) for fault in faults)
    if any(type(fault) in GAPS for fault in faults):  # a gap may be open from now on
        world.silence()
    others = world.talkative()
    if lost:  # only messages that the relay really sends count as lost
        others = [each for each in world.concerned() if each.did not in taken]
        faults = [replace(fault, late=True) if isinstance(fault, UndecodableMessages) else fault for fault in faults]
    actions += [world.commit(random.choice(others)) for _ in range(random.randrange(MAX_REMAINING + 1, 7))]
    if random.random() < JOIN_PROBABILITY and not lost:
        actions += [world.join(), world.commit(world.accounts[-1])]
    actions = world.mix(actions)
    sent_last = [replace(fault, time=world.time()) if isinstance(fault, Forgery) else fault for fault in faults]
    after = world.commit(random.choice(others))
    return Episode(tuple(sent_last), tuple(actions), (after,))


def _draw_ending(world: DrawnWorld) -> Episode:
    """Draw a host that fails for good, and accounts of it that have to be fetched."""
    victim = world.victim(set())
    neighbours = [each for each in world.concerned() if each.host == victim.host and each is not victim]
    victims = [victim, *(each for each in neighbours if world.random.random() < 0.5)]
    broken = BrokenHost(victim.host, world.random.choice(get_args(HostProblem)))
    actions = [world.commit(account) for account in [*victims, *world.active()]]
    return Episode((broken, *(LostCommit(each.did) for each in victims)), tuple(world.mix(actions)))
