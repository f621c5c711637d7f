"""Commits that the relay loses: the next commit of the account shows it, so the repo needs a resync."""

from random import Random

from indexer.demo.local_account import LocalAccount
from indexer.demo.local_network import LocalNetwork
from indexer.demo.local_repo import Write
from indexer.demo.scenario import NOTE


def lose_commit(account: LocalAccount, collection: str = NOTE) -> None:
    """Create two records. The relay does not send the commit of the first one."""
    lost, seen = [{"$type": collection, "text": text} for text in ("lost", "after the lost one")]
    account.apply_writes([Write.create(f"{collection}/lost-{account.rev}", lost)], lost=True)
    account.create(collection, seen)


def active_account(network: LocalNetwork, random: Random) -> LocalAccount:
    """Return any account that may write."""
    return random.choice([account for account in network.accounts.values() if account.status is None])
