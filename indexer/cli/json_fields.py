"""The fields of the JSON lines that commands print with `--json` (docs/commands.md)."""

from indexer.sync.repo_state import SyncStatus

JsonLine = dict[str, str]
"""The meaning of each field of a line, by path: `[]` stands for each item of a list.

An object whose fields are not listed has names from the data, such as reasons.
"""

_DEAD_LETTER: JsonLine = {
    "id": "The ID, for `indexer rejected show` and `replay`.",
    "time": "When the message was first rejected.",
    "relay": "The relay that sent it.",
    "seq": "Its sequence number; null if it has none.",
    "epoch": "Number of the relay's sequence that `seq` belongs to.",
    "did": "The account that it names; null if it names none.",
    "kind": "The kind of event.",
    "reason": "Why it was rejected (docs/reasons.md).",
    "meaning": "The reason as a sentence.",
    "detail": "More about the reason.",
    "frame_bytes": "Size of the stored frame.",
    "complete": "False if only the beginning of the frame is stored; it cannot be replayed.",
}

JSON_LINES: dict[str, dict[str, JsonLine]] = {
    "add": {
        "": {
            "added": "Number of repos that are tracked from now on.",
            "already_tracked": "Number of repos that were tracked before.",
        }
    },
    "audit": {
        "A line for each repo": {
            "did": "The account.",
            "records": "Number of records compared.",
            "differences": "Number of differences.",
            "listed": "The first differences.",
            "listed[].subject": "The AT-URI of the record, or the DID of the repo.",
            "listed[].description": "What differs.",
            "reason_skipped": "Why the repo, or a part of it, was not compared; null if it was.",
        },
        "The last line": {
            "summary": "The sum of all repos.",
            "summary.repos": "Number of repos compared completely.",
            "summary.equal": "Number of those without a difference.",
            "summary.records": "Number of records compared.",
            "summary.differences": "Number of differences.",
            "summary.skipped": "Number of repos that were not compared completely.",
            "summary.reasons_skipped": "Number of those by reason.",
        },
    },
    "cursor reset": {
        "": {
            "relay": "The URL of the relay.",
            "seq": "The new cursor.",
            "shards": "The shards whose cursor was set, as i/n.",
        }
    },
    "cursor show": {
        "": {
            "cursors": "The stored cursors.",
            "cursors[].relay": "The URL of the relay.",
            "cursors[].shard": "The shard, as i/n.",
            "cursors[].epoch": "Number of the relay's sequence that `seq` belongs to.",
            "cursors[].seq": "The sequence number up to which everything is stored.",
            "cursors[].event_time": "Time of the event at the cursor, as the relay wrote it; null if it is unknown.",
            "cursors[].lag_seconds": "Age of that event; null if it is unknown.",
            "open_gaps": "The open gaps.",
            "open_gaps[].relay": "The URL of the relay.",
            "open_gaps[].shard": "The shard, as i/n.",
            "open_gaps[].reason": "Why messages may have been missed (docs/reasons.md).",
            "open_gaps[].first_seq": "The first sequence number that may be missing; null if it is unknown.",
            "open_gaps[].last_seq": "The last one; null if it is unknown.",
            "open_gaps[].opened_at": "When it was opened.",
        }
    },
    "discover": {
        "": {
            "source": "The URL of the host that was asked.",
            "collection": "The collection; null for all accounts.",
            "listed": "Number of accounts that the host listed.",
            "added": "Number of those that were unknown.",
        }
    },
    "distribute": {
        "": {
            "shards": "Number of shards of each table.",
            "nodes": "The addresses of the nodes that hold them.",
            "was_complete": "True if everything was distributed before.",
            "tables": "The estimated number of rows of each table that was distributed now.",
            "split_from": "The number of shards before, if shards with rows were split now; else null.",
            "settings": "The settings of the database and of the coordinator that the command has set.",
            "notices": "What the operator should know or do.",
        }
    },
    "doctor": {
        "": {
            "ok": "False if a check failed.",
            "checks": "The results of the checks.",
            "checks[].check": "What was checked.",
            "checks[].level": "`ok`, `warn` or `fail`.",
            "checks[].found": "What was found.",
            "checks[].action": "What to do; null if nothing.",
        }
    },
    "inspect": {
        "The first line": {
            "did": "The account.",
            "rev": "The rev of the commit.",
            "commit": "The CID of the commit.",
            "data": "The CID of the root of the tree.",
            "records": "Number of records in the tree.",
            "signature": "Whether the signature was checked.",
        },
        "A line for each record": {
            "path": "Collection and rkey.",
            "cid": "The CID.",
            "problem": "What is unusual about its value (docs/reasons.md); null if nothing.",
        },
    },
    "lexicon add": {
        "": {
            "nsid": "The NSID of the lexicon.",
            "state": "`added`, `updated`, or `unchanged`.",
            "view": "The name of its view in schema `lexicon`; null if it has none.",
            "unknown": "NSIDs of lexicons that its fields refer to and that are not stored.",
        }
    },
    "lexicon index": {
        "": {
            "nsid": "The NSID of the record type.",
            "columns": "The columns of the index.",
            "built": "False if there was an index already.",
        }
    },
    "lexicon list": {
        "": {
            "nsid": "The NSID of the lexicon.",
            "view": "The name of its view in schema `lexicon`; null if it has none.",
            "source": "The file, or the AT-URI of the record, that it was read from.",
            "columns": "The columns of its fields.",
            "indexes": "The indexes on these columns.",
            "indexes[].columns": "The columns of the index, separated by commas.",
            "indexes[].valid": "False if building it was interrupted, or has not finished.",
        }
    },
    "lexicon remove": {"": {"nsid": "The NSID of the lexicon."}},
    "migrate": {"": {"version": "The version of the schema."}},
    "record": {
        "": {
            "uri": "The AT-URI.",
            "cid": "The CID.",
            "rev": "The rev of the commit that wrote it last, or of the export in which it was found.",
            "value": "The record as JSON; null if it is not stored, or if JSON cannot hold it.",
            "value_problem": "Why `value` is null or differs from the original (docs/reasons.md); null if neither.",
            "indexed_at": "When this version was stored.",
        }
    },
    "rejected list": {
        "": _DEAD_LETTER,
        "With `--feed`": {
            "uri": "The AT-URI of the record, or of the repo.",
            "action": "What the event says of the record: create, update, delete; or that of the repo.",
            "rev": "The rev of the event; null if it has none.",
            "attempts": "How often it was sent; 0 if it only waited for other events of its repo.",
            "since": "When it was first not acknowledged.",
            "failure": "Why it counts as not acknowledged.",
        },
    },
    "rejected replay": {
        "": {
            "id": "The ID of the dead letter.",
            "outcome": "The outcome of the message, `untried`, or `unknown` if there is no dead letter with this ID.",
            "reason": "Why the message was rejected or its repo is desynchronized; null for other outcomes.",
            "detail": "More about the reason, or why the dead letter is untried.",
            "previous_reason": "The reason of the earlier rejection, if it was rejected again; otherwise null.",
        },
        "With `--feed`": {"events": "Number of events that are sent again."},
    },
    "rejected show": {
        "": _DEAD_LETTER
        | {
            "header": "The header of the frame, with long strings shortened; null if it cannot be decoded.",
            "payload": "Its payload, likewise.",
            "unreadable": "Why the frame cannot be decoded; null if it can.",
        }
    },
    "repo": {
        "": {
            "did": "The account.",
            "handle": "Its verified handle; null if there is none.",
            "pds": "The URL of its host; null if it is unknown.",
            "bucket": "The bucket that it belongs to, which decides about the shard.",
            "sync_status": f"{', '.join(f'`{status}`' for status in SyncStatus)}.",
            "sync_reason": "Why it is not synchronized (docs/reasons.md); null if it is.",
            "hosting_status": "The status of the account, as upstream reports it.",
            "withheld_since": "Since when the relay has withheld the account; null if it does not.",
            "takedown": "True if it is taken down here.",
            "tracked": "False if it was untracked: its records are erased, and its messages are ignored.",
            "visible": "True if the public views show its records.",
            "rev": "The rev of the stored head; null if there is none.",
            "data": "The CID of the root of its tree.",
            "commit": "The CID of its commit.",
            "latest_verified_rev": "The newest rev that a verified message named.",
            "records": "Number of stored records.",
            "synchronized_at": "When it last became synchronized; null if never.",
            "unproven_since": "When the first undecidable commit since the last export was applied; null if none was.",
            "updated_at": "When the row changed last.",
            "resync_attempts": "Failed resyncs and repeated desynchronizations since the repo last settled.",
            "next_attempt_at": "When the next resync may start; null if at once, or if it is parked.",
            "parked": "True if it is tried again only after an event, or after `INDEXER_SWEEP_INTERVAL`.",
            "last_error": "Why the last fetch failed; null if it did not.",
            "lease_until": "Until when a worker has claimed it; null if none has.",
            "buffered_events": "Number of events that wait for the end of the resync.",
            "buffered_bytes": "Their size.",
        }
    },
    "resync": {"": {"requested": "Number of repos whose resync was requested."}},
    **{
        f"scope {name}": {
            "": {
                "version": "Incremented by each change of the scope; 0 before the first start of a daemon.",
                "track": "Which repos become tracked: `all`, `listed` or `signal`.",
                "collections": "The patterns of the collections that are stored.",
                "signal_collections": "The patterns of the collections that cause a repo to be tracked.",
                "progress": "The progress of the backfill of each pattern.",
                "progress[].collection": "The pattern.",
                "progress[].repos": "Number of tracked repos of active accounts.",
                "progress[].complete": "Number of those of which all records of the collection are stored.",
            }
        }
        for name in ("set", "show")
    },
    "scope untrack": {
        "": {
            "untracked": "Number of repos that are no longer tracked.",
            "not_tracked": "Number of repos that were not tracked before.",
        }
    },
    "status": {
        "": {
            "ready": "True if there is no reason why the indexer is not ready.",
            "not_ready": "The message of the first reason; null if it is ready.",
            "not_ready_reasons": "The reasons of `/readyz` of all daemons of the shard, and those without a report.",
            "not_ready_reasons[].code": "The kind of reason, for programs (docs/operations.md lists them).",
            "not_ready_reasons[].message": "What is wrong, for people.",
            "not_ready_reasons[].value": "How bad it is: seconds, a share or a number.",
            "database": "The URL of the database, without a password.",
            "cursors": "The stored cursors.",
            "cursors[].relay": "The URL of the relay.",
            "cursors[].shard": "The shard, as i/n.",
            "cursors[].seq": "The sequence number up to which everything is stored.",
            "cursors[].event_time": "Time of the event at the cursor, as the relay wrote it; null if it is unknown.",
            "cursors[].lag_seconds": "Seconds since everything was stored; null if it is unknown.",
            "daemons": "The daemons with the role `live`.",
            "daemons[].shard": "The shard, as i/n, or its range of positions.",
            "daemons[].state": "`owns` if it processes the shard, `waits` if another process holds a part of it.",
            "daemons[].client": "The network address of the process.",
            "daemons[].pid": "The process ID of its session in Postgres.",
            "daemons[].seconds": "Seconds since that session began.",
            "gaps": "The open gaps.",
            "gaps[].relay": "The URL of the relay.",
            "gaps[].shard": "The shard, as i/n.",
            "gaps[].reason": "Why messages may have been missed (docs/reasons.md).",
            "gaps[].first_seq": "The first sequence number that may be missing; null if it is unknown.",
            "gaps[].last_seq": "The last one; null if it is unknown.",
            "gaps[].open_seconds": "Seconds since it was opened.",
            "repos": "Number of repos by sync status.",
            "reasons": "Number of repos by the reason why they are not synchronized.",
            "failures": "Number of repos by the reason why their last fetch failed.",
            "counted_share": "Share of the table that was counted; below 1, the numbers of repos are estimates.",
            "records": "Estimated number of records.",
            "resync_queue": "Number of repos that wait for a resync.",
            "parked": "Number of repos that are tried again only after an event, or after `INDEXER_SWEEP_INTERVAL`.",
            "unproven": "Number of repos with an undecidable commit since their last complete export.",
            "events_per_second": "Events of the relays.",
            "resyncs_per_second": "Repos that leave the queue, synchronized or parked.",
            "progress": "Share of synchronized repos among those that are synchronized or waiting; null without any.",
            "seconds_left": "Time for all waiting repos at the present rate; null if it is unknown.",
            "consumers": "The registered consumers of the change log.",
            "consumers[].name": "The name.",
            "consumers[].seq": "The last change that it was given.",
            "consumers[].behind": "Number of changes that it has not been given.",
            "consumers[].lag_seconds": "Age of the oldest of those changes.",
            "consumers[].silent_seconds": "Seconds since it last asked for changes.",
            "consumers[].cut_off": "True if it was disconnected. Unregister it (`atproto.unregister_reader`), register "
            "it again, and read the records again.",
            "refused_events": "Events of the feed that clients of tap, or the webhook, do not acknowledge.",
            "refused_events[].id": "The number of the event.",
            "refused_events[].action": "What the event says of the record: create, update, delete, identity.",
            "refused_events[].uri": "The AT-URI of the record, or of the repo.",
            "refused_events[].attempts": "How often it was sent.",
            "refused_events[].seconds": "Seconds since it was first not acknowledged.",
            "refused_events[].failure": "Why it counts as not acknowledged.",
            "set_aside_events": "Number of events that were refused for so long that they were set aside.",
            "paused_hosts": "Hosts that get no requests at present.",
            "paused_hosts[].host": "The host.",
            "paused_hosts[].reason": "Why it is paused.",
            "paused_hosts[].seconds_left": "Seconds until the next request.",
            "paused_hosts[].failures_in_a_row": "Number of failed requests since the last success.",
            "paused_hosts[].last_error": "The last error; null if there was none.",
            "links": "The links between records (`INDEXER_LINKS`). The consumer `links` shows how far they are behind.",
            "links.state": "`off`, `backfill`, or `complete`.",
            "links.progress": "Estimated share of the repos whose links are stored; null if no links are kept.",
            "links.repos_done": "Number of repos that the backfill has visited.",
            "links.seconds_left": "Time for the rest of the backfill at its mean rate; null if it is unknown.",
            "links.open_recounts": "Hidden or shown repos whose links are not recounted; 100,000 if there are more.",
            "scope_backfill": "The backfill of collections that were added to the scope.",
            "scope_backfill.waiting": "Number of repos that were fetched before and wait for such records.",
            "scope_backfill.repos_per_second": "Rate at which it falls; at most `resyncs_per_second`.",
            "scope_backfill.seconds_left": "Time for all of them at this rate; null if it is unknown or none waits.",
        }
    },
    "takedown": {"": {"did": "The account.", "takedown": "True if it is taken down now."}},
}
"""The lines of each command: a heading for each kind of line, empty if there is one kind only."""
