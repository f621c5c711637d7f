"""Each target of the fuzzer runs its first inputs, and mutated ones. `make proof PART=fuzz` goes on."""

from random import Random

import pytest

from tests.fuzz.targets import TARGETS

INPUTS = 100


def flip_a_bit(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes(byte ^ 1 for byte in data[middle : middle + 1]) + data[middle + 1 :]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, row in TARGETS.items() if row.needs is None])
def test_first_and_mutated_inputs_reach_every_outcome_without_a_finding(name: str) -> None:
    random, target = Random(2), TARGETS[name].make()
    try:
        seeds = target.seeds(random, INPUTS)
        for data in [*seeds, *(target.mutate(seed, random, flip_a_bit) for seed in seeds)]:
            target.compare(data)
        assert target.counts.unused == []
    finally:
        target.close()
