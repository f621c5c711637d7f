"""Conditions: states that last and that an operator should know of, such as a database that does not answer.

A condition is logged when it begins, at growing intervals while it lasts, and when it is over, however often it is
reported in between.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

import structlog

FIRST_SUMMARY_SECONDS = 60.0
"""Seconds from the first log line of a condition to its first summary. The interval doubles with each summary."""
MAX_SUMMARY_SECONDS = 3_600.0
MAX_SUBJECTS = 20
"""Active conditions of one kind with a subject of their own. Further subjects share one condition, `OTHERS`."""
OTHERS = "others"
MAX_MESSAGE_LENGTH = 500

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ConditionKind:
    """A kind of condition.

    Attributes:
        name: The field `condition` of its log lines, and the code of the readiness reason.
        meaning: A sentence for operators.
        quiet_seconds: The condition is over when it was not reported for this time; infinite: only `end` ends it.
        prevents_readiness: The daemon is not ready while it lasts, and its first log line is a warning.
    """

    name: str
    meaning: str
    quiet_seconds: float
    prevents_readiness: bool = False


DATABASE_UNAVAILABLE = ConditionKind(
    "database-unavailable",
    "The database does not answer. Everything that needs it is retried.",
    math.inf,
    prevents_readiness=True,
)
DATABASE_ERRORS = ConditionKind(
    "database-errors", "Some operations on the database fail although it answers. They are retried.", 60.0
)
MESSAGES_REJECTED = ConditionKind(
    "messages-rejected",
    "One reason rejects most of the messages of the last minute. The subject is the reason.",
    60.0,
    prevents_readiness=True,
)
IDENTITY_LOOKUPS_FAILING = ConditionKind(
    "identity-lookups-failing",
    "Most identity lookups at the PLC directory failed in the last minute. Affected repos stay desynchronized and are "
    "retried.",
    300.0,
    prevents_readiness=True,
)
HOST_FAILING = ConditionKind(
    "host-failing", "Requests to a host fail, so that it is paused again and again. The subject is the host.", 15.0
)
RESYNCS_FAILING = ConditionKind(
    "resyncs-failing",
    "Resyncs fail. The subject is the reason and the host; the message says whether the repo is tried again or parked. "
    "The log level debug shows each one.",
    600.0,
)
RESYNCS_SLOW = ConditionKind(
    "resyncs-slow",
    "Hosts send slowly, and leave too few workers or bytes to others, so that resyncs end and start again later. The "
    "subject is the host.",
    600.0,
)
EQUIVOCATIONS = ConditionKind(
    "equivocations",
    "Exports have another tree than the stored one at the same rev. They are applied.",
    3_600.0,
)
VALUES_MISSING = ConditionKind(
    "values-missing",
    "No source has the blocks of some records. Their CIDs are stored, and resyncs are requested later.",
    3_600.0,
)
MESSAGES_REFUSED = ConditionKind(
    "messages-refused",
    "The database cannot store the effects of some messages. They become dead letters, and their repos are resynced.",
    600.0,
)
NEW_ACCOUNTS_LIMITED = ConditionKind(
    "new-accounts-limited",
    "The stream added more accounts of one registered domain than INDEXER_NEW_ACCOUNTS_PER_HOST. The subject is the "
    "domain. Its further new accounts wait until it is their turn, or until a repo list names them.",
    600.0,
)
HTTP_CONNECTIONS_LIMITED = ConditionKind(
    "http-connections-limited",
    "The HTTP server has as many connections as it allows. Each new connection closes the oldest one.",
    60.0,
)
WEBSOCKETS_LIMITED = ConditionKind(
    "websockets-limited",
    "As many websockets are open as the HTTP server allows. A further one is refused with status 503, or displaces one "
    "of the client network that has the most.",
    60.0,
)
FEED_CUT_OFF = ConditionKind(
    "feed-cut-off",
    "The feed for clients of tap was disconnected from the change log, because its clients were too far behind. "
    "Nothing is delivered until an operator removes the consumer.",
    math.inf,
    prevents_readiness=True,
)
FEED_STALLED = ConditionKind(
    "feed-stalled",
    "Clients of tap, or the webhook, have acknowledged no event for two minutes, although there are events to deliver "
    "that they do not refuse. While no client is connected, it does not hold.",
    math.inf,
    prevents_readiness=True,
)
FEED_EVENT_REFUSED = ConditionKind(
    "feed-event-refused",
    "Clients of the feed do not acknowledge an event although they acknowledge others. The subject is the record. The "
    "event is sent again, and later events of its repo wait, until it is acknowledged or set aside.",
    900.0,
)
FEED_EVENTS_SET_ASIDE = ConditionKind(
    "feed-events-set-aside",
    "Clients of the feed refused events for so long that they were set aside. The later events of their repos go on. "
    "An operator may let them be sent again.",
    math.inf,
)
WEBHOOK_FAILING = ConditionKind(
    "webhook-failing",
    "Requests to the webhook of the feed fail. They are retried, and the change log retains what was not delivered.",
    300.0,
)
CLUSTER_NODE_UNAVAILABLE = ConditionKind(
    "cluster-node-unavailable",
    "A node of the cluster does not answer. The subject is the node. What needs it is retried, and changes of "
    "transactions that wrote it get their numbers when it answers.",
    math.inf,
    prevents_readiness=True,
)
TRANSACTIONS_IN_DOUBT = ConditionKind(
    "transactions-in-doubt",
    "Transactions are prepared on nodes of the cluster, and were not completed within seconds. Citus completes them "
    "when the nodes answer. Until then, other writes of their repos wait, and their changes have no numbers.",
    math.inf,
    prevents_readiness=True,
)
NOTIFICATION_QUEUE_FILLS = ConditionKind(
    "notification-queue-fills",
    "The queue of notifications of the Postgres server fills: a session that listens has left a transaction open. "
    "Nothing is lost. If the queue is full, consumers learn of changes only when they poll.",
    math.inf,
)
DEAD_ROWS_KEPT = ConditionKind(
    "dead-rows-kept",
    "A session, a prepared transaction or a replication slot has kept a snapshot while 200,000 batches were written. "
    "Each batch reads the old versions of the rows that it updates. The message names the holders. The sessions of "
    "consumers are ended.",
    math.inf,
)
CONDITION_KINDS = (
    DATABASE_UNAVAILABLE,
    DATABASE_ERRORS,
    MESSAGES_REJECTED,
    IDENTITY_LOOKUPS_FAILING,
    HOST_FAILING,
    RESYNCS_FAILING,
    RESYNCS_SLOW,
    EQUIVOCATIONS,
    VALUES_MISSING,
    MESSAGES_REFUSED,
    NEW_ACCOUNTS_LIMITED,
    HTTP_CONNECTIONS_LIMITED,
    WEBSOCKETS_LIMITED,
    FEED_CUT_OFF,
    FEED_STALLED,
    FEED_EVENT_REFUSED,
    FEED_EVENTS_SET_ASIDE,
    WEBHOOK_FAILING,
    CLUSTER_NODE_UNAVAILABLE,
    TRANSACTIONS_IN_DOUBT,
    NOTIFICATION_QUEUE_FILLS,
    DEAD_ROWS_KEPT,
)


@dataclass(slots=True)
class Condition:
    """A condition that lasts. Times are monotonic seconds.

    Attributes:
        subject: What is affected, for example a host; "" if the kind says it all.
        message: What happened last, and what happens next.
        value: The number in the message, if there is one.
        count: How often it occurred since it began.
    """

    kind: ConditionKind
    subject: str
    message: str
    value: float | None
    began_at: float
    reported_at: float
    count: int
    logged_at: float
    logged_count: int
    summary_seconds: float = FIRST_SUMMARY_SECONDS


class Conditions:
    """The active conditions of this process."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._active: dict[tuple[ConditionKind, str], Condition] = {}

    def active(self) -> list[Condition]:
        """Return the conditions that last, the oldest first."""
        return list(self._active.values())

    def is_active(self, kind: ConditionKind, subject: str = "") -> bool:
        """Return True while the condition lasts."""
        return (kind, subject) in self._active

    def report(
        self, kind: ConditionKind, subject: str = "", *, message: str, value: float | None = None, count: int = 1
    ) -> None:
        """Report that the condition holds, with its newest message, and that it occurred `count` times more."""
        now, message = self._clock(), message[:MAX_MESSAGE_LENGTH]
        # A condition that only `end` ends keeps its subject: it would not be ended under another one.
        is_bounded = math.isfinite(kind.quiet_seconds)
        if is_bounded and (kind, subject) not in self._active and self._number_of(kind) >= MAX_SUBJECTS:
            subject = OTHERS
        condition = self._active.get((kind, subject))
        if condition is None:
            condition = Condition(kind, subject, message, value, now, now, count, now, count)
            self._active[kind, subject] = condition
            _log_began(condition)
            return
        condition.message, condition.value, condition.reported_at = message, value, now
        condition.count += count

    def end(self, kind: ConditionKind, subject: str = "") -> None:
        """End the condition; do nothing if it is not active."""
        condition = self._active.pop((kind, subject), None)
        if condition is not None:
            seconds = round(self._clock() - condition.began_at)
            log.info("condition.ended", condition=kind.name, subject=subject, seconds=seconds, count=condition.count)

    def update(self) -> None:
        """End the conditions that were not reported for a while, and log the summaries that are due."""
        now = self._clock()
        for condition in self.active():
            if now - condition.reported_at > condition.kind.quiet_seconds:
                self.end(condition.kind, condition.subject)
            elif now - condition.logged_at >= condition.summary_seconds and condition.count > condition.logged_count:
                self._log_summary(condition, now)

    def _number_of(self, kind: ConditionKind) -> int:
        return sum(condition.kind is kind for condition in self._active.values())

    def _log_summary(self, condition: Condition, now: float) -> None:
        log.info(
            "condition.continues",
            condition=condition.kind.name,
            subject=condition.subject,
            message=condition.message,
            seconds=round(now - condition.began_at),
            count=condition.count,
        )
        condition.logged_at, condition.logged_count = now, condition.count
        condition.summary_seconds = min(2 * condition.summary_seconds, MAX_SUMMARY_SECONDS)


def _log_began(condition: Condition) -> None:
    name, subject, message = condition.kind.name, condition.subject, condition.message
    if condition.kind.prevents_readiness:
        log.warning("condition.began", condition=name, subject=subject, message=message)
    else:
        log.info("condition.began", condition=name, subject=subject, message=message)
