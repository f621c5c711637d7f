"""Answers of real servers to methods that they do not offer (docs/protocol.md#methods-that-a-server-does-not-offer)."""

from typing import NamedTuple


class MissingMethodAnswer(NamedTuple):
    """The answer of a server to a method that it does not offer.

    Attributes:
        server: A program, and the version that was run or read.
        name: The `error` of the body; "" if the body is not JSON.
        message: The beginning of the `message` of the body.
    """

    server: str
    status: int
    name: str
    message: str


MISSING_METHOD_ANSWERS = (
    MissingMethodAnswer("@atproto/pds 0.5.35 without AppView", 400, "InvalidRequest", "No service configured for"),
    MissingMethodAnswer("@atproto/pds 0.5.35 with an AppView", 401, "AuthMissing", "Authentication Required"),
    MissingMethodAnswer("@atproto/lex-server (atproto d6296a1)", 501, "MethodNotImplemented", ""),
    MissingMethodAnswer("arroba, lexrpc 3.0", 501, "MethodNotImplemented", ""),
    MissingMethodAnswer("Bluesky's AppView (@atproto/xrpc 0.8.16)", 404, "XRPCNotSupported", ""),
    MissingMethodAnswer("Bluesky's relay, rainbow (indigo af2fec9)", 404, "Not Found", ""),
    MissingMethodAnswer("rsky-relay (rsky 7ebd21a)", 404, "NotFound", "endpoint not found"),
    MissingMethodAnswer("cocoon 7c46b9b", 401, "Unauthorized", ""),
    MissingMethodAnswer("@atcute/xrpc-server 2.0.2", 404, "", ""),
    MissingMethodAnswer("millipds faf0c36", 404, "", ""),
)
