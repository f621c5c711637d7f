"""A client for HTTP requests that answers each one in the same way."""

from typing import NamedTuple

from indexer.errors import UnavailableError
from indexer.reasons import FetchFailure


class Response(NamedTuple):
    status: int
    body: bytes


class FixedResponse:
    """Returns the same response to each request.

    Attributes:
        response: The response.
        asked: The URL of the last request; empty before the first one.
    """

    def __init__(self) -> None:
        self.response = Response(404, b"")
        self.asked = ""

    async def get(
        self,
        url: str,
        *,
        max_bytes: int,
        timeout: float,  # noqa: ARG002, ASYNC109
        accept: str = "",  # noqa: ARG002
    ) -> Response:
        """Return the response within `max_bytes`; a longer one is an error of the client."""
        self.asked = url
        if len(self.response.body) > max_bytes:
            raise UnavailableError(FetchFailure.BAD_ANSWER, f"over {max_bytes} bytes")
        return self.response
