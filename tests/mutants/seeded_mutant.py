"""Mutants: plausible bugs of the product, each as a text that replaces another one (docs/testing.md#mutants)."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).parents[2]
SEEDED = Path(__file__).with_name("seeded")
"""The folder of the mutants: a file for each part of the product."""


@dataclass(frozen=True, slots=True)
class Tier:
    """A set of tests.

    Attributes:
        arguments: The arguments of pytest that select all of them.
        hides_native_core: Run them with the Python core, so that the native core does not hide its mutants.
    """

    arguments: tuple[str, ...]
    hides_native_core: bool = False


UNIT = ("atproto", "sync", "pds", "relay", "identity", "outbound", "concurrency", "monitoring")
UNIT_FILES = ("test_settings.py", "test_redaction.py")
TIERS = {
    "unit": Tier(tuple(f"tests/{name}" for name in (*UNIT, *UNIT_FILES))),
    "store": Tier(("tests/store",)),
    "service": Tier(("tests/service",), hides_native_core=True),
    "daemon": Tier(("tests/daemon", "tests/cli", "tests/test_recovery.py"), hides_native_core=True),
    "crash": Tier(("tests/test_crash.py", "tests/crashes"), hides_native_core=True),
    "simulation": Tier(("tests/simulation",), hides_native_core=True),
    "cluster": Tier(("tests/citus",), hides_native_core=True),
}
"""The tiers by name, in the order in which a mutant has to pass them."""


class MutantError(Exception):
    """A mutant does not fit the product, or its description is incomplete."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A bug that tests must find.

    Attributes:
        name: Unique among all mutants.
        part: The part of the product, which is the name of the file that describes it.
        bug: A sentence that says what is wrong.
        file: The path of the changed file in the project.
        old: The text that is replaced. It occurs once in the file.
        new: The text in its place.
        tier: The tier that kills it.
        tests: The tests of this tier that kill it, as arguments of pytest.
    """

    name: str
    part: str
    bug: str
    file: str
    old: str
    new: str
    tier: str
    tests: tuple[str, ...]

    def applied_to(self, source: str) -> str:
        """Return the changed source of its file.

        Raises:
            MutantError: The old text does not occur exactly once, or the new text is the same.
        """
        if (count := source.count(self.old)) != 1:
            raise MutantError(f"{self.name}: the old text occurs {count} times in {self.file}")
        changed = source.replace(self.old, self.new)
        if changed == source:
            raise MutantError(f"{self.name}: the new text is the old one")
        return changed


def load_mutants(folder: Path = SEEDED) -> list[Mutant]:
    """Return all mutants, by part and in the order of their files.

    Raises:
        MutantError: A description lacks a field, has an unknown one, or names no tier.
    """
    mutants = []
    for file in sorted(folder.glob("*.toml")):
        for name, fields in tomllib.loads(file.read_text()).items():
            try:
                mutant = Mutant(name, file.stem, **fields | {"tests": tuple(fields.get("tests", ()))})
            except TypeError as error:
                raise MutantError(f"{file.name}: {name}: {error}") from None
            if mutant.tier not in TIERS or not mutant.tests:
                raise MutantError(f"{file.name}: {name} names no tier, or no tests")
            mutants.append(mutant)
    return mutants
