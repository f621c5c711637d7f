"""Named points at which tests kill the process. They do nothing unless a test adds a function to `hooks`."""

from collections.abc import Callable
from typing import Final

COMMITTED: Final = "committed"
"""The point after the COMMIT of any transaction."""

hooks: Final[list[Callable[[str], object]]] = []
"""Called with the name of each point that is reached. Empty outside tests."""


def crash_point(name: str) -> None:
    """Call the hooks: the step that `name` says is done. If it is a step of a transaction, it is not committed yet."""
    for hook in hooks:
        hook(name)
