"""Compare the JSON lines of commands with the fields that docs/commands.md lists."""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from indexer.cli.json_fields import JSON_LINES


def check_json_lines(arguments: Sequence[str], stdout: str) -> None:
    """Fail if a command printed a line with other fields than the listed ones. Without --json, do nothing."""
    if "--json" not in arguments:
        return
    words = [word for word in arguments if not word.startswith("-")]
    name = next(name for name in (" ".join(words[:2]), words[0], f"{words[0]} list") if name in JSON_LINES)
    kinds = [{f".{path}" for path in fields} for fields in JSON_LINES[name].values()]
    for line in stdout.splitlines():
        differences = [sorted(different_fields(json.loads(line), fields)) for fields in kinds]
        assert [] in differences, f"{name}: {differences}"


def different_fields(value: Any, fields: Collection[str], at: str = "") -> Iterator[str]:
    """Yield the fields that are missing or not listed, in the value at the path `at`."""
    if isinstance(value, list):
        for item in value:
            yield from different_fields(item, fields, f"{at}[]")
    elif isinstance(value, dict):
        below = (field.removeprefix(f"{at}.") for field in fields if field.startswith(f"{at}."))
        names = {re.split(r"[.[]", path)[0] for path in below}
        if names:  # otherwise the names come from the data
            yield from (f"{at}.{name}" for name in names ^ value.keys())
            for name in names & value.keys():
                yield from different_fields(value[name], fields, f"{at}.{name}")
