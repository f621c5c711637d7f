"""The results of an audit: of one repo, and of all repos together."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MAX_LISTED_DIFFERENCES = 100
"""Differences of one repo that are listed; the rest is only counted."""
NOT_IN_DATABASE = "not in the database"
"""Reason why a repo is skipped that the database does not have."""
BEING_FETCHED = "records of added collections are still being fetched"
"""Reason why a repo is not compared completely that lacks records of a collection that the scope added."""
BEING_DELETED = "records of removed collections are still being deleted"
"""Reason why a repo is not compared completely that has records of a collection that the scope removed."""


class AuditDifference(NamedTuple):
    """A difference between the database and the network.

    Attributes:
        subject: The AT-URI of the record, or the DID of the repo.
        description: What differs.
    """

    subject: str
    description: str


@dataclass(slots=True)
class RepoAudit:
    """The result of one repo.

    Attributes:
        records: Number of records compared.
        differences: Number of differences.
        listed: The first differences.
        reason_skipped: Why the repo, or a part of it, was not compared: the kind of reason, then a colon and details.
    """

    did: str
    records: int = 0
    differences: int = 0
    listed: list[AuditDifference] = field(default_factory=list)
    reason_skipped: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        return {
            "did": self.did,
            "records": self.records,
            "differences": self.differences,
            "listed": [difference._asdict() for difference in self.listed],
            "reason_skipped": self.reason_skipped,
        }

    def add_difference(self, subject: str, description: str) -> None:
        """Count a difference, and list it if it is one of the first."""
        self.differences += 1
        if len(self.listed) < MAX_LISTED_DIFFERENCES:
            self.listed.append(AuditDifference(subject, description))


@dataclass(slots=True)
class AuditSummary:
    """The sum of the results of many repos.

    Attributes:
        repos: Number of repos compared completely.
        equal: Number of those without a difference.
        reasons_skipped: Number of the other repos, by kind of reason.
    """

    repos: int = 0
    equal: int = 0
    records: int = 0
    differences: int = 0
    reasons_skipped: Counter[str] = field(default_factory=Counter)

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as a JSON object."""
        return {
            "repos": self.repos,
            "equal": self.equal,
            "records": self.records,
            "differences": self.differences,
            "reasons_skipped": self.reasons_skipped,
            "skipped": self.skipped,
        }

    def add(self, result: RepoAudit) -> None:
        """Add the result of a repo."""
        self.records += result.records
        self.differences += result.differences
        if result.reason_skipped is not None:
            self.reasons_skipped[result.reason_skipped.partition(":")[0]] += 1
            return
        self.repos += 1
        self.equal += not result.differences

    @property
    def skipped(self) -> int:
        """Number of repos that were not compared completely."""
        return self.reasons_skipped.total()

    @property
    def unknown(self) -> int:
        """Number of repos that are not in the database."""
        return self.reasons_skipped[NOT_IN_DATABASE]
