"""Mutations of JSON that keep it JSON, so that mutated documents get past the parser."""

import json
from collections.abc import Iterator
from copy import deepcopy
from random import Random
from typing import Any

from tests.fuzz.fuzz_target import MutateBytes

ANY_BYTES = 0.15
"""Share of mutations of the bytes of the text."""
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 1e300, 0.5, "", "a", "é", "\0", "\ud800", "a.b.c", "#main",
    [], {}, [[]], [{}], {"": {}}, "x" * 300,
)  # fmt: skip
Place = tuple[Any, Any]
"""A container, and the key or the index of a value in it."""


def mutate_json(data: bytes, random: Random, mutate_bytes: MutateBytes) -> bytes:
    """Return mutated JSON; mutated bytes if the data is not JSON, and sometimes if it is."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return mutate_bytes(data)
    if random.random() < ANY_BYTES or not isinstance(document, list | dict):
        return mutate_bytes(data)
    for _ in range(random.choice((1, 1, 2, 4))):
        _change(document, random, mutate_bytes)
    return json.dumps(document).encode()


def _change(document: Any, random: Random, mutate_bytes: MutateBytes) -> None:
    """Change one value: replace, remove, rename, copy or mutate it."""
    places = list(_places(document))
    if not places:
        return
    container, key = random.choice(places)
    other, other_key = random.choice(places)
    value = container[key]
    match random.randrange(6):
        case 0:
            del container[key]
        case 1:
            container[key] = deepcopy(random.choice(VALUES))
        case 2:
            container[key] = deepcopy(other[other_key])
        case 3 if isinstance(container, dict):
            container[random.choice((str(other_key), mutate_bytes(str(key).encode()).decode(errors="replace")))] = value
        case 4 if isinstance(container, list):
            container += [deepcopy(value) for _ in range(random.choice((1, 3, 120)))]
        case _ if isinstance(value, str):
            container[key] = mutate_bytes(value.encode(errors="replace")).decode(errors="replace")
        case _:
            container[key] = deepcopy(random.choice(VALUES))


def _places(value: Any) -> Iterator[Place]:
    """Yield the places of all values in a document."""
    left = [value]
    while left:
        container = left.pop()
        for key, inner in list(container.items() if isinstance(container, dict) else enumerate(container)):
            yield container, key
            if isinstance(inner, list | dict):
                left.append(inner)
