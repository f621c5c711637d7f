"""A client for HTTP requests that answers each one in the same way, and the targets whose inputs are the answers."""

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any

from indexer.errors import UnavailableError
from indexer.net.http.http_client import OutboundClient, Response
from indexer.reasons import FetchFailure
from tests.fuzz.fuzz_target import FuzzTarget, MutateBytes
from tests.fuzz.json_mutation import mutate_json


def response_with(status: int, body: bytes) -> Response:
    """Return a response without headers."""
    return Response(status, {}, body)


class FixedResponse(OutboundClient):
    """Returns the same response to each request.

    Attributes:
        response: The response.
        asked: The URL of the last request; empty before the first one.
    """

    def __init__(self) -> None:
        self.response = response_with(404, b"")
        self.asked = ""

    async def get(
        self,
        url: str,
        *,
        max_bytes: int,
        timeout: float = 30.0,  # noqa: ARG002, ASYNC109
        accept: str = "",  # noqa: ARG002
    ) -> Response:
        """Return the response within `max_bytes`; a longer one is an error of the client."""
        self.asked = url
        if len(self.response.body) > max_bytes:
            raise UnavailableError(FetchFailure.BAD_ANSWER, f"over {max_bytes} bytes")
        return self.response


class HostAnswers(FuzzTarget):
    """A target whose inputs are the answers of a host: one byte that selects one of `statuses`, and a body of JSON."""

    def __init__(self, statuses: Sequence[int]) -> None:
        self._statuses = statuses
        self._http = FixedResponse()
        self._client: Any = self._http
        self._loop = asyncio.new_event_loop()

    def close(self) -> None:
        """Close the event loop."""
        self._loop.close()

    def mutate(self, data: bytes, random: Random, mutate_bytes: MutateBytes) -> bytes:
        """Return another status, or mutated JSON."""
        if random.random() < 0.05 or not data:
            return bytes([random.randrange(256)]) + data[1:]
        return data[:1] + mutate_json(data[1:], random, mutate_bytes)

    def answer(self, data: bytes) -> int:
        """Answer requests with an input from now on; return the status."""
        status = self._statuses[data[0] % len(self._statuses)] if data else 200
        self._http.response = response_with(status, data[1:])
        return status
