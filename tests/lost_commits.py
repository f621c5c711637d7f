"""Commits that the relay loses: the next commit of the account shows it, so the repo needs a resync."""

from random import Random

from indexer.demo.local_repo import Write
from indexer.demo.scenario import NOTE
from tests.faulty_network import FaultyAccount, FaultyNetwork


def lose_commit(account: FaultyAccount, collection: str = NOTE) -> None:
    """Create two records. The relay does not send the commit of the first one."""
    lost, seen = [{"$type": collection, "text": text} for text in ("lost", "after the lost one")]
    account.apply_writes([Write.create(f"{collection}/lost-{account.rev}", lost)], lost=True)
    account.create(collection, seen)


def active_account(network: FaultyNetwork, random: Random) -> FaultyAccount:
    """Return any account that may write."""
    return random.choice([account for account in network.accounts.values() if account.status is None])
