"""The hypothesis profiles of the tests: `full` by default, and `quick` for `make check`."""

from hypothesis import settings

FULL_EXAMPLES = 100
QUICK_EXAMPLES = 10


def register_profiles() -> None:
    """Register the profiles and load `full`; the option `--hypothesis-profile` loads another one later."""
    # No deadlines: they would measure the load of the machine.
    settings.register_profile("full", max_examples=FULL_EXAMPLES, deadline=None)
    settings.register_profile("quick", max_examples=QUICK_EXAMPLES, deadline=None)
    settings.load_profile("full")


def scaled(examples: int) -> int:
    """Return the number of examples for a test that needs more or fewer than others, reduced in the profile `quick`."""
    return examples * settings().max_examples // FULL_EXAMPLES
