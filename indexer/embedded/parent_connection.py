"""The connection of this process to the parent of an embedded server. While it is open, the parent runs the server."""

import asyncio
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Self

from indexer.embedded.server_parent import ENDED, JOINED, control_path


class ParentConnection:
    """One use of the server by this process. The protocol is described in `server_parent`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, connected: socket.socket) -> Self | None:
        """Wait until the parent accepts the connection; return None if it has ended, or is stopping the server."""
        connection = cls(*await asyncio.open_unix_connection(sock=connected))
        try:
            joined = await connection._read_line() == JOINED
        except BaseException:
            await connection.close()
            raise
        if joined:
            return connection
        await connection.close()
        return None

    async def wait_until_ended(self) -> int | None:
        """Wait until the server has ended; return its exit code, or None if the parent was killed."""
        line = (await self._read_line()).decode().split()
        return int(line[1]) if line[:1] == [ENDED] else None

    async def has_ended(self, seconds: float) -> bool:
        """Wait at most `seconds` for the end of the server, and return True if it has ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.wait_until_ended()
            return True
        return False

    async def leave(self) -> int | None:
        """End the use. If no other process uses the server, wait until it has stopped and return its exit code."""
        try:
            with suppress(OSError):  # the parent has ended
                self._writer.write_eof()
            code = await self.wait_until_ended()
            while await self._read_line():
                continue  # The stream ends when the parent has ended and has released its locks.
        finally:
            await self.close()
        return code

    async def close(self) -> None:
        """Close the connection without waiting for the server."""
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    async def _read_line(self) -> bytes:
        """Return one line; empty at the end of the connection."""
        try:
            return await self._reader.readline()
        except ConnectionError:
            return b""


async def connect(directory: Path) -> ParentConnection | None:
    """Connect to the parent of the server in this directory; return None if there is none."""
    connected = socket.socket(socket.AF_UNIX)
    connected.setblocking(False)
    try:
        directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            await asyncio.get_running_loop().sock_connect(connected, control_path(directory_fd))
        finally:
            os.close(directory_fd)
    except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
        connected.close()
        return None
    except BaseException:
        connected.close()
        raise
    return await ParentConnection.open(connected)
