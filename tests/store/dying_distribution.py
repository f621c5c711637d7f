"""The command `indexer`, which is killed at a statement: `python -m tests.store.dying_distribution distribute`.

The variable DIE_AT names the moment and a part of the statement, as in `during truncate_local_data`. Before: instead of
sending it. During: the statement is sent, and runs. After: it has ended.
"""

import asyncio
import functools
import os
import signal
import sys
from typing import Any

import asyncpg

from indexer.cli.main import main

METHODS = ("execute", "fetch", "fetchrow", "fetchval")
DURING_SECONDS = 0.02
"""Time for which a statement runs."""


def die_at(moment: str, part: str) -> None:
    """End this process as kill -9 does, at the first statement that contains this text or has it as an argument."""
    for name in METHODS:
        setattr(asyncpg.Connection, name, _dying(getattr(asyncpg.Connection, name), moment, part))


def _dying(original: Any, moment: str, part: str) -> Any:
    @functools.wraps(original)
    async def method(*given: Any, **named: Any) -> Any:
        if not any(part in str(value) for value in given[1:]):
            return await original(*given, **named)
        if moment == "before":
            _die()
        if moment == "during":
            asyncio.get_running_loop().call_later(DURING_SECONDS, _die)
        result = await original(*given, **named)
        _die()
        return result

    return method


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    die_at(*os.environ["DIE_AT"].split(" ", 1))
    sys.exit(main())
