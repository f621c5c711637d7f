"""Follow the stored scope: every stage that plans asks here for the policy with the present scope."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic

import structlog

from indexer.concurrency.stage_progress import StageProgress
from indexer.db import Database
from indexer.db.periodic import run_periodically
from indexer.sync.policy import Policy
from indexer.sync.repo import Repo
from indexer.sync.scope import Scope

POLL_SECONDS = 1.0

log = structlog.get_logger(__name__)


class CurrentScope:
    """The policy of this process, with the scope as it was last read.

    Attributes:
        stage: Its progress. To read the scope is work.
        policy: The policy. A change replaces the object, so that a plan that has begun keeps the one it began with.
        changed_at: When this process took the present scope (monotonic seconds).
    """

    def __init__(self, db: Database, policy: Policy, *, poll: float = POLL_SECONDS) -> None:
        """Begin with the settings; their scope is the first one if the database has none."""
        self._db = db
        self._first = policy.scope
        self._poll = poll
        self._in_use = Counter[int]()
        self.stage = StageProgress("scope")
        self.policy = policy
        self.changed_at = monotonic()

    @property
    def scope(self) -> Scope:
        """The present scope."""
        return self.policy.scope

    async def begin(self) -> None:
        """Read the scope, or store the one of the settings if there is none."""
        stored = await self._db.scope.begin(self._first)
        if not stored.same_choice(self._first):
            log.warning("scope.settings-ignored", settings=str(self._first), stored=str(stored))
        self._take(stored)

    async def run(self) -> None:
        """Read the scope again and again. Only an exception that is a bug ends it."""
        await run_periodically(self.refresh, self._poll, self.stage, wait_first=True)

    async def refresh(self) -> None:
        """Read the scope."""
        stored = await self._db.scope.load()
        if stored is not None and stored.version != self.scope.version:
            log.info("scope.changed", version=stored.version, before=str(self.scope), now=str(stored))
            self._take(stored)

    def is_behind(self, repos: Iterable[Repo]) -> bool:
        """Return True if one of the repos is complete for a later scope: then this one must be read again."""
        version = self.scope.version
        return any(repo.scope_version > version for repo in repos)

    @contextmanager
    def in_use(self) -> Iterator[Policy]:
        """Plan and write with the yielded policy during the block."""
        policy = self.policy
        self._in_use[policy.scope.version] += 1
        try:
            yield policy
        finally:
            self._in_use[policy.scope.version] -= 1

    def only_in_use(self, version: int) -> bool:
        """Return True if this process writes nothing that it planned with another version of the scope."""
        return all(used == version or not count for used, count in self._in_use.items())

    def _take(self, scope: Scope) -> None:
        self.policy = replace(self.policy, scope=scope)
        self.changed_at = monotonic()
        self._in_use = +self._in_use
