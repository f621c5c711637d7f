"""The log events that docs/logs.md lists."""

import re
from typing import NamedTuple

from tests.source_code import PROJECT

ENTRY = re.compile(r"^- `([a-z0-9.-]+)` \(([a-z ]+)(?:: ([^)]*))?\): ", re.MULTILINE)


class LogEvent(NamedTuple):
    levels: tuple[str, ...]
    fields: frozenset[str]


def listed_events() -> dict[str, LogEvent]:
    """Return the events by name."""
    page = (PROJECT / "docs" / "logs.md").read_text()
    return {
        name: LogEvent(tuple(levels.split(" or ")), frozenset(re.findall(r"`(\w+)`", fields)))
        for name, levels, fields in ENTRY.findall(page)
    }
