"""The command `indexer` with short waits after a change of the scope: `python -m tests.daemon.impatient_daemon run`."""

import sys
from functools import partial

from indexer import daemon as composition
from indexer import daemon_scope
from indexer.cli.main import main
from indexer.service.background import scope_narrowing, scope_untracking
from indexer.service.background.account_erasure import AccountErasure
from indexer.service.background.scope_narrowing import ScopeNarrowing
from indexer.service.background.scope_untracking import ScopeUntracking
from indexer.service.crawl.scope_backfill import ScopeBackfill
from indexer.service.crawl.signal_discovery import SignalDiscovery
from indexer.service.current_scope import CurrentScope
from tests.changed_names import change_names


def wait_less() -> None:
    """Shorten the waits of the daemon in this process."""
    change_names(
        composition,
        CurrentScope=partial(CurrentScope, poll=0.1),
        AccountErasure=partial(AccountErasure, interval=0.1),
    )
    change_names(
        daemon_scope,
        ScopeNarrowing=partial(ScopeNarrowing, interval=0.1),
        ScopeUntracking=partial(ScopeUntracking, interval=0.1),
        ScopeBackfill=partial(ScopeBackfill, interval=0.1, settle=0.5),
        SignalDiscovery=partial(SignalDiscovery, interval=0.1, settle=0.5),
    )
    change_names(scope_narrowing, BATCH_SIZE=3)
    change_names(scope_untracking, BATCH_SIZE=3, SEARCH_SECONDS=0.5)


if __name__ == "__main__":
    wait_less()
    sys.exit(main())
