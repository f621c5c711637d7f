"""A disk that cannot read the open file of an export any more."""

import os
from contextlib import suppress
from pathlib import Path


def make_unreadable(directory: Path) -> None:
    """Let each read of the one file in this directory that this process has open fail with an OSError."""
    [descriptor] = open_descriptors(directory)
    unreadable = os.open(os.devnull, os.O_WRONLY)
    os.dup2(unreadable, descriptor, inheritable=False)
    os.close(unreadable)


def open_descriptors(directory: Path) -> list[int]:
    """Return the descriptors of the open files of this process in the directory. They may have no name any more."""
    descriptors = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the directory itself is closed by now
            if descriptor.readlink().is_relative_to(directory):
                descriptors.append(int(descriptor.name))
    return descriptors
