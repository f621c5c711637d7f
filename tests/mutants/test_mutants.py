"""Each mutant fits the product and names tests that exist, and the runner tells killed mutants from survivors."""

import ast
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.__main__ import summarize
from tests.mutants.general_mutants import MODULES, Judgement, Survivor, load_judgements, parse_diff, unjudged
from tests.mutants.mutant_runner import (
    Outcome,
    ProjectCopy,
    SkippedTestsError,
    UnusableTestsError,
    kill,
    without_broken_tests,
)
from tests.mutants.seeded_mutant import PROJECT, TIERS, Mutant, MutantError, Tier, load_mutants

MUTANTS = load_mutants()

# A product with a test in each of two tiers, a test that fails, and one that is skipped.
PRODUCT = "def double(number):\n    return 2 * number\n"
PROJECT_TESTS = {
    "conftest.py": "from hypothesis import settings\n\nsettings.register_profile('quick')\n",
    "first/test_zero.py": "from product import double\n\ndef test_zero():\n    assert double(0) == 0\n",
    "first/test_broken.py": "import logging\n\ndef test_broken():\n    logging.error('lost')\n    assert False\n",
    "first/test_nothing.py": "def test_nothing():\n    pass\n",
    "first/test_skipped.py": "import pytest\n\n@pytest.mark.skip(reason='no cluster')\ndef test_one():\n    pass\n",
    "second/test_one.py": "from product import double\n\ndef test_one():\n    assert double(1) == 2\n",
}
PROJECT_TIERS = {"unit": Tier(("first/test_zero.py",)), "store": Tier(("second",))}


def mutant_of(**fields: object) -> Mutant:
    known: dict[str, object] = {
        "name": "a", "part": "b", "bug": "c", "file": "product.py", "old": "2 * number", "new": "3 * number",
        "tier": "unit", "tests": ("first/test_zero.py",),
    }  # fmt: skip
    return Mutant(**known | fields)  # type: ignore[arg-type]


