"""Every log event of this program: its level and fields, what happened, and what happens next (docs/logs.md)."""

from typing import Literal, NamedTuple

Level = Literal["debug", "info", "warning", "error", "critical"]


class LogEvent(NamedTuple):
    """One event.

    Attributes:
        levels: The level of its lines; two if it depends on the case.
        fields: The names of its fields. Every line also has `timestamp`, `level`, `logger` and `event`.
        happened: What happened, as a sentence.
        then: What happens next, or what to do, as a sentence.
    """

    levels: tuple[Level, ...]
    fields: tuple[str, ...]
    happened: str
    then: str


LOG_EVENTS: dict[str, LogEvent] = {
    "batch.refused": LogEvent(
        ("debug",),
        ("messages", "error"),
        "The database answers but cannot store this batch.",
        "It is halved until one message remains, which becomes a dead letter if it is refused alone.",
    ),
    "change-log.blocked": LogEvent(
        ("error",),
        ("role", "pid", "seconds"),
        "An open transaction of this session prevents trimming of the change log, which has twice its size.",
        "End the session, or grant pg_signal_backend and pg_read_all_stats to the role of the daemon.",
    ),
    "change-log.size-limit": LogEvent(
        ("warning",),
        ("seconds", "retention", "limit"),
        "Changes of this age were deleted before INDEXER_CHANGE_RETENTION, because the change log reached "
        "INDEXER_CHANGE_BYTES.",
        "Raise the limit if consumers need older changes.",
    ),
    "change-log.trimmed": LogEvent(
        ("info",),
        ("seq", "bytes"),
        "The oldest segment of the change log, up to this seq, was deleted.",
        "Nothing; consumers that are behind it were disconnected before.",
    ),
    "cleanup.failed": LogEvent(
        ("error",),
        ("type", "message", "exception"),
        "An exception that no caller receives, such as one of a finalizer, was ignored; the traceback says which.",
        "The process continues. Report the bug.",
    ),
    "clock.set-back": LogEvent(
        ("warning",),
        ("repos",),
        "The next attempt of this number of repos was more than two hours ahead, and no wait is that long: the clock "
        "of this machine was ahead when they began to wait, or it is behind now.",
        "They are resynced now. Check the time synchronization of the machine.",
    ),
    "condition.began": LogEvent(
        ("info", "warning"),
        ("condition", "subject", "message"),
        "A condition began, such as a database that does not answer; docs/operations.md lists them.",
        "`message` says what happens next. Summaries and the end are logged, single occurrences are not.",
    ),
    "condition.continues": LogEvent(
        ("info",),
        ("condition", "subject", "message", "seconds", "count"),
        "A condition lasts; `count` says how often it occurred until now.",
        "The interval of these lines grows from a minute to an hour.",
    ),
    "condition.ended": LogEvent(
        ("info",),
        ("condition", "subject", "seconds", "count"),
        "A condition is over.",
        "Nothing.",
    ),
    "consumer.caught-up": LogEvent(
        ("info",),
        ("reader",),
        "A consumer that lagged is no longer behind by more than an hour.",
        "The change log is trimmed as usual.",
    ),
    "consumer.disconnected": LogEvent(
        ("error",),
        ("reader", "seq", "behind"),
        "A consumer was too far behind the change log.",
        "Unregister it (`atproto.unregister_reader`), register it again, and read the records again.",
    ),
    "consumer.lagging": LogEvent(
        ("warning",),
        ("reader", "behind", "seconds", "seq"),
        "A consumer is behind by more than an hour.",
        "The change log retains what it has not read, up to twice INDEXER_CHANGE_BYTES. Repair the consumer, or "
        "unregister it (`atproto.unregister_reader`) if it is not used any more.",
    ),
    "consumer.session-ended": LogEvent(
        ("error",),
        ("role", "pid", "seconds"),
        "A consumer's open transaction kept the change log from being trimmed at twice its size, or was older than a "
        "minute when an upgrade of the schema needed what it had locked.",
        "Its session was ended; the consumer has to connect again.",
    ),
    "daemon.drain-incomplete": LogEvent(
        ("error",),
        ("messages",),
        "The received messages were not written in time.",
        "Nothing stored is lost; messages that were not written are received again.",
    ),
    "daemon.draining": LogEvent(
        ("info",),
        ("messages", "resyncs"),
        "A signal was received.",
        "Received messages are written, and no more are read.",
    ),
    "daemon.started": LogEvent(
        ("info",),
        ("health", "version", "core", "threads"),
        "The daemon is running. `core` is the implementation of decoding and verification, `threads` the number of its "
        "threads.",
        "Its health checks are at this address.",
    ),
    "daemon.stop-timeout": LogEvent(
        ("error",),
        ("unfinished", "seconds"),
        "The process did not end within INDEXER_STOP_TIMEOUT.",
        "It ends now, in this step. Nothing stored is lost; messages that were not written are received again.",
    ),
    "daemon.stopped": LogEvent(("info",), (), "The daemon has stopped.", "The process ends."),
    "daemon.stopped-at-once": LogEvent(
        ("warning",),
        ("unfinished",),
        "A second signal was received.",
        "It ends now, in this step. Nothing stored is lost; messages that were not written are received again.",
    ),
    "database.answered": LogEvent(
        ("info",),
        ("database", "attempts"),
        "The database that the daemon waited for at its start answers.",
        "The daemon continues to start.",
    ),
    "database.migrated": LogEvent(
        ("info",),
        ("versions", "seconds"),
        "The schema was upgraded by this number of versions.",
        "The daemon continues to start.",
    ),
    "database.migrating": LogEvent(
        ("info",),
        ("applied", "versions", "seconds"),
        "The upgrade of the schema has applied so many of all `versions`. They are null until it begins: another "
        "process upgrades the schema, or the database is slow to answer.",
        "The daemon starts when the upgrade ends. A line follows every 10 seconds.",
    ),
    "database.migration-waiting": LogEvent(
        ("warning",),
        ("role", "pid", "seconds"),
        "The upgrade of the schema waited for a lock that this session has, at first for two seconds. Its transaction "
        "is `seconds` old: null if the role of the daemon may not see it. `role` is null for a process of Postgres, "
        "such as a VACUUM. All fields are null if no session of this server has the lock: a prepared transaction has "
        "it, or a session on another node of a cluster.",
        "The upgrade is tried again. If all these sessions are younger than a minute, it waits twice as long, at most "
        "64 s, and queries of the same tables and views wait behind it. If a session is older, it is ended if it is a "
        "consumer's; otherwise end it yourself, or wait for it.",
    ),
    "database.operation-failed": LogEvent(
        ("debug",),
        ("task", "error"),
        "An operation of this task on the database failed.",
        "It is retried.",
    ),
    "database.newer-schema": LogEvent(
        ("warning",),
        ("database", "release"),
        "A newer release has upgraded the schema, and this release can use it.",
        "This process continues; upgrade it, too.",
    ),
    "database.roles-missing": LogEvent(
        ("warning",),
        ("roles",),
        "These roles do not exist, and the daemon may not create them.",
        "The public schema is not granted to them; create them and run `indexer migrate`.",
    ),
    "database.waiting": LogEvent(
        ("warning",),
        ("error",),
        "The database does not answer at the start.",
        "The daemon tries again at least every 15 seconds. Check INDEXER_DATABASE_URL and the server if this lasts.",
    ),
    "erasure.done": LogEvent(
        ("info",),
        ("accounts", "records", "postponed"),
        "The grace period of these deleted accounts was over, and their records were erased, or could not be yet.",
        "Postponed accounts, whose DIDs are gone, are checked again later; the level debug shows each account.",
    ),
    "feed.began": LogEvent(
        ("info",),
        ("consumer", "seq", "snapshot"),
        "This process serves the feed for clients of tap. All changes up to seq were delivered before. If snapshot is "
        "not null, the stored records of the repos after this DID are delivered, too.",
        "Clients get the changes after it that they have not acknowledged.",
    ),
    "feed.snapshot-completed": LogEvent(
        ("info",),
        ("consumer",),
        "Clients of tap have acknowledged all records that were stored when the consumer was registered.",
        "They get changes only.",
    ),
    "feed.waiting": LogEvent(
        ("warning",),
        ("consumer",),
        "Another process serves the feed for clients of tap.",
        "Clients of this process wait. It serves them when the session of the other process ends. Connect them to the "
        "process that logged `feed.began`.",
    ),
    "gap.closed": LogEvent(
        ("info",),
        ("relay", "reason", "id"),
        "A reconciliation has found every repo that the gap may have affected. Each process for whose shard the gap "
        "was open until then has this line.",
        "The resyncs that it requested run.",
    ),
    "gap.opened": LogEvent(
        ("error",),
        ("id", "relay", "reason", "first_seq", "last_seq"),
        "Messages may have been missed.",
        "The daemon is not ready until a reconciliation has closed the gap.",
    ),
    "handle.check-failed": LogEvent(
        ("debug",),
        ("did", "handle", "error"),
        "A handle could not be verified.",
        "The verification is retried.",
    ),
    "identity.load-failed": LogEvent(
        ("debug",),
        ("did", "error"),
        "The database did not answer when identities were loaded.",
        "They are resolved over the network.",
    ),
    "identity.refresh-failed": LogEvent(
        ("debug",),
        ("did", "error"),
        "An identity could not be refreshed.",
        "The cached one is still used.",
    ),
    "identity.refresh-postponed": LogEvent(
        ("debug",),
        ("did", "failures", "error"),
        "A stale identity could not be refreshed.",
        "The refresh is retried after a back-off.",
    ),
    "identity.save-failed": LogEvent(
        ("debug",),
        ("did", "error"),
        "The database did not store a resolved identity.",
        "The identity is in use. If it was saved together with others, it is saved alone once. If that fails, too, a "
        "later message of the account causes a new lookup: after the lookup interval of up to 60 s, and only within "
        "the budget of background refreshes.",
    ),
    "jetstream.cursor-too-old": LogEvent(
        ("info",),
        ("cursor", "seq"),
        "The cursor of a subscriber of /subscribe is older than the log: changes up to seq were trimmed. At most 20 "
        "lines a minute.",
        "It gets the oldest change and everything after it. It may read atproto.records for what is missing.",
    ),
    "jetstream.disconnected": LogEvent(
        ("warning",),
        ("client", "reason"),
        "The daemon disconnected a subscriber of /subscribe. If the subscriber was too slow, others were not delayed. "
        "client is its network. At most 20 lines a minute.",
        "It may connect again with the cursor of its last event.",
    ),
    "jetstream.log-trimmed": LogEvent(
        ("warning",),
        ("error", "subscribers"),
        "The change log was trimmed past the position of the feed, because the database was unavailable for too long.",
        "The subscribers are disconnected. Those that connect with a cursor continue at the oldest change.",
    ),
    "key.unavailable": LogEvent(
        ("debug",),
        ("did", "error"),
        "A signing key could not be fetched.",
        "The message is not verified, and a synchronized repo is resynced.",
    ),
    "links.backfilled": LogEvent(
        ("info",),
        ("repos", "links", "seconds"),
        "The links of all stored records are stored.",
        "Nothing; atproto.link_count answers from now on.",
    ),
    "links.backfilling": LogEvent(
        ("info",),
        ("after",),
        "INDEXER_LINKS is on, and the links of records that were stored before are being added, from this DID on.",
        "It continues in the background, also after a restart; atproto.link_progress shows the progress.",
    ),
    "links.off": LogEvent(
        ("warning",),
        (),
        "INDEXER_LINKS was turned off, and all links were removed.",
        "Nothing. To turn it on again begins a new backfill.",
    ),
    "links.position-lost": LogEvent(
        ("warning",),
        ("consumer", "seq", "error"),
        "The links were too far behind the change log, or their consumer was removed, so changes may be missing.",
        "All links are removed, and a new backfill begins; until it is complete, atproto.link_count returns null.",
    ),
    "message.refused": LogEvent(
        ("debug",),
        ("did", "seq", "error"),
        "The database cannot store the effects of this message.",
        "It becomes a dead letter, and its repo is resynced.",
    ),
    "postgres.ended": LogEvent(
        ("error",),
        ("code", "log"),
        "The embedded Postgres stopped unexpectedly; its log says why.",
        "It is restarted.",
    ),
    "postgres.killed": LogEvent(
        ("error",),
        ("log",),
        "The embedded Postgres did not stop in time and was killed.",
        "It recovers at the next start.",
    ),
    "postgres.not-restarted": LogEvent(
        ("error",),
        ("error",),
        "The embedded Postgres could not be restarted.",
        "The restart is retried at least every 30 seconds; the same error is logged once.",
    ),
    "postgres.restarted": LogEvent(("info",), (), "The embedded Postgres is running again.", "The stages continue."),
    "process.ended": LogEvent(
        ("error",),
        ("process", "code", "pause"),
        "One of several daemon processes ended.",
        "It is restarted after a pause.",
    ),
    "process.failed": LogEvent(
        ("critical",),
        ("exception",),
        "An unexpected exception ends the process; the traceback says which.",
        "After a restart, it continues from its cursor. Report the bug.",
    ),
    "process.started": LogEvent(
        ("info",),
        ("process", "pid"),
        "One of several daemon processes was started.",
        "Its own lines follow.",
    ),
    "reconciliation.done": LogEvent(
        ("info",),
        ("relay", "listed", "different"),
        "The relay's repo list was compared with the database.",
        "A resync was requested for the repos that are behind.",
    ),
    "reconciliation.failed": LogEvent(
        ("warning",),
        ("relay", "error"),
        "The relay's repo list could not be read to its end.",
        "The next relay is asked, then this one again after a growing pause. A gap stays open until a list was read: "
        "see docs/runbook.md#gapopen if this lasts for hours.",
    ),
    "reconciliation.many-unlisted": LogEvent(
        ("warning",),
        ("relay", "asked"),
        "The repo list lacks many stored accounts.",
        "The next reconciliation asks for the hosting status of the rest.",
    ),
    "reconciliation.status-unknown": LogEvent(
        ("warning",),
        ("relay", "accounts", "error"),
        "Each request for the hosting status of so many accounts failed; `error` is that of the first one.",
        "Hidden accounts stay hidden. The others become desynchronized (status-unknown): their hosts are asked.",
    ),
    "repo-list.invalid-entries": LogEvent(
        ("warning",),
        ("source", "count", "first"),
        "This host's repo list, as far as it was read, has entries without a DID, or with another invalid field.",
        "The entries without a DID are skipped. Of the others, the fields that are valid are used.",
    ),
    "relay.connected": LogEvent(
        ("info",),
        ("relay", "cursor"),
        "The stream is open, after this cursor; without one, it has new messages only.",
        "Messages are received.",
    ),
    "relay.connecting": LogEvent(
        ("debug",),
        ("relay", "cursor"),
        "A connection to a relay is being opened, after this cursor.",
        "`relay.connected` or `relay.unreachable` follows.",
    ),
    "relay.error": LogEvent(
        ("error",),
        ("relay", "error"),
        "The relay sent an error message, and ends the stream.",
        "The daemon reconnects; the same error is logged again only after a valid message.",
    ),
    "relay.info": LogEvent(
        ("info",),
        ("relay", "name"),
        "The relay sent an info message; each name is logged once per connection.",
        "Nothing.",
    ),
    "relay.lost": LogEvent(
        ("warning",),
        ("relay", "error"),
        "The open connection to the relay was lost.",
        "The daemon reconnects after a pause; until then, /readyz shows relay-disconnected. If this lasts for minutes, "
        "see docs/runbook.md#relaydisconnected.",
    ),
    "relay.sequence-restarted": LogEvent(
        ("error",),
        ("relay", "cursor", "evidence"),
        "The relay started a new sequence.",
        "The stream is entered by time, and a gap is opened.",
    ),
    "relay.silent": LogEvent(
        ("info",),
        ("relay", "error"),
        "The relay sent no message for a while.",
        "The daemon reconnects, and waits longer if nothing is new.",
    ),
    "relay.unreachable": LogEvent(
        ("warning",),
        ("relay", "error", "attempts"),
        "No connection to a relay could be opened; `attempts` counts since the last connection.",
        "The daemon tries again. It logs the attempts 1, 2, 4, 8 and so on. If this lasts for minutes, see "
        "docs/runbook.md#relaydisconnected.",
    ),
    "repo-list.page-failed": LogEvent(
        ("debug",),
        ("source", "attempt", "error"),
        "A page of the repo list could not be read.",
        "It is read again after a pause, at most five times. The event of the reconciliation or of the scope follows.",
    ),
    "repo.erased": LogEvent(
        ("debug",),
        ("did",),
        "The grace period of a deleted account is over, and its records were erased.",
        "Nothing.",
    ),
    "repo.erasure-postponed": LogEvent(
        ("debug",),
        ("did", "reason", "seconds"),
        "The records of an account whose DID is gone were not erased yet, for this reason.",
        "The account is checked again after `seconds`.",
    ),
    "repos.forgotten": LogEvent(
        ("debug",),
        ("repos",),
        "Repos without stored records were deleted: they cannot be fetched, or their accounts are inactive.",
        "The next message of such an account adds its repo again.",
    ),
    "repos.unparked": LogEvent(
        ("debug",),
        ("repos",),
        "Parked repos are due again.",
        "They are resynced.",
    ),
    "resync.claim-lost": LogEvent(
        ("debug",),
        ("did", "error"),
        "The repo was desynchronized again, its lease expired, or the database failed.",
        "The resync is abandoned, and the repo is claimed again.",
    ),
    "resync.done": LogEvent(
        ("debug",),
        ("did", "result"),
        "A resync ended with this result.",
        "The worker claims another repo.",
    ),
    "resync.equivocation": LogEvent(
        ("debug",),
        ("did", "rev"),
        "The export has another tree than the stored one at the same rev.",
        "The export is applied.",
    ),
    "resync.failed": LogEvent(
        ("debug",),
        ("did", "error", "attempts"),
        "A resync failed.",
        "It is retried after a back-off, or when the repo is unparked.",
    ),
    "resync.group-failed": LogEvent(
        ("debug",),
        ("repos", "error"),
        "The shared transaction of small new repos failed.",
        "Each of them is written in a transaction of its own.",
    ),
    "resync.slow": LogEvent(
        ("debug",),
        ("did", "host", "bytes_per_second"),
        "All workers are occupied, and the host sends slowly.",
        "The resync ends, and starts again later.",
    ),
    "resync.source-failed": LogEvent(
        ("debug",),
        ("did", "source", "error"),
        "One source of exports failed.",
        "The next one is asked.",
    ),
    "resync.values-missing": LogEvent(
        ("debug",),
        ("did", "records"),
        "No source has the blocks of these records.",
        "Their CIDs are stored, and a resync is requested later.",
    ),
    "scope.changed": LogEvent(
        ("info",),
        ("version", "before", "now"),
        "The process read a new version of the scope.",
        "New messages follow it. Records of removed collections are deleted, records of added ones are fetched.",
    ),
    "scope.compared": LogEvent(
        ("info",),
        ("version", "complete"),
        "The lists of the added collections were read. `complete` repos have no records of these collections.",
        "The others are fetched.",
    ),
    "scope.compared-again": LogEvent(
        ("info",),
        ("collection", "incomplete"),
        "The list of an added collection was read again. `incomplete` repos in it have no stored record of it.",
        "These repos are fetched.",
    ),
    "scope.discovered": LogEvent(
        ("info",),
        ("relay", "collection", "listed", "added"),
        "The list of a signal collection was read. Of its accounts, `added` were not tracked before.",
        "Their repos are fetched.",
    ),
    "scope.list-failed": LogEvent(
        ("warning",),
        ("collection", "error", "retry_seconds"),
        "A relay's list of the repos with records of a collection could not be read.",
        "It is read again after retry_seconds. If this lasts, look at the error: repos that may have records of the "
        "collection wait for the list.",
    ),
    "scope.list-given-up": LogEvent(
        ("warning",),
        ("collection",),
        "A relay's list of the repos with records of a collection could not be read for a day.",
        "All repos are fetched, as if no relay offered the list.",
    ),
    "scope.list-not-offered": LogEvent(
        ("info",),
        ("relay", "collection", "error"),
        "The relay answers that it does not list repos by collection: 404, 501 or an XRPC error with this meaning.",
        "The next relay is asked. If none offers it, all repos are fetched.",
    ),
    "scope.signals-not-listed": LogEvent(
        ("warning",),
        ("collection", "error", "retry_seconds"),
        "No relay lists the repos with records of a signal collection, so repos that wrote them before are not found.",
        "The stream adds a repo when it writes such a record. Add a relay that lists repos by collection to "
        "INDEXER_RELAYS, or run `indexer discover --collection NSID --relay URL` with one.",
    ),
    "scope.narrowed": LogEvent(
        ("info",),
        ("version", "records"),
        "Records of collections that the scope does not select were deleted.",
        "Nothing.",
    ),
    "scope.not-untracked": LogEvent(
        ("warning",),
        ("version", "signal_collections"),
        "The scope wants fewer repos, but no repo is untracked: no list and no stored record shows which repos have "
        "records of these signal collections.",
        "Untrack repos with indexer scope untrack, or store the collections and change the scope again.",
    ),
    "scope.settings-ignored": LogEvent(
        ("warning",),
        ("settings", "stored"),
        "INDEXER_TRACK, INDEXER_COLLECTIONS or INDEXER_SIGNAL_COLLECTIONS differ from the stored scope.",
        "The stored scope decides. Change it with `indexer scope set`, or adapt the settings.",
    ),
    "scope.untracked": LogEvent(
        ("info",),
        ("version", "repos"),
        "Repos that the scope does not want any more were untracked.",
        "Their records are deleted within a minute or more.",
    ),
    "shard-lock.acquired": LogEvent(
        ("info",),
        ("shard",),
        "This process owns its shard again, after it waited for another process or lost its database session.",
        "It continues from its cursor.",
    ),
    "shard-lock.lost": LogEvent(
        ("warning",),
        ("shard",),
        "The database session of the shard lock ended.",
        "Nothing is written until the lock is acquired again.",
    ),
    "shard-lock.waiting": LogEvent(
        ("warning",),
        ("shard", "holders"),
        "Sessions of other processes hold a part of this shard.",
        "This process waits until they end, which is normal during an upgrade. Otherwise two processes have the same "
        "INDEXER_SHARD: stop one of them.",
    ),
    "thread.failed": LogEvent(
        ("error",),
        ("thread", "exception"),
        "An unexpected exception ended a thread; the traceback says which.",
        "The process continues. Report the bug.",
    ),
}
"""The events by name. Tests compare the names, levels and fields with the code."""
