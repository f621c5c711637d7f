"""The phases of one attempt to resync a repo."""

from enum import StrEnum


class Phase(StrEnum):
    """The present step of a resync, as the status page shows it."""

    IDENTITY = "look up the identity"
    LATEST_COMMIT = "ask the host for the latest commit"
    DOWNLOAD = "download the export"
    VERIFY = "verify the export"
    WRITE = "write the differences"
