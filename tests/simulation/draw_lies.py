"""Let one host of each world lie in its list of accounts."""

from base64 import b32encode
from dataclasses import replace
from random import Random

from tests.simulation.drawn_world import HOSTS
from tests.simulation.fault_schedule import Episode, LyingHost, Schedule
from tests.simulation.world_oracle import tid_of

INVENTED = 5


def with_lies(schedule: Schedule) -> Schedule:
    """Return the schedule with one more episode, in which a host lies. Nobody acts in it."""
    random = Random(f"lies {schedule.seed}")
    invented = ["did:plc:" + b32encode(random.randbytes(15)).decode().lower() for _ in range(INVENTED)]
    newest = max(action.time for action in schedule.actions)
    lies = LyingHost(random.randrange(HOSTS), tuple(invented), tid_of(newest + random.randrange(10**12)))
    return replace(schedule, episodes=(*schedule.episodes, Episode((lies,))))
