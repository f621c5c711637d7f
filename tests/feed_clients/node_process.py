"""Run the npm clients of this folder, and read the lines that they print."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.realnet.real_network import NODE

HERE = Path(__file__).parent
READY = HERE / "node_modules" / ".feed-clients-ok"

needs_clients = pytest.mark.skipif(
    not READY.exists() or not NODE.exists(),
    reason="the npm clients are not installed: run tests/feed_clients/setup.sh",
)
Line = dict[str, Any]


class NodeProcess:
    """A script that runs in Node.js.

    Attributes:
        lines: The lines that it has printed, decoded.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.lines: list[Line] = []

    async def read(self) -> None:
        """Read lines until the process ends."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self.lines.append(json.loads(line))

    def send(self, *command: Any) -> None:
        """Write a line of JSON to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()


@asynccontextmanager
async def node_process(script: str, *arguments: str, program: Path = NODE) -> AsyncIterator[NodeProcess]:
    """Run a script of this folder, with Node.js or another program, during the block; kill it at the end."""
    process = await asyncio.create_subprocess_exec(
        program, HERE / script, *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 24
    )
    client = NodeProcess(process)
    reader = asyncio.create_task(client.read())
    try:
        yield client
    finally:
        client.kill()
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()
        await reader
