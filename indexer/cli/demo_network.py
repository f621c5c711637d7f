"""Serve the network of the demo at fixed ports, for a daemon in another process or container."""

import asyncio
from ipaddress import ip_address

import click

from indexer.app.process_setup import StopRequest, stop_on_signals
from indexer.cli.command import ExitCode
from indexer.demo.local_network import LocalNetwork
from indexer.demo.local_plc import LocalDns
from indexer.demo.scenario import Scenario, StatusActivity

COMMITS_PER_SECOND = 5.0
"""Slow enough that an hour of activity stays in the memory of the relay, which keeps every message."""
STATUSES_PER_SECOND = 1.0
STOP_SECONDS = 5.0
IPV6 = 6


async def serve_network(host: str, port: int, seconds: float) -> int:
    """Serve the network until a signal arrives. Accounts are active for `seconds`, and then the network is quiet."""
    stop = StopRequest()
    with stop_on_signals(stop, STOP_SECONDS):
        async with (
            LocalNetwork(host=host, first_port=port) as network,
            LocalDns(network.plc, host, network.plc.port),
        ):
            for name, value in daemon_variables(network).items():
                click.echo(f"{name}={value}")
            active = asyncio.create_task(_act(network, seconds))
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait([active, stopped], return_when=asyncio.FIRST_COMPLETED)
            if not stopped.done():
                click.echo(f"The activity has ended after {active.result()} commits. The network is quiet.")
                await stopped
            active.cancel()
            await asyncio.gather(active, return_exceptions=True)
    return ExitCode.OK


async def _act(network: LocalNetwork, seconds: float) -> int:
    """Let the accounts act; return the number of their commits, without those of statuses."""
    async with asyncio.TaskGroup() as group:
        scenario = group.create_task(Scenario(network).run(seconds, COMMITS_PER_SECOND))
        group.create_task(StatusActivity(network).run(seconds, STATUSES_PER_SECOND))
    return sum(scenario.result().commits.values())


def daemon_variables(network: LocalNetwork) -> dict[str, str]:
    """Return the settings that a daemon needs to index this network, as environment variables.

    A network at an IP address has a DNS server for its handles, which are not in any other DNS. The address of a DNS
    server cannot be a host name, so the handles of a network at a host name are not verified.
    """
    return {
        "INDEXER_RELAYS": network.relay_url,
        "INDEXER_PLC_URL": network.plc_url,
        "INDEXER_START": "oldest",
        "INDEXER_ALLOW_PRIVATE_HOSTS": "true",
        **_handle_variables(network.plc.host, network.plc.port),
    }


def _handle_variables(host: str, port: int) -> dict[str, str]:
    try:
        address = ip_address(host)
    except ValueError:
        return {"INDEXER_HANDLE_RATE": "0"}
    return {"INDEXER_DNS_SERVERS": f"[{address}]:{port}" if address.version == IPV6 else f"{address}:{port}"}
