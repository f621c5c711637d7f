import asyncpg

from docs.client_types import load_public_columns
from docs.generate import describe_public_schema, generated, outdated


async def test_generated_documentation_is_current(sql: asyncpg.Connection) -> None:
    """Without the dashboard, which needs Grafana's library: see tests/serve/test_dashboard.py."""
    files = generated(await describe_public_schema(sql), await load_public_columns(sql))
    assert outdated(files) == [], "run `make docs`"
