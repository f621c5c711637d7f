"""Create the schema as the files in `indexer/db/schema/` have it now.

Versions before 0101 were those of commits before the first release. A later migration changes a database of the
version before it; an empty database gets the files, which have its effects, and is marked as upgraded.
"""

from typing import Any

from alembic import context, op

revision = "0101"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Run the files in the order of their names."""
    connection: Any = op.get_bind().connection.dbapi_connection  # the driver executes several statements at once
    for path in sorted(context.config.attributes["schema_folder"].glob("*.sql")):
        sql = path.read_text(encoding="utf-8")
        connection.run_async(lambda driver, sql=sql: driver.execute(sql))
