"""Let single relays omit commits in worlds whose daemon follows all relays."""

from dataclasses import replace
from random import Random

from tests.simulation.drawn_world import RELAYS
from tests.simulation.fault_schedule import AccountFault, Commit, Episode, OmittedCommit, Schedule
from tests.simulation.world_oracle import GAPS


def with_omissions(schedule: Schedule) -> Schedule:
    """Return the schedule with a commit in each episode that one relay omits, if the daemon follows all relays.

    The account of the commit has no other fault. Episodes whose faults may open a gap have no omission.
    """
    if schedule.mode != "all":
        return schedule
    random = Random(f"omissions {schedule.seed}")
    return replace(schedule, episodes=tuple([_with_omission(episode, random) for episode in schedule.episodes]))


def _with_omission(episode: Episode, random: Random) -> Episode:
    taken = {fault.did for fault in episode.faults if isinstance(fault, AccountFault)}
    dids = [action.did for action in episode.actions if isinstance(action, Commit) and action.did not in taken]
    if not dids or any(type(fault) in GAPS for fault in episode.faults):
        return episode
    omitted = OmittedCommit(random.choice(dids), random.randrange(RELAYS))
    return replace(episode, faults=(*episode.faults, omitted))
