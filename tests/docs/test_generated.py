import asyncpg

from docs.client_types import load_public_columns
from docs.generate import LAYERS, PROJECT, VIEWS, describe_public_schema, generated, outdated


async def test_generated_documentation_is_current(sql: asyncpg.Connection) -> None:
    files = generated(await describe_public_schema(sql), await load_public_columns(sql))
    assert outdated(files) == [], "run `make docs`"


def test_every_package_is_in_the_list_of_modules() -> None:
    packages = {
        str(path.parent.relative_to(PROJECT / "indexer")) for path in (PROJECT / "indexer").rglob("__init__.py")
    }
    assert {package or "." for package, _ in LAYERS} == packages


def test_architecture_lists_every_module_once() -> None:
    """The list is generated; this test does not use the generator."""
    text = (PROJECT / "docs" / "architecture.md").read_text()
    for path in (PROJECT / "indexer").rglob("*.py"):
        if path.name not in {"__init__.py", "__main__.py"}:
            assert text.count(f"](../{path.relative_to(PROJECT)})") == 1, path


def test_no_two_modules_share_a_name() -> None:
    names = [
        path.stem for path in (PROJECT / "indexer").rglob("*.py") if path.name not in {"__init__.py", "__main__.py"}
    ]
    assert [name for name in set(names) if names.count(name) > 1] == []


async def test_reference_starts_with_the_views_in_this_order(sql: asyncpg.Connection) -> None:
    text = await describe_public_schema(sql)
    assert [text.index(f"## View `atproto.{view}`") for view in VIEWS] == sorted(
        text.index(f"## View `atproto.{view}`") for view in VIEWS
    )
