"""How far a host's list of accounts has been read, so that reading it goes on where it was left."""

from dataclasses import dataclass, replace
from typing import Literal, Self

Purpose = Literal["discover", "sweep"]


@dataclass(frozen=True, slots=True)
class Listing:
    """One reading of the list of `source`, a base URL, or of those of its accounts that have records of `collection`.

    `cursor` is the page to go on with, None at the beginning. Of the accounts `listed` so far, `found` were what the
    purpose looks for. Times are Unix seconds; `finished_at` is None as long as the end has not been reached.
    """

    purpose: Purpose
    source: str
    collection: str = ""
    cursor: str | None = None
    listed: int = 0
    found: int = 0
    began_at: float = 0.0
    finished_at: float | None = None

    def after(self, cursor: str | None, listed: int, found: int, now: float) -> Self:
        """With one page more; there is none behind it if `cursor` is None."""
        return replace(
            self,
            cursor=cursor,
            listed=self.listed + listed,
            found=self.found + found,
            finished_at=now if cursor is None else None,
        )
