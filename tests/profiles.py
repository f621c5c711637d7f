"""The hypothesis profiles of the tests: `full` by default, `quick` for `make check`, `random` for `make proof`."""

from hypothesis import HealthCheck, settings

FULL_EXAMPLES = 100
QUICK_EXAMPLES = 10
RANDOM_EXAMPLES = 1_000


def register_profiles() -> None:
    """Register the profiles and load `full`; the option `--hypothesis-profile` loads another one later.

    The examples of `full` and `quick` are the same in each run, so that a change is never blamed for an old bug.
    """
    # No time limits: they would measure the load of the machine.
    unlimited = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("full", unlimited, max_examples=FULL_EXAMPLES, derandomize=True)
    settings.register_profile("quick", unlimited, max_examples=QUICK_EXAMPLES, derandomize=True)
    settings.register_profile("random", unlimited, max_examples=RANDOM_EXAMPLES)
    settings.load_profile("full")


def scaled(examples: int) -> int:
    """Return the number of examples for a test that needs more or fewer than others, reduced in the profile `quick`."""
    return examples * settings().max_examples // FULL_EXAMPLES