@pytest.fixture
def copy(tmp_path: Path) -> ProjectCopy:
    project = tmp_path / "original"
    for name, text in {"product.py": PRODUCT, **PROJECT_TESTS}.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    subprocess.run(["git", "init", "--quiet"], cwd=project, check=True)
    return ProjectCopy(project, tmp_path / "copy", PROJECT_TIERS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_fits_the_product_and_names_tests(mutant: Mutant) -> None:
    changed = mutant.applied_to((PROJECT / mutant.file).read_text())
    if mutant.file.endswith(".py"):
        ast.parse(changed)
    assert mutant.bug.endswith(".")
    for test in mutant.tests:
        assert (PROJECT / test).exists(), test


def test_mutants_are_many_and_have_different_names() -> None:
    assert len(MUTANTS) >= 60
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []


def test_tests_of_a_tier_exist() -> None:
    for tier in TIERS.values():
        assert all((PROJECT / argument).exists() for argument in tier.arguments)


@pytest.mark.parametrize("old", ["4 * number", "number"])
def test_mutant_that_does_not_fit_is_an_error(old: str) -> None:
    with pytest.raises(MutantError, match="occurs"):
        mutant_of(old=old).applied_to(PRODUCT)


@pytest.mark.slow
def test_mutant_is_killed_by_the_tests_that_it_names(copy: ProjectCopy) -> None:
    mutant = mutant_of(new="number + 2")
    outcome = kill(copy, mutant, 60, PROJECT_TIERS)
    assert (outcome.killed_by, outcome.named, outcome.test) == ("unit", True, "first/test_zero.py::test_zero")
    assert outcome.as_expected


@pytest.mark.slow
def test_mutant_that_only_other_tests_of_its_tier_kill_is_told_from_one_that_its_own_tests_kill(
    copy: ProjectCopy,
) -> None:
    outcome = kill(copy, mutant_of(new="number + 2", tests=("first/test_nothing.py",)), 60, PROJECT_TIERS)
    assert (outcome.killed_by, outcome.named, outcome.test) == ("unit", False, "first/test_zero.py::test_zero")
    assert outcome.as_expected


@pytest.mark.slow
def test_mutant_that_only_a_later_tier_kills_is_not_as_expected(copy: ProjectCopy) -> None:
    outcome = kill(copy, mutant_of(), 60, PROJECT_TIERS)
    assert (outcome.killed_by, outcome.test) == ("store", "second/test_one.py::test_one")
    assert not outcome.as_expected


@pytest.mark.slow
def test_mutant_survives_if_all_tests_pass(copy: ProjectCopy) -> None:
    outcome = kill(copy, mutant_of(new="number * 2"), 60, PROJECT_TIERS)
    assert outcome.killed_by is None
    assert not outcome.as_expected


@pytest.mark.slow
def test_copy_is_the_product_again_after_a_mutant(copy: ProjectCopy) -> None:
    kill(copy, mutant_of(new="number + 2"), 60, PROJECT_TIERS)
    assert (copy.root / "product.py").read_text() == PRODUCT


@pytest.mark.slow
def test_test_that_fails_without_the_mutant_kills_nothing(copy: ProjectCopy) -> None:
    killed, broken = [
        kill(copy, mutant_of(new="number + 2", tests=(f"first/test_{name}.py",)), 60, PROJECT_TIERS)
        for name in ("zero", "broken")
    ]
    assert broken.test == "first/test_broken.py::test_broken"
    assert [outcome.killed_by for outcome in without_broken_tests(copy, [killed, broken], 60)] == ["unit", None]


@pytest.mark.slow
def test_mutant_that_cannot_be_imported_is_an_error_and_not_killed(copy: ProjectCopy) -> None:
    with pytest.raises(UnusableTestsError, match="pytest ended with 2"):
        kill(copy, mutant_of(old="def double", new="def triple"), 60, PROJECT_TIERS)


@pytest.mark.slow
def test_skipped_tests_say_nothing_about_a_mutant(copy: ProjectCopy) -> None:
    with pytest.raises(SkippedTestsError, match=r"all tests were skipped of first/test_skipped.py(.|\n)*no cluster"):
        kill(copy, mutant_of(tests=("first/test_skipped.py",)), 60, PROJECT_TIERS)


@pytest.mark.slow
@pytest.mark.usefixtures("copy")
def test_mutant_survives_although_a_later_tier_is_skipped(tmp_path: Path) -> None:
    tiers = PROJECT_TIERS | {"cluster": Tier(("first/test_skipped.py",))}
    copy = ProjectCopy(tmp_path / "original", tmp_path / "another", tiers)
    assert kill(copy, mutant_of(new="number * 2"), 60, tiers).killed_by is None


@pytest.mark.parametrize(
    ("outcomes", "allow_skipped", "code"),
    [
        ({"killed_by": "unit", "named": True}, False, 0),
        ({"killed_by": None}, True, 1),
        ({"killed_by": None, "skipped": True}, True, 0),
        ({"killed_by": None, "skipped": True}, False, 1),
    ],
)
def test_skipped_mutants_are_an_error_unless_they_are_allowed(
    outcomes: dict[str, Any], allow_skipped: bool, code: int
) -> None:
    outcome = Outcome(mutant_of(), None, False, "", 1.0)._replace(**outcomes)
    assert summarize([outcome], allow_skipped=allow_skipped) == code


@pytest.mark.slow
def test_tests_over_the_time_limit_are_an_error(copy: ProjectCopy) -> None:
    with pytest.raises(UnusableTestsError, match="no result within"):
        kill(copy, mutant_of(new="[0 for _ in iter(int, 1)]"), 5, PROJECT_TIERS)


DIFF = """
# indexer.product.x_double__mutmut_1: survived
--- indexer/product.py
+++ indexer/product.py
@@ -1,3 +1,3 @@
 def double(number):
-    return 2 * number
+    return 3 * number
"""


def test_survivor_of_mutmut_is_known_by_its_changed_lines() -> None:
    survivor = parse_diff(DIFF)
    assert survivor == Survivor("indexer/product.py", "return 2 * number", "return 3 * number")
    judged = [Judgement(survivor, "equivalent", "A reason.")]
    other = survivor._replace(new="return 4 * number")
    assert unjudged([survivor, other, other], judged) == [other]


def test_judgements_are_about_the_present_source_and_have_reasons() -> None:
    judgements = load_judgements()
    assert len({judgement.survivor for judgement in judgements}) == len(judgements)
    for judgement in judgements:
        lines = {line.strip() for line in (PROJECT / judgement.survivor.file).read_text().splitlines()}
        assert set(judgement.survivor.old.splitlines()) <= lines, judgement
        assert judgement.verdict in {"equivalent", "not worth a test"}
        assert judgement.reason.endswith(".")


def test_all_modules_of_the_pure_packages_are_mutated() -> None:
    assert {"indexer/sync/verify.py", "indexer/atproto/mst/node.py"} <= set(MODULES)
    assert [module for module in MODULES if not (PROJECT / module).exists()] == []
