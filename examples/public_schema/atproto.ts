// TypeScript types of the public views of the indexer (schema `atproto`). Generated from the database: do not edit.
// Copy this file into your project. The types are those of the values that node-postgres returns.

/** A bigint, which node-postgres returns as text, because a number of JavaScript has only 53 bits. */
export type Int8 = string;

/** A time that may be infinity, which node-postgres returns as the number Infinity. */
export type DateOrInfinity = Date | number;

/** A value of type jsonb. */
export type Json = null | boolean | number | string | Json[] | { [key: string]: Json };

/** The blobs that records of visible repos refer to, read from the values of the records: a row for each
 * reference. Indexed by did, and by (did, collection, rkey); without did it reads all records. The PDS of the
 * account has the bytes. */
export interface Blob {
  /** The DID of the repo that contains the record, and of the account that has the blob. */
  did: string;
  /** The CID of the blob. */
  cid: string;
  /** The MIME type that the record states; null if it states none. */
  mime_type: string | null;
  /** The size in bytes that the record states; null if it states no number of bytes. */
  size: Int8 | null;
  /** The NSID of the collection of the record. */
  collection: string;
  /** The key of the record. */
  rkey: string;
  /** The AT-URI of the record. */
  uri: string;
  /** The bucket of the DID, as atproto.bucket_of returns it. On a cluster, a query that compares it with a
   * constant reads one shard. */
  bucket: number;
}

/** The change log, in commit order. For ad-hoc queries: consumers use next_changes or changes_after, which use an
 * index. */
export interface Change {
  /** The number of the change, assigned by COMMIT: a snapshot that shows a number shows all smaller ones. Numbers
   * may be missing. */
  seq: Int8;
  /** The DID of the repo. */
  did: string;
  /** The NSID of the collection; null for a change of the whole repo. */
  collection: string | null;
  /** The record key; null for a change of the whole repo. */
  rkey: string | null;
  /** For a record: create, update, delete. For a repo: hidden (its records are no longer visible), visible (they
   * are visible again), deleted (the account was deleted upstream), identity (it has another handle, or another
   * hosting status although its visibility did not change), moved (it has another PDS), completed (a resync
   * completed; follows the changes of the resync). */
  action: string;
  /** The CID of the new record; null for a delete and for a change of the whole repo. */
  cid: string | null;
  /** The rev of the commit that made the change, or of the export in which a resync found it; null for a repo
   * without a rev, for an erased record, and for one whose collection is no longer selected. */
  rev: string | null;
  /** False for a difference found by a resync, and for completed. True for everything else: an event of the
   * stream, also one that was buffered during a resync, an erasure, a takedown, another handle, and another PDS. */
  live: boolean;
  /** When the change was committed here. Equal for the changes of one transaction, and later for later ones. */
  time: Date;
}

/** The stream position per relay and shard: all effects up to seq are in this database. */
export interface Cursor {
  /** The URL of the relay. */
  relay: string;
  /** The shard of the process, as index/count. */
  shard: string;
  /** All effects of messages up to this seq are in this database. */
  seq: Int8;
  /** The time in that message, as sent by the relay; null if it has none. */
  event_time: string | null;
  /** When the cursor was last saved. */
  updated_at: Date;
  /** Everything until this time is stored: the median time of the latest messages, or the present time if the
   * stream is open and no message has come for a while. Null if it is not known. */
  caught_up_at: Date | null;
}

/** Spans of a relay's stream in which messages may have been missed. While a gap is open, repos of its shard may
 * be outdated although they are synchronized. */
export interface Gap {
  /** The URL of the relay. */
  relay: string;
  /** The shard of the process that may have missed messages, as index/count. */
  shard: string;
  /** Why messages may have been missed, from a closed set (docs/reasons.md). */
  reason: string;
  /** When the gap was noticed. */
  opened_at: Date;
  /** The first seq that may be missing; null if it is not known. */
  first_seq: Int8 | null;
  /** The last seq that may be missing; null if it is not known. */
  last_seq: Int8 | null;
  /** When every repo that may have been affected was found and either equal or desynchronized; null if open. */
  closed_at: Date | null;
  /** The host whose repo list was compared with the database to close the gap. */
  closed_by: string;
}

