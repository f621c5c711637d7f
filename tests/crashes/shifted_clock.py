"""A wrong clock: the modules of the product read the time with an offset, which may change while the process runs.

Timers of asyncio and monotonic clocks keep running, as they do when the clock of a machine is set.
"""

import sys
import time
from pathlib import Path

from tests.crashes.short_waits import wait_little


class Offset:
    """The offset of the clocks of some processes.

    Attributes:
        file: Contains the offset in seconds.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.set(0)

    def set(self, seconds: int) -> None:
        """Let the clocks be ahead of the real time by some seconds; behind it if they are negative."""
        new = self.file.with_suffix(".new")
        new.write_text(str(seconds))
        new.replace(self.file)


def wait_little_with_wrong_clock(file: Path) -> None:
    """Shorten the waits of this process, and let it read the time with the offset in this file."""
    wait_little()
    right = time.time

    def wrong() -> float:
        return right() + int(file.read_text())

    time.time = wrong  # modules that are imported later
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "indexer":
            vars(module).update({key: wrong for key, value in vars(module).items() if value is right})
