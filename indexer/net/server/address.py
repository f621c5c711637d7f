"""An address to listen at or to connect to."""

from typing import NamedTuple


class Address(NamedTuple):
    """A host name or IP address, and a port. Its text is a valid value of the setting."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