/** Hosts that were asked for exports, identities and handles, with request statistics. */
export interface Host {
  /** The host name, with the port if it is not the default port. */
  host: string;
  /** The number of requests sent. */
  requests: Int8;
  /** Requests that the host failed: no connection, no response, or a server error. */
  failures: Int8;
  /** Failures since the last response. */
  failures_in_a_row: number;
  /** No requests are sent until then; null if the host is not paused. */
  paused_until: Date | null;
  /** throttled: the host asked for a pause; host-paused: too many requests failed in a row. */
  pause_reason: string;
  /** The latest failure. The first word is from a closed set (docs/reasons.md). */
  last_error: string;
  /** When a request last succeeded. */
  last_success_at: Date;
  /** When this row was last updated. */
  updated_at: Date;
}

/** The state of links, one row: if they are kept, and the progress of the backfill. */
export interface LinkProgress {
  /** off: no links are kept; backfill: links of stored records are added; complete: all links are stored. */
  state: string;
  /** 256 if the backfill is complete, otherwise 0. */
  buckets_done: number;
  /** 256 if links are kept, otherwise 0. */
  buckets: number;
  /** Repos whose links were added by the backfill. */
  repos_done: Int8;
  /** When INDEXER_LINKS was turned on; null if it is off. */
  enabled_at: Date | null;
  /** When the backfill was completed; null if it is not complete. */
  completed_at: Date | null;
  /** The number of the last change that atproto.links and atproto.link_count contain. Null if links are off. If
   * it equals atproto.latest_seq() in the same snapshot, they are exactly those of the records of the snapshot.
   * Otherwise, a record that has changed again may be shown as it is later. */
  seq: Int8 | null;
}

/** The AT-URIs and DIDs in the values of records of visible repos: a row for each record, path and target. Empty
 * unless INDEXER_LINKS is on, and incomplete until link_progress says complete. Indexed by (target, collection,
 * path, did, rkey) and by (did, collection, rkey). */
export interface Link {
  /** The AT-URI or the DID, as it is in the record. */
  target: string;
  /** strong-ref: an AT-URI as member uri of an object that also has a text cid; at-uri: any other AT-URI; did. */
  target_kind: string;
  /** The DID of the repo that contains the record with the link. */
  did: string;
  /** The NSID of the collection of the record. */
  collection: string;
  /** The key of the record. */
  rkey: string;
  /** Where the link is in the value: .name for a member of an object, [] for an element of an array, [type] for
   * one that is an object with this $type. */
  path: string;
  /** The bucket of the DID, as atproto.bucket_of returns it. On a cluster, a query that compares it with a
   * constant reads one shard. */
  bucket: number;
}

/** Registered consumers of the change log, and how far each is behind. */
export interface Reader {
  /** The name of the consumer. */
  name: string;
  /** The seq of the last change that it received. */
  seq: Int8;
  /** The latest seq minus the seq of the consumer. */
  behind: Int8;
  /** When the first change that it has not received was committed; null if there is none. */
  behind_since: Date | null;
  /** When it was registered. */
  registered_at: Date;
  /** When it last asked for changes or was registered again. */
  seen_at: Date;
  /** When it was disconnected for being too far behind; null if it was not. */
  cut_off_at: Date | null;
  /** The role that registered it, and that alone may use and remove it. */
  owner: string;
}

/** The records of visible repos. Indexed by (did, collection, rkey) and by (collection, indexed_at). */
export interface Record {
  /** The DID of the repo that contains the record. */
  did: string;
  /** The NSID of the collection. */
  collection: string;
  /** The record key. */
  rkey: string;
  /** The AT-URI of the record. */
  uri: string;
  /** The CID of the DAG-CBOR encoding. */
  cid: string;
  /** The rev of the commit that wrote the record, or of the export in which it was found. */
  rev: string;
  /** The record as AT Protocol JSON: links as $link objects, byte strings as $bytes objects. Null if
   * value_problem says why. */
  value: Json;
  /** Why value is null or differs from the original, from a closed set (docs/reasons.md). Null value: missing,
   * not-stored, not-dag-cbor, too-large, omitted, too-many-items, too-deep. Nearest JSON value: number,
   * nul-character, reserved-key. Unchanged value that does not fit its collection: not-a-map, no-type,
   * other-type. Null: no problem. */
  value_problem: string | null;
  /** When the record was last written here, by the clock of this server. */
  indexed_at: Date;
  /** The bucket of the DID, as atproto.bucket_of returns it. On a cluster, a query that compares it with a
   * constant reads one shard. */
  bucket: number;
}

