"""Answers of the paths of feeds, as JSON."""

from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import web


def answer(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return a response with a JSON body."""
    return web.Response(body=orjson.dumps(body), status=status, headers=headers, content_type="application/json")


def problem(status: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return a response that says in one sentence what is wrong."""
    return answer({"message": message}, status, headers)
