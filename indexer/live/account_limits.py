"""Apply the limit on new accounts to a batch of messages (docs/protocol.md#new-accounts-of-one-host)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from time import time

from indexer.net.http.host_limits import registered_domain
from indexer.net.identity.did_resolver import web_host
from indexer.net.new_accounts import NewAccounts
from indexer.sync.batch import BatchPlan
from indexer.sync.policy import KeyStateOf, PlanContext
from indexer.sync.repo import Repo
from indexer.telemetry.conditions import NEW_ACCOUNTS_LIMITED, Conditions


@dataclass(eq=False)
class AccountLimits:
    """Finds the accounts of a batch that the limit concerns, and counts those that were added."""

    new_accounts: NewAccounts  # limits accounts by the domain of their host
    new_web_dids: NewAccounts  # limits rows of unknown did:web by the domain in the DID
    conditions: Conditions

    def apply(
        self, dids: Iterable[str], repos: Mapping[str, Repo], key_state_of: KeyStateOf, context: PlanContext
    ) -> PlanContext:
        """Return the context of a batch with those of its accounts that the limit concerns; `repos` are their rows."""
        refused, limited = set(), set()
        for did in dids:
            repo = repos.get(did)
            if repo is None and self._is_refused(did, context.now):
                refused.add(did)
            elif repo is None or (repo.head is None and repo.from_stream):
                key_state = key_state_of(did)
                if key_state and key_state.host and self.new_accounts.is_limited(key_state.host, context.now):
                    limited.add(did)
        return replace(context, refused=frozenset(refused), limited=frozenset(limited))

    def count(self, plan: BatchPlan, skipped: frozenset[str], key_state_of: KeyStateOf) -> None:
        """Count the repos that a written batch has added, or filled without a fetch; `skipped` were not written."""
        now = time()
        for did, draft in plan.drafts.items():
            before, after = draft.before, draft.after
            if after is before or not before.counts_as_new or did in skipped:
                continue
            if not before.known and (host := web_host(did)):
                self.new_web_dids.add(host, now)
            key_state = key_state_of(did) if after.head is not None else None
            if key_state is not None and key_state.host:
                self.new_accounts.add(key_state.host, now)

    def _is_refused(self, did: str, now: float) -> bool:
        host = web_host(did)
        if host is None or not self.new_web_dids.is_limited(host, now):
            return False
        message = f"{did} and other unknown DIDs of its domain are ignored; a later message adds them"
        self.conditions.report(NEW_ACCOUNTS_LIMITED, f"did:web {registered_domain(host)}", message=message)
        return True
