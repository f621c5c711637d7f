"""References between the documentation, the code and the tests: every target exists."""

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from indexer.settings import OTHER_VARIABLES, Settings, variable
from tests.source_code import source_files

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
SOURCE_FOLDERS = ("indexer", "tests", "benchmarks", "migrations", "examples")
SOURCE_TYPES = frozenset({".py", ".sql", ".mako", ".ini", ".toml", ".sh", ".js", ".mjs", ".ts"})
# docs/settings.md explains why this variable can be in the environment.
KUBERNETES_VARIABLES = frozenset({"INDEXER_PORT"})

FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: +(\S+)", re.MULTILINE)
DOCS_PATH = re.compile(r"\bdocs/[\w./-]+\.md(?:#[\w-]+)?")
TEST_PATH = re.compile(r"\btests/[\w/-]+(?:\.\w+)?")
MODULE_PATH = re.compile(r"`((?:indexer|tests|benchmarks|migrations|examples)/[\w./-]+)`")
SETTING = re.compile(r"\bINDEXER_[A-Z_]+\b")

PUBLIC_SECTION = re.compile(r"\bRFC \d+,? §§? ?[\d.]+")
PRIVATE_REFERENCE = re.compile(r"§|\bspec(?:ification)? ?\d|\bspec/|\b(?:ES|LX|CAR|RP|SY|ID|DM|SEC)-\d{1,2}\b")

# Each of the traps in docs/gotchas.md, and each row of a table in docs/glossary.md.
TRAP = re.compile(r"^### .+?(?=^##|\Z)", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| (?!term \||-)(.+?) \| (.+) \|$", re.MULTILINE)


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


def missing_tests(page: Path) -> list[str]:
    return [path for path in TEST_PATH.findall(page.read_text()) if not (ROOT / path).exists()]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_of_the_documentation_resolve(page: Path) -> None:
    assert broken_links(prose(page), page) == []


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


def test_sources_refer_to_public_documents_only() -> None:
    problems = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in sources()
        if PRIVATE_REFERENCE.search(PUBLIC_SECTION.sub("", text := path.read_text()))
        for number, line in enumerate(text.splitlines(), 1)
        if PRIVATE_REFERENCE.search(PUBLIC_SECTION.sub("", line))
    ]
    assert problems == []


@pytest.mark.parametrize("name", ["gotchas.md", "invariants.md"])
def test_tests_that_a_page_names_exist(name: str) -> None:
    page = DOCS / name
    assert TEST_PATH.search(page.read_text())
    assert missing_tests(page) == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_that_a_page_names_exist(page: Path) -> None:
    assert [path for path in MODULE_PATH.findall(prose(page)) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_settings_that_a_page_names_exist(page: Path) -> None:
    known = OTHER_VARIABLES | KUBERNETES_VARIABLES | set(map(variable, Settings.model_fields))
    assert set(SETTING.findall(page.read_text())) - known == set()


def test_every_trap_names_consequence_behaviour_and_test() -> None:
    traps = TRAP.findall((DOCS / "gotchas.md").read_text())
    assert traps
    for trap in traps:
        assert re.findall(r"^- \*\*(\w+):\*\* ", trap, re.MULTILINE) == ["Trap", "Consequence", "Here", "Test"], trap
        assert TEST_PATH.search(trap.partition("**Test:**")[2]), trap


def test_every_term_is_defined_once_and_linked() -> None:
    page = DOCS / "glossary.md"
    rows = ROW.findall(page.read_text())
    terms = Counter(term for term, _ in rows)
    assert len(rows) > 100
    assert [term for term, count in terms.items() if count > 1] == []
    assert [term for term, meaning in rows if not LINK.search(meaning)] == []
    assert broken_links(page.read_text(), page) == []