/** Dead letters: messages that were rejected by their own fault, including forged ones. The newest 1,000 per
 * relay and reason. */
export interface RejectedMessage {
  /** The ID of the dead letter. */
  id: Int8;
  /** The relay that sent the message. */
  relay: string;
  /** The sequence number; null if it could not be read. */
  seq: Int8 | null;
  /** The DID that the message names, which proves nothing if the message is forged; null if it could not be read. */
  did: string | null;
  /** The kind of message. */
  kind: string;
  /** The rule that the message broke, from a closed set (docs/reasons.md). */
  reason: string;
  /** When the message was rejected. */
  time: Date;
}

/** Every tracked repo with its sync status and the reason for it. Indexed by did; any other condition scans the
 * whole table. */
export interface Repo {
  /** The DID of the account. */
  did: string;
  /** The verified handle: the DID document claims it and it resolves to the DID. handle.invalid if verification
   * failed; null if it has not been checked yet. */
  handle: string | null;
  /** The base URL of the PDS in the DID document; null if there is none or it was not read. */
  pds: string | null;
  /** desynchronized, in-progress, or synchronized. */
  sync_status: string;
  /** Why the repo is not synchronized (docs/reasons.md); null if it is. */
  sync_reason: string | null;
  /** The rev of the stored records; null if no records have been stored yet. */
  rev: string | null;
  /** The CID of the MST root of the stored records; null if rev is null. */
  data: string | null;
  /** The hosting status as sent upstream; active or inactive if upstream sent no status. */
  hosting_status: string;
  /** True if the repo is taken down locally. */
  takedown: boolean;
  /** True if atproto.records shows its records: active upstream, no local takedown. */
  visible: boolean;
  /** Failed resyncs and repeated desynchronizations since the repo last settled. */
  resync_attempts: number;
  /** When the next resync may start; null: immediately; infinity: parked until an event unparks the repo. */
  next_attempt_at: DateOrInfinity | null;
  /** Why the last fetch failed: last_failure, with details for people. Null if it did not fail. */
  last_error: string | null;
  /** When the repo last became synchronized; null if never. */
  synchronized_at: Date | null;
  /** When this row was last updated. */
  updated_at: Date;
  /** The bucket of the DID, as atproto.bucket_of returns it. On a cluster, a query that compares it with a
   * constant reads one shard. */
  bucket: number;
  /** Since when the relay has said that it does not pass on the account, for a trouble of its own that
   * hosting_status names, such as throttled. The records stay visible, and may be outdated. Null: it does not
   * say so. */
  withheld_since: Date | null;
  /** Why the last fetch failed, as one of a closed set (docs/reasons.md); null if it did not fail. */
  last_failure: string | null;
}

/** The collections that are stored, with the progress of their backfill. Reads the row of every repo. */
export interface ScopeProgress {
  /** The pattern: an NSID, the beginning of one with .*, or *. */
  collection: string;
  /** The version of the scope that added the collection. */
  added_in: Int8;
  /** True if the latest change of the scope added the collection. */
  newest: boolean;
  /** The number of tracked repos of active accounts. */
  repos: Int8;
  /** The number of those repos of which all records of the collection are stored. A repo without such records
   * counts, too, once this is known. */
  complete: Int8;
}

/** All views by name, for example for Kysely. */
export interface Views {
  "atproto.blobs": Blob;
  "atproto.changes": Change;
  "atproto.cursors": Cursor;
  "atproto.gaps": Gap;
  "atproto.hosts": Host;
  "atproto.link_progress": LinkProgress;
  "atproto.links": Link;
  "atproto.readers": Reader;
  "atproto.records": Record;
  "atproto.rejected": RejectedMessage;
  "atproto.repos": Repo;
  "atproto.scope_progress": ScopeProgress;
}
