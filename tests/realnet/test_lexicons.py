"""A lexicon that an account publishes on Bluesky's own PDS is resolved and verified."""

import asyncio
from pathlib import Path
from time import time

import pytest

from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.core.spool import Spool
from indexer.errors import LexiconError
from indexer.net.http.checked_connector import DnsResolver
from indexer.net.http.host_limits import RateLimits
from indexer.net.http.http_client import OutboundClient, OutboundSettings
from indexer.net.identity.did_resolver import DidResolver
from indexer.net.lexicons import COLLECTION, LexiconResolver
from indexer.net.pds.pds_client import PdsClient
from tests.lexicons.samples import REVIEW, REVIEW_DOCUMENT
from tests.net.identity.name_server import NameServer
from tests.realnet.real_network import RealAccount, RealPds, real_network

pytestmark = pytest.mark.proof("realnet")


def publish(pds: RealPds) -> RealAccount:
    """Return a new account with a lexicon among other records."""
    account = pds.create_account("publisher")
    for number in range(30):
        account.create("com.example.other", {"$type": "com.example.other", "n": number})
    account.put(COLLECTION, REVIEW, {"$type": COLLECTION} | REVIEW_DOCUMENT)
    return account


async def test_lexicon_on_a_real_pds_is_resolved_and_verified(tmp_path: Path) -> None:
    settings = OutboundSettings("test", allow_private_hosts=True, rates=RateLimits(host=1_000, total=1_000))
    with real_network(1, tmp_path) as network:
        account = await asyncio.to_thread(publish, network.pds[0])
        async with NameServer() as dns, OutboundClient(settings) as outbound:
            dns.texts["_lexicon.example.com"] = [f'"did={account.did}"']
            resolver = LexiconResolver(
                DnsResolver([dns.address]),
                DidResolver(outbound, [network.plc_url], plc_rate=100, allow_private_hosts=True, clock=time),
                PdsClient(outbound, DEFAULT_LIMITS, tmp_path, Spool),
                DEFAULT_LIMITS,
            )
            found = await resolver.resolve(REVIEW)
            assert found.source == f"at://{account.did}/{COLLECTION}/{REVIEW}"
            assert found.lexicon.nsid == REVIEW
            with pytest.raises(LexiconError, match="does not exist"):
                await resolver.resolve("com.example.nothing")
