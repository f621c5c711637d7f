"""Reads YAML files with the parser in C, which is ten times as fast as the one in Python."""

from pathlib import Path
from typing import Any

import yaml


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping that a YAML file contains."""
    document: dict[str, Any] = yaml.load(path.read_text(), yaml.CSafeLoader)
    return document
