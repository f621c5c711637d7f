"""The base classes of all targets, and how they read an input."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, TypeVar

from tests.atproto.dag_cbor_oracle import canonical_value

T = TypeVar("T")
MutateBytes = Callable[[bytes], bytes]
"""Returns mutated bytes: the fuzzer's own mutation."""
PIECES = (".", "-", "/", ":", "%", "*", "~", "0", "Z", "\n", "é", "a" * 64, ".a" * 130, "at://", ",")


class FuzzTarget:
    """A target that holds nothing but memory, and whose inputs have no form."""

    def mutate(self, data: bytes, _: Random, mutate_bytes: MutateBytes, /) -> bytes:
        """Return mutated bytes."""
        return mutate_bytes(data)

    def close(self) -> None:
        """Release what the target holds besides memory."""


class TextTarget(FuzzTarget):
    """A target whose inputs are texts. Bytes that are not UTF-8 become U+FFFD, as in decoded texts."""

    def mutate(self, data: bytes, random: Random, mutate_bytes: MutateBytes) -> bytes:
        """Return mutated bytes, or a text with a piece of syntax at some place."""
        if random.random() < 0.6:
            return mutate_bytes(data)
        place = random.randrange(len(data) + 1)
        return data[:place] + random.choice(PIECES).encode() + data[place + random.randrange(3) :]


def text_of(data: bytes) -> str:
    """Return the text of an input."""
    return data.decode(errors="replace")


def canonical(data: bytes) -> Any:
    """Return the value of canonical DAG-CBOR, as the reference reads it; None for other bytes."""
    try:
        return canonical_value(data)
    except (ValueError, RecursionError):
        return None


class Choices:
    """Takes choices from bytes; 0 after the last one."""

    def __init__(self, data: bytes) -> None:
        self._bytes = iter(data)

    def number(self, limit: int) -> int:
        """Return a number below the limit."""
        return next(self._bytes, 0) % limit

    def of(self, values: Sequence[T]) -> T:
        """Return one of the values."""
        return values[self.number(len(values))]
