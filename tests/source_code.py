"""The source files of the project, for tests of rules that every file must follow."""

import os
from pathlib import Path

PROJECT = Path(__file__).parents[1]
NOT_OURS = ("node_modules", "__pycache__")


def source_files(*folders: str) -> list[Path]:
    """Return all files in folders of the project, except installed packages."""
    found = []
    for folder in folders:
        for directory, subfolders, names in os.walk(PROJECT / folder):
            subfolders[:] = [name for name in subfolders if name not in NOT_OURS]
            found += [Path(directory, name) for name in names]
    return sorted(found)
