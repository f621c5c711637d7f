"""Add an account to each schedule whose hosting status changes, because the drawn faults rarely change one."""

from dataclasses import replace
from random import Random
from typing import get_args

from indexer.demo.local_plc import did_of
from tests.simulation.drawn_world import HOSTS, NOTE
from tests.simulation.fault_schedule import (
    MINUTE,
    AccountChange,
    Action,
    Commit,
    Episode,
    HostingStatus,
    Join,
    Schedule,
    SetStatus,
    Write,
)


def with_status_changes(schedule: Schedule) -> Schedule:
    """Return the schedule with one more account. All kinds of changes occur with consecutive seeds.

    The account becomes inactive in one episode. In a later one, it may become active again.
    """
    seed, episodes = schedule.seed, list(schedule.episodes)
    random = Random(f"status changes {seed}")
    status: HostingStatus = get_args(HostingStatus)[seed % len(get_args(HostingStatus))]
    handle = f"{random.randbytes(15).hex()}.test"
    did = did_of(handle)
    ends, returns = sorted(random.sample(range(len(episodes)), 2))
    is_back = status != "deleted" and random.random() < 0.5

    first = (Join(0, did, handle, random.randrange(HOSTS), random.choice(("k256", "p256"))), _commit(did, 1))
    episodes[ends] = _with(episodes[ends], AccountChange(did, status), _commit(did, 2), SetStatus(0, did, status))
    last: tuple[Action, ...] = ()
    if is_back:
        back = SetStatus(0, did, None), _commit(did, 3)
        episodes[returns] = _with(episodes[returns], AccountChange(did, "activate"), *back)
        last = (_commit(did, 4),)
    return replace(
        schedule,
        first=_mixed(schedule.first, first),
        episodes=tuple(episodes),
        last=_mixed(schedule.last, last),
    )


def _commit(did: str, number: int) -> Commit:
    path = f"{NOTE}/s{number}"
    return Commit(0, did, (Write("create", path, {"$type": NOTE, "text": f"status {number}", "public": True}),))


def _with(episode: Episode, fault: AccountChange, *actions: Action) -> Episode:
    return replace(episode, faults=(*episode.faults, fault), actions=_mixed(episode.actions, actions))


def _mixed(actions: tuple[Action, ...], added: tuple[Action, ...]) -> tuple[Action, ...]:
    """Put each added action after one of the first actions, with a time between that of this one and the next."""
    assert len(added) <= len(actions), "there is no place for all added actions"
    mixed = list[Action]()
    for number, action in enumerate(actions):
        mixed.append(action)
        if number < len(added):
            mixed.append(replace(added[number], time=action.time + MINUTE // 2))
    return tuple(mixed)
