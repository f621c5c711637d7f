"""A PLC directory that serves the operations of given logs, in the present form of the export or in an old one."""

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

import orjson
from aiohttp import web

from indexer.net.identity import plc_export
from tests.atproto.plc_logs import Log
from tests.faulty_network import FaultyPlc

Line = dict[str, Any]


def lines_of(*logs: Log, numbered: bool = True) -> list[Line]:
    """Return the lines of an export of logs whose operations are all valid, ordered by time."""
    entries = sorted((entry for log in logs for entry in log.marked()), key=lambda entry: entry["createdAt"])
    if not numbered:
        return [entry | {"createdAt": entry["createdAt"].replace("+00:00", "Z")} for entry in entries]
    return [
        {"type": "sequenced_op", **{name: value for name, value in entry.items() if name != "nullified"}, "seq": seq}
        for seq, entry in enumerate(entries, 1)
    ]


def to_text(lines: Iterable[Line]) -> bytes:
    """Return lines as the body of an export, which does not end with a newline."""
    return b"\n".join(map(orjson.dumps, lines))


class Directory(FaultyPlc):
    """A directory.

    Attributes:
        lines: All lines of its export.
        repeats: Its export is that of version 0.0.1: it has no numbers, ignores `count`, and repeats the last line.
        change: Changes the lines of each page.
        asked: The parameter `after` of each request.
        messages: The messages of its stream, which it then closes with `reason`; None: it has no stream.
    """

    def __init__(self, lines: list[Line], *, repeats: bool = False) -> None:
        self.lines = lines
        self.repeats = repeats
        self.change: Callable[[list[Line]], list[Line]] = lambda page: page
        self.asked: list[str] = []
        self.messages: Sequence[bytes] | None = None
        self.reason = ""
        super().__init__()

    async def export(self, request: web.Request) -> web.Response:
        after, count = request.query["after"], plc_export.PAGE_LINES if self.repeats else int(request.query["count"])
        self.asked.append(after)
        if after.isdigit() and not self.repeats:
            page = [line for line in self.lines if line["seq"] > int(after)]
        else:
            time = datetime.fromisoformat(after if "T" in after else "2000-01-01T00:00:00Z")
            hidden = timedelta(microseconds=500 if self.repeats else 0)
            page = [line for line in self.lines if datetime.fromisoformat(line["createdAt"]) + hidden > time]
        return web.Response(body=to_text(self.change(page[:count])), content_type="application/jsonlines")

    async def stream(self, request: web.Request) -> web.WebSocketResponse:
        if self.messages is None:
            raise web.HTTPNotFound
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.asked.append(request.query.get("cursor", "live"))
        for message in self.messages:
            await socket.send_str(message.decode())
        await socket.close(message=self.reason.encode())
        return socket
