"""Back up a database and restore it with the programs of Postgres, as docs/runbook.md#back-up-and-restore says."""

import subprocess
from pathlib import Path

from indexer.embedded.cluster import find_binaries

SCHEMAS = ("--schema=indexer", "--schema=atproto", "--schema=lexicon")


def back_up(dsn: str, file: Path) -> None:
    run_program("pg_dump", "--format=custom", *SCHEMAS, f"--file={file}", f"--dbname={dsn}")


def restore(dsn: str, file: Path) -> None:
    run_program("pg_restore", "--single-transaction", "--no-owner", f"--dbname={dsn}", str(file))


def run_program(name: str, *arguments: str) -> None:
    subprocess.run([find_binaries() / name, *arguments], check=True, timeout=60)
