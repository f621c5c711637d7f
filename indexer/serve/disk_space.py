"""The space on the file system of a directory."""

import math
import shutil
from pathlib import Path
from typing import NamedTuple


class DiskSpace(NamedTuple):
    """Free and total bytes of a file system; NaN if the system does not say it."""

    free: float
    size: float


def disk_space(directory: Path) -> DiskSpace:
    """Return the space for `directory`, or for its nearest parent if it does not exist yet."""
    path = directory.absolute()
    try:
        usage = shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists()))
    except OSError:  # for example, a network file system that has gone
        return DiskSpace(math.nan, math.nan)
    return DiskSpace(usage.free, usage.total)
