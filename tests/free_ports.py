"""Find free ports on loopback, for programs that need several adjacent ones."""

import random
import socket
from contextlib import ExitStack

PORTS = range(21_000, 32_000)
ATTEMPTS = 200


def free_ports(count: int) -> int:
    """Return the first of `count` adjacent ports that are free for TCP and UDP."""
    for _ in range(ATTEMPTS):
        first = random.randrange(PORTS.start, PORTS.stop - count)
        with ExitStack() as opened:
            try:
                for port in range(first, first + count):
                    opened.enter_context(socket.create_server(("127.0.0.1", port)))
                    datagrams = opened.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
                    datagrams.bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError("no free ports")
