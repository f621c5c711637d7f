"""Print what the Jetstream client of the PyPI package `atproto` receives, one JSON object in each line.

Arguments: the base URI, the parameters as JSON, and "zstd" or "". The last line has the error with which it ended.
"""

import json
import sys
from typing import Any

from atproto_jetstream import JetstreamClient  # type: ignore[import-not-found]

base_uri, params, compression = sys.argv[1:]
client = JetstreamClient(json.loads(params), base_uri, compress=compression == "zstd")


def write(line: object) -> None:
    """Print a line."""
    sys.stdout.write(f"{json.dumps(line)}\n")
    sys.stdout.flush()


def on_message(message: Any) -> None:
    """Print an event."""
    fields = {name: getattr(message, name, None) for name in ("seq", "did", "operation", "collection", "rkey", "cid")}
    text = getattr(getattr(message, "record", None), "text", None)
    fragment = message.py_type.partition("#")[2]
    write({"kind": fragment, "text": text, "compressed": client.compressed} | fields)


error = None
try:
    client.start(on_message)
except Exception as raised:  # noqa: BLE001 - the test reads it
    error = f"{type(raised).__name__}: {raised}"
write({"ended": error})
