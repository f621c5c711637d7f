"""Run an AppView on the demo network: start the network, an indexer with an empty database, and the AppView.

    python examples/on_demo_network.py [OPTIONS] -- COMMAND...

Everything runs until Ctrl-C or SIGTERM, on loopback, and all data is temporary. The indexer and the AppView are started
again when they end, as a service manager does: kill them with `kill -9` to see that nothing is lost.

The command of the AppView gets these environment variables:

    DATABASE_URL     the database of the indexer, for the role of --role
    INDEXER_URL      the HTTP server of the indexer
    NETWORK_URL      the relay of the demo network
    PORT             the port that the AppView must serve at, on 127.0.0.1
    DATA_DIR         a directory for files of its own
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg

HOST = "127.0.0.1"
PORTS = 6  # relay, PLC directory, two PDSes, indexer, AppView
COLLECTION = "xyz.statusphere.status"
INDEXER = (sys.executable, "-m", "indexer")
LAST_VARIABLE = "INDEXER_DNS_SERVERS"  # the last setting that the network prints
RESTART_SECONDS = 2.0
STOP_SECONDS = 30.0

Environment = Mapping[str, str]


def say(text: str) -> None:
    """Print a line at once, also into a pipe."""
    print(text, flush=True)  # noqa: T201


async def main(arguments: argparse.Namespace) -> None:
    """Start everything in order, and keep it running until cancelled."""
    port: int = arguments.first_port
    check_ports(port)
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="statusphere-")))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("INDEXER_")}
        environment |= await stack.enter_async_context(network(port, arguments.seconds, environment))
        environment |= {
            "INDEXER_DATA_DIR": str(directory / "indexer"),
            "INDEXER_HTTP_BIND": f"{HOST}:{port + 4}",
            "INDEXER_COLLECTIONS": COLLECTION,
            "INDEXER_LOG_LEVEL": "error",  # the network causes warnings on purpose
        }
        environment |= dict(arguments.set)
        await run(*INDEXER, "migrate", environment=environment)
        await stack.enter_async_context(kept_running("indexer", [*INDEXER, "run"], environment))
        database = await database_url(environment)
        if arguments.lexicons:
            await run(*INDEXER, "lexicon", "add", str(arguments.lexicons), environment=environment)
        for file in arguments.sql:
            await execute(database, file.read_text())
        appview = environment | {
            "DATABASE_URL": as_role(database, arguments.role),
            "INDEXER_URL": f"http://{HOST}:{port + 4}",
            "NETWORK_URL": f"http://{HOST}:{port}",
            "PORT": str(port + 5),
            "DATA_DIR": str(directory),
        }
        say(f"database: {appview['DATABASE_URL']}")
        say(f"indexer: http://{HOST}:{port + 4}/")
        if arguments.command:
            await stack.enter_async_context(kept_running("appview", arguments.command, appview))
            say(f"appview: http://{HOST}:{port + 5}/")
        say("Ctrl-C stops everything.")
        await asyncio.get_running_loop().create_future()


def check_ports(first: int) -> None:
    """Exit if a port is in use."""
    for port in range(first, first + PORTS):
        try:
            socket.create_server((HOST, port)).close()
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise SystemExit(f"Cannot use port {port}: {reason}. Choose others with --first-port.") from None


@asynccontextmanager
async def network(port: int, seconds: float, environment: Environment) -> AsyncIterator[dict[str, str]]:
    """Serve the network during the block; yield the settings that an indexer needs."""
    command = (sys.executable, str(Path(__file__).with_name("statusphere_network.py")), HOST, str(port), str(seconds))
    async with process(*command, environment=environment, stdout=PIPE) as served:
        assert served.stdout is not None  # noqa: S101 - it is a pipe
        settings: dict[str, str] = {}
        while LAST_VARIABLE not in settings:
            line = (await served.stdout.readline()).decode()
            if "=" not in line:
                raise SystemExit("the demo network did not start")
            name, _, settings[name] = line.strip().partition("=")
        printing = asyncio.create_task(print_lines("network", served.stdout))
        try:
            say(f"network: relay at http://{HOST}:{port}, PDSes at http://{HOST}:{port + 2} and {port + 3}")
            yield settings
        finally:
            printing.cancel()


async def print_lines(name: str, stream: asyncio.StreamReader) -> None:
    """Print the lines of a process as they arrive."""
    async for line in stream:
        say(f"{name}: {line.decode().strip()}")
    say(f"{name}: ended; stop with Ctrl-C and start again")


@asynccontextmanager
async def kept_running(name: str, command: list[str], environment: Environment) -> AsyncIterator[None]:
    """Run a program during the block, and start it again whenever it ends."""

    async def keep_running() -> None:
        while True:
            async with process(*command, environment=environment) as running:
                say(f"{name}: process {running.pid}")
                code = await running.wait()
            say(f"{name}: process {running.pid} ended with code {code}; it will be started again")
            await asyncio.sleep(RESTART_SECONDS)

    task = asyncio.create_task(keep_running())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def process(*command: str, environment: Environment, stdout: int | None = None) -> AsyncIterator[Process]:
    """Run a process during the block, in a session of its own: Ctrl-C reaches only this program, which stops it."""
    started = await asyncio.create_subprocess_exec(
        *command, env=environment, stdin=DEVNULL, stdout=stdout, start_new_session=True
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(started.wait(), STOP_SECONDS)
            except TimeoutError:
                started.kill()
                await started.wait()


async def run(*command: str, environment: Environment) -> None:
    """Run a program to its end; exit if it fails."""
    async with process(*command, environment=environment, stdout=DEVNULL) as running:
        if await running.wait():
            raise SystemExit(f"failed: {' '.join(command)}")


async def database_url(environment: Environment) -> str:
    """Return the URL of the database as soon as the indexer runs."""
    while True:
        async with process(*INDEXER, "status", "--json", environment=environment, stdout=PIPE) as status:
            output, _ = await status.communicate()
        if output:
            return str(json.loads(output)["database"])
        await asyncio.sleep(1.0)


async def execute(database: str, statements: str) -> None:
    """Execute statements as the owner of the database."""
    connection = await asyncpg.connect(database)
    try:
        await connection.execute(statements)
    finally:
        await connection.close()


def as_role(database: str, role: str | None) -> str:
    """Return the URL with another user. The embedded server accepts all roles from the account that started it."""
    parts = urlsplit(database)
    return database if role is None else urlunsplit(parts._replace(netloc=f"{role}@{parts.netloc.rpartition('@')[2]}"))


def setting(text: str) -> tuple[str, str]:
    """Return name and value of a setting."""
    name, sign, value = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError("must be NAME=VALUE")
    return name, value


async def until_stopped(arguments: argparse.Namespace) -> None:
    """Run `main` until SIGINT or SIGTERM."""
    running = asyncio.create_task(main(arguments))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    with suppress(asyncio.CancelledError):
        await running


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Start the demo network, an indexer and an AppView.")
    parser.add_argument(
        "--first-port", type=int, default=2470, help="first of six ports: network (four), indexer, AppView"
    )
    parser.add_argument("--seconds", type=float, default=3_600, help="how long accounts of the network are active")
    parser.add_argument(
        "--set", type=setting, action="append", default=[], metavar="NAME=VALUE", help="a setting of the indexer"
    )
    parser.add_argument("--lexicons", type=Path, help="directory of lexicons for `indexer lexicon add`")
    parser.add_argument(
        "--sql", type=Path, action="append", default=[], help="SQL to execute before the AppView starts"
    )
    parser.add_argument("--role", help="the role of the AppView; --sql creates it")
    parser.add_argument("command", nargs="*", help="the command of the AppView")
    asyncio.run(until_stopped(parser.parse_args()))
