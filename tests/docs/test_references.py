"""References between the documentation, the code and the tests: every target exists."""

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from indexer.app.settings import OTHER_VARIABLES, Settings, variable
from indexer.reasons import Desync, FetchFailure, GapReason, Rejection
from indexer.telemetry import conditions
from tests.source_code import source_files

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
SOURCE_FOLDERS = ("indexer", "tests", "benchmarks", "migrations", "examples")
SOURCE_TYPES = frozenset({".py", ".sql", ".mako", ".ini", ".toml", ".sh", ".js", ".mjs", ".ts"})
SETTINGS = OTHER_VARIABLES | set(map(variable, Settings.model_fields)) | {"INDEXER_PORT"}
"""Also a variable of Kubernetes that docs/settings.md explains."""

FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: +(\S+)", re.MULTILINE)
DOCS_PATH = re.compile(r"\bdocs/[\w./-]+\.md(?:#[\w-]+)?")
TEST_PATH = re.compile(r"\btests/[\w/-]+(?:\.\w+)?")
MODULE_PATH = re.compile(r"`((?:indexer|tests|benchmarks|migrations|examples)/[\w./-]+)`")
TEST_NAME = re.compile(r"(?:(tests/[\w/]+\.py)|[`…])::(?:Test\w+::)?(test_\w+)")
SETTING = re.compile(r"\bINDEXER_[A-Z_]+\b")

RUNBOOK_ENTRY = re.compile(r"^- (`[\w-]+`(?:, `[\w-]+`)*): ", re.MULTILINE)
"""An entry of a list that begins with the names of one or several reasons."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """Return the text of a page without its fenced blocks."""
    return FENCED.sub("", page.read_text())


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    found: Counter[str] = Counter()
    slugs = set()
    for heading in HEADING.findall(prose(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        slugs.add(f"{slug}-{found[slug]}" if found[slug] else slug)
        found[slug] += 1
    return slugs


def unresolved(target: str, folder: Path, page: Path | None = None) -> str | None:
    """Return what is wrong with a link that is relative to `folder`; None if it resolves.

    A link without a path refers to `page`.
    """
    path, _, anchor = target.partition("#")
    file = (folder / path).resolve() if path else page
    if file is None or not file.exists():
        return f"{target}: no such file"
    if not file.is_relative_to(ROOT):
        return f"{target}: outside the repository"
    if anchor and anchor not in anchors(file):
        return f"{target}: no such heading"
    return None


def broken_links(text: str, page: Path) -> list[str]:
    targets = [inline or reference for inline, reference in LINK.findall(text)]
    relative = [target for target in targets if not re.match(r"[a-z]+:", target)]
    return [problem for target in relative if (problem := unresolved(target, page.parent, page))]


def sources() -> Iterator[Path]:
    """Yield the source files, except this one, which names what it searches for."""
    for path in source_files(*SOURCE_FOLDERS):
        if path.suffix in SOURCE_TYPES and path != Path(__file__):
            yield path


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_paths_and_settings_of_a_page_exist(page: Path) -> None:
    text = page.read_text()
    assert broken_links(prose(page), page) == []
    named = {*TEST_PATH.findall(text), *MODULE_PATH.findall(prose(page))}
    assert [path for path in named if not (ROOT / path).exists()] == []
    assert set(SETTING.findall(text)) - SETTINGS == set()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_test_functions_that_a_page_names_exist(page: Path) -> None:
    """As in `tests/x/test_y.py::test_z`, `::test_of_the_file_before`, `…::test_of_the_file_before`."""
    file, missing = "", []
    for path, name in TEST_NAME.findall(page.read_text()):
        file = path or file
        if f"def {name}(" not in (ROOT / file).read_text():
            missing.append(f"{file}::{name}")
    assert missing == []


def test_references_to_the_documentation_resolve() -> None:
    """In docstrings, comments and messages, and in prose without a link."""
    problems = [
        f"{name_of(path)}: {problem}"
        for path in [*sources(), *PAGES, ROOT / "pyproject.toml", ROOT / "Makefile"]
        if "docs/" in (text := path.read_text())
        for target in DOCS_PATH.findall(text)
        if (problem := unresolved(target, ROOT))
    ]
    assert problems == []


def test_runbook_has_an_entry_for_every_reason_and_condition() -> None:
    reasons = {str(reason) for kind in (Rejection, Desync, FetchFailure, GapReason) for reason in kind}
    kinds = [value for value in vars(conditions).values() if isinstance(value, conditions.ConditionKind)]
    reasons |= {kind.name for kind in kinds}
    entries = RUNBOOK_ENTRY.findall((DOCS / "runbook.md").read_text())
    assert reasons - {name for entry in entries for name in re.findall(r"[\w-]+", entry)} == set()
