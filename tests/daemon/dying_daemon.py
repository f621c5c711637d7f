"""The command `indexer`, which kills itself at a step of a change of the scope: `python -m tests.daemon.dying_daemon`.

The variable DIE_AT names the moment and the step, as in `within untrack_page`. Within: when the step has written
something, before its transaction commits. After: as soon as the transaction has committed.
"""

import functools
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

from indexer.cli.main import main
from indexer.store import (
    ResyncTransaction,
    Store,
    crawl_rows,
    erase_records,
    out_of_scope,
    repo_requests,
    resync_queue,
    scope_changes,
)
from indexer.sync.repo_state import Repo
from tests.daemon.impatient_daemon import wait_less

STEPS: dict[str, tuple[ModuleType, str, Callable[[Any, tuple[Any, ...]], object]]] = {
    "delete_unselected": (scope_changes, "delete_page", lambda page, _: page and page.deleted),
    "save_crawl_progress": (crawl_rows, "save_progress", lambda _, given: given[-1].purpose == "recheck"),
    "mark_complete": (scope_changes, "mark_complete", lambda marked, _: marked),
    "request_incomplete": (scope_changes, "request_incomplete", lambda requested, _: requested),
    "claim": (resync_queue, "claim", lambda claimed, _: claimed),
    "add_listed": (repo_requests, "add_repos", lambda *_: True),
    "untrack_page": (out_of_scope, "untrack_page", lambda page, _: page and page.untracked),
    "erase_batch": (erase_records, "erase_batch", lambda erased, _: erased and erased.records),
}
"""By method of `Store`: the function that runs in its transaction, and if it has written something."""
RESYNC = "resync"


def die() -> None:
    """End this process as kill -9 does."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(owner: Any, name: str, wrote: Callable[[Any, tuple[Any, ...]], object]) -> None:
    """Let the function end the process when it has written something."""
    original = getattr(owner, name)

    @functools.wraps(original)
    async def dying(*given: Any, **named: Any) -> Any:
        result = await original(*given, **named)
        if wrote(result, given):
            die()
        return result

    setattr(owner, name, dying)


def die_at_resync(*, within: bool) -> None:
    """End the process when the records of an export are written, or when they are committed."""
    original = Store.resync

    @asynccontextmanager
    async def dying(self: Store, claimed: Repo, scope_version: int = 0) -> AsyncIterator[ResyncTransaction]:
        async with original(self, claimed, scope_version) as transaction:
            yield transaction
            if within:
                die()
        die()

    setattr(Store, RESYNC, dying)


if __name__ == "__main__":
    wait_less()
    moment, _, step = os.environ["DIE_AT"].partition(" ")
    if step == RESYNC:
        die_at_resync(within=moment == "within")
    else:
        module, function, has_written = STEPS[step]
        owner, name = (module, function) if moment == "within" else (Store, step)
        die_at(owner, name, has_written)
    sys.exit(main())
