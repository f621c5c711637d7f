"""Conditions: states that last and that an operator should know of, such as a database that does not answer.

A condition is logged when it begins, and when it is over, however often it is reported in between.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

import structlog

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
        quiet_seconds: The condition is over when it was not reported for this time; infinite: only `end` ends it.
        prevents_readiness: The daemon is not ready while it lasts, and its first log line is a warning.
    """

    name: str
    quiet_seconds: float = math.inf
    prevents_readiness: bool = False


DATABASE_UNAVAILABLE = ConditionKind("database-unavailable", prevents_readiness=True)
"""The database does not answer. Everything that needs it is retried."""
DATABASE_ERRORS = ConditionKind("database-errors", quiet_seconds=60.0)
"""Some operations on the database fail although it answers. They are retried."""
MESSAGES_REJECTED = ConditionKind("messages-rejected", quiet_seconds=60.0, prevents_readiness=True)
"""One reason rejects most of the messages of the last minute. The subject is the reason."""
IDENTITY_LOOKUPS_FAILING = ConditionKind("identity-lookups-failing", quiet_seconds=300.0, prevents_readiness=True)
"""Most identity lookups at the PLC directory failed in the last minute. They are retried."""
PLC_EXPORT_FAILING = ConditionKind("plc-export-failing")
"""The export of the PLC directory cannot be read, or is not in order. Identities are looked up when they are old."""
PLC_POSITION_UNKNOWN = ConditionKind("plc-position-unknown")
"""The PLC directory does not have the last operation that was read. Nothing more is read."""
PLC_OPERATIONS_UNPROVEN = ConditionKind("plc-operations-unproven", quiet_seconds=3_600.0)
"""Operations in the export of the PLC directory are not valid. Their DIDs are looked up."""
HOST_FAILING = ConditionKind("host-failing", quiet_seconds=15.0)
"""Requests to a host fail, so that it is paused again and again. The subject is the host."""
RELAY_FAILING = ConditionKind("relay-failing")
"""The stream of a relay, the subject, delivers nothing, while that of another relay does. The daemon is ready."""
RESYNCS_FAILING = ConditionKind("resyncs-failing", quiet_seconds=600.0)
"""Resyncs fail. The subject is the reason and the host. The log level debug shows each one."""
RESYNCS_SLOW = ConditionKind("resyncs-slow", quiet_seconds=600.0)
"""Hosts send slowly, and leave too few workers or bytes to others. The subject is the host."""
EQUIVOCATIONS = ConditionKind("equivocations", quiet_seconds=3_600.0)
"""Exports have another tree than the stored one at the same rev. They are applied."""
VALUES_MISSING = ConditionKind("values-missing", quiet_seconds=3_600.0)
"""No source has the blocks of some records. Their CIDs are stored, and resyncs are requested later."""
MESSAGES_REFUSED = ConditionKind("messages-refused", quiet_seconds=600.0)
"""The database cannot store the effects of some messages. They become dead letters, and their repos are resynced."""
RELAY_LACKS_MESSAGES = ConditionKind("relay-lacks-messages", quiet_seconds=600.0)
"""A relay, the subject, has not sent messages that another relay has sent."""
NEW_ACCOUNTS_LIMITED = ConditionKind("new-accounts-limited", quiet_seconds=600.0)
"""The stream added too many accounts of a registered domain, which is the subject. Further ones wait.

Or hints added too many of all domains (subject: `jetstream`). Further ones are ignored.
"""
ACCOUNTS_WITHHELD = ConditionKind("accounts-withheld", quiet_seconds=86_400.0)
"""Relays do not pass on more accounts of a host, the subject, than before. They are fetched when its list changes."""
HTTP_CONNECTIONS_LIMITED = ConditionKind("http-connections-limited", quiet_seconds=60.0)
"""The HTTP server has as many connections as it allows. Each new one closes the oldest of the largest network."""
WEBSOCKETS_LIMITED = ConditionKind("websockets-limited", quiet_seconds=60.0)
"""As many websockets are open as allowed. A further one is refused, or displaces one."""
FEED_CUT_OFF = ConditionKind("feed-cut-off", prevents_readiness=True)
"""The clients of tap were too far behind. Nothing is delivered until an operator removes the consumer."""
FEED_EVENTS_SET_ASIDE = ConditionKind("feed-events-set-aside")
"""Clients of tap refused events for long. Later ones go on. An operator may let them be sent again."""
WEBHOOK_FAILING = ConditionKind("webhook-failing", quiet_seconds=300.0)
"""Requests to the webhook of the feed fail. They are retried, and the change log retains what was not delivered."""
CLUSTER_NODE_UNAVAILABLE = ConditionKind("cluster-node-unavailable", prevents_readiness=True)
"""A node of the cluster, the subject, does not answer. What needs it is retried."""
TRANSACTIONS_IN_DOUBT = ConditionKind("transactions-in-doubt", prevents_readiness=True)
"""Prepared transactions on nodes are not completed within seconds. Citus does it when they answer."""
NOTIFICATION_QUEUE_FILLS = ConditionKind("notification-queue-fills")
"""A session that listens has left a transaction open. If the queue is full, consumers must poll."""
DEAD_ROWS_KEPT = ConditionKind("dead-rows-kept")
"""A snapshot was kept while 200,000 batches were written, so that each one reads old row versions."""


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
        is_full = math.isfinite(kind.quiet_seconds) and sum(kind is one for one, _ in self._active) >= MAX_SUBJECTS
        if is_full and (kind, subject) not in self._active:
            subject = OTHERS
        condition = self._active.get((kind, subject))
        if condition is None:
            condition = Condition(kind, subject, message, value, now, now, count)
            self._active[kind, subject] = condition
            began = log.warning if kind.prevents_readiness else log.info
            began("condition.began", condition=kind.name, subject=subject, message=message)
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
        """End the conditions that were not reported for a while."""
        for condition in self.active():
            if self._clock() - condition.reported_at > condition.kind.quiet_seconds:
                self.end(condition.kind, condition.subject)
