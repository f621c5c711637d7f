// TypeScript types of the public views of the indexer (schema `atproto`). Generated from the database: do not edit.
// Copy this file into your project. The types are those of the values that node-postgres returns.

/** A bigint, which node-postgres returns as text, because a number of JavaScript has only 53 bits. */
export type Int8 = string;

/** A value of type jsonb. */
export type Json = null | boolean | number | string | Json[] | { [key: string]: Json };

/** A time that may be infinity, which node-postgres returns as the number Infinity. */
export type DateOrInfinity = Date | number;

/** A row for each reference to a blob in the value of a visible record. Indexed by did, and by (did, collection,
 * rkey); without did, it reads all records. The PDS has the bytes. */
export interface Blob {
  /** The DID of the repo. */
  did: string;
  /** The CID of the blob. */
  cid: string;
  /** The MIME type that the record states; null if none. */
  mime_type: string | null;
  /** The size in bytes that the record states; null if none. */
  size: Int8 | null;
  /** The NSID of the collection. */
  collection: string;
  /** The record key. */
  rkey: string;
  /** The AT-URI of the record. */
  uri: string;
  /** The bucket of the DID. Queries on a cluster compare it with atproto.bucket_of($1). */
  bucket: number;
}

/** The change log, in commit order. Consumers use next_changes or changes_after, which use an index. */
export interface Change {
  /** The number: a snapshot that shows it shows all smaller ones. Numbers may be missing. */
  seq: Int8;
  /** The DID of the repo. */
  did: string;
  /** The NSID of the collection; null for a change of the repo. */
  collection: string | null;
  /** The record key; null for a change of the repo. */
  rkey: string | null;
  /** Of a record: create, update, delete. Of a repo: hidden, visible, deleted, identity, moved, snapshot,
   * completed. */
  action: string;
  /** The CID of the new record; null for a delete and for a change of the repo. */
  cid: string | null;
  /** The rev of the commit, or of the export in which a resync found the change; null for an erased record or one
   * outside the scope, and a repo without rev. */
  rev: string | null;
  /** False for snapshot and completed, and for differences found by a resync. */
  live: boolean;
  /** When the change was committed here: equal within a transaction, later for later ones. */
  time: Date;
}

/** The stream position per relay and shard. */
export interface Cursor {
  /** The URL of the relay. */
  relay: string;
  /** The shard of the process, as index/count. */
  shard: string;
  /** All effects of messages up to this seq are stored. */
  seq: Int8;
  /** The time in that message; null if it has none. */
  event_time: string | null;
  /** When the cursor was last saved. */
  updated_at: Date;
  /** Everything until this time is stored. Null if not known. */
  caught_up_at: Date | null;
}

/** Spans of a stream in which messages may have been missed. While one is open, repos of its shard may be
 * outdated. */
export interface Gap {
  /** The URL of the relay. */
  relay: string;
  /** The shard of the process, as index/count. */
  shard: string;
  /** Why messages may have been missed (docs/reasons.md). */
  reason: string;
  /** When the gap was noticed. */
  opened_at: Date;
  /** The first seq that may be missing; null if not known. */
  first_seq: Int8 | null;
  /** The last seq that may be missing; null if not known. */
  last_seq: Int8 | null;
  /** When every affected repo was found equal or desynchronized; null if open. */
  closed_at: Date | null;
  /** The host whose repo list closed the gap, or the URL of the relay whose stream covered it. */
  closed_by: string;
}

/** Hosts that relays list, or that were asked for exports, identities and handles. Requests to them, and what
 * their own repo lists showed when they were last read to the end. */
export interface Host {
  /** The host name, with a port other than the default one. */
  host: string;
  /** Requests sent. */
  requests: Int8;
  /** Requests without response, or with a server error. */
  failures: Int8;
  /** Failures since the last response. */
  failures_in_a_row: number;
  /** No requests are sent until then; null if not paused. */
  paused_until: Date | null;
  /** throttled: the host asked for it; host-paused: too many failures. Null if not paused. */
  pause_reason: string | null;
  /** The latest failure, beginning with a reason of docs/reasons.md. Null if none. */
  last_error: string | null;
  /** When a request last succeeded; null if never. */
  last_success_at: Date | null;
  /** When the request statistics were last updated; null without requests. */
  updated_at: Date | null;
  /** Accounts that the host lists as active; null if its list was never read. */
  accounts: Int8 | null;
  /** Accounts that the host lists as inactive. */
  inactive_accounts: Int8;
  /** Listed active accounts without a known identity that names this host. The list does not add them. */
  unproven_accounts: Int8;
  /** Listed active accounts that are tracked, and whose identities name this host. */
  repos: Int8;
  /** Accounts of repos that were synchronized. */
  synchronized_repos: Int8;
  /** Accounts of repos that relays withhold, omit (more repos than accounts at any relay), or bring late. */
  accounts_not_passed_on: Int8;
  /** The time in the newest stored rev of repos, by the clocks of accounts. */
  last_commit_at: Date;
  /** When the last complete reading of the list began. */
  list_began_at: Date;
  /** When it ended. */
  list_ended_at: Date;
  /** Why the last reading of the list failed; null if it did not. */
  list_error: string | null;
}

/** The state of links, in one row. */
export interface LinkProgress {
  /** off; backfill: links of stored records are being added; complete. */
  state: string;
  /** 256 if complete, otherwise 0. */
  buckets_done: number;
  /** 256 if links are on, otherwise 0. */
  buckets: number;
  /** Repos whose links the backfill added. */
  repos_done: Int8;
  /** When INDEXER_LINKS was turned on; null if off. */
  enabled_at: Date | null;
  /** When the backfill was completed; null if it is not. */
  completed_at: Date | null;
  /** The number of the last change that links contain; null if off. A record that changed again may be shown as
   * it is later. */
  seq: Int8 | null;
}

/** A row for each visible record, path and target. Incomplete until link_progress says complete. Indexed by
 * (target, collection, path, did, rkey) and by (did, collection, rkey). */
export interface Link {
  /** The AT-URI or the DID, as in the record. */
  target: string;
  /** strong-ref: the member uri of an object with a text cid; at-uri: another AT-URI; did. */
  target_kind: string;
  /** The DID of the repo. */
  did: string;
  /** The NSID of the collection. */
  collection: string;
  /** The record key. */
  rkey: string;
  /** The place in the value: .name of a member, [] of an array element, [type] of an element with this $type. */
  path: string;
  /** The bucket of the DID. Queries on a cluster compare it with atproto.bucket_of($1). */
  bucket: number;
}

/** Registered consumers of the change log. */
export interface Reader {
  /** The name of the consumer. */
  name: string;
  /** The seq of the last change that it received. */
  seq: Int8;
  /** The latest seq minus that of the consumer. */
  behind: Int8;
  /** When the first change that it lacks was committed; null if none. */
  behind_since: Date | null;
  /** When it was registered. */
  registered_at: Date;
  /** When it last asked for changes or was registered. */
  seen_at: Date;
  /** When it was disconnected for being too far behind; null if not. */
  cut_off_at: Date | null;
  /** The role that may use and remove it. */
  owner: string;
}

/** The records of visible repos. Indexed by (did, collection, rkey) and by (collection, indexed_at). */
export interface Record {
  /** The DID of the repo. */
  did: string;
  /** The NSID of the collection. */
  collection: string;
  /** The record key. */
  rkey: string;
  /** The AT-URI of the record. */
  uri: string;
  /** The CID of the DAG-CBOR encoding. */
  cid: string;
  /** The rev of the commit or export that it came with. */
  rev: string;
  /** The record as AT Protocol JSON. Null if value_problem says why. */
  value: Json;
  /** Why value is null or differs from the original (docs/reasons.md); null: no problem. */
  value_problem: string | null;
  /** When it was last written here, by the clock of the server. */
  indexed_at: Date;
  /** The bucket of the DID. Queries on a cluster compare it with atproto.bucket_of($1). */
  bucket: number;
  /** The proof with which it was written: commit, export or range (docs/protocol.md#sparse-resync). Null:
   * unknown. */
  proof: string | null;
  /** When it was first stored here, or an earlier imported time; updates do not change it. Of a record that an
   * earlier release stored: when that last wrote it. */
  first_seen: Date;
  /** True if found live, false if by a resync, as in atproto.changes; null: unknown. What an earlier release
   * stored: how that wrote it last. */
  first_seen_live: boolean | null;
  /** createdAt if it is a datetime before first_seen; otherwise first_seen. */
  sort_at: Date;
}

/** Dead letters: the newest 1,000 rejected messages per relay and reason, including forged ones. */
export interface RejectedMessage {
  /** The ID of the dead letter. */
  id: Int8;
  /** The URL of the relay. */
  relay: string;
  /** The sequence number; null if unreadable. */
  seq: Int8 | null;
  /** The DID that the message names, perhaps forged; null if unreadable. */
  did: string | null;
  /** The kind of message. */
  kind: string;
  /** The rule that the message broke (docs/reasons.md). */
  reason: string;
  /** When the message was rejected. */
  time: Date;
}

/** The hosts that each relay consumes, and the accounts of them that it withholds. */
export interface RelayHost {
  /** The URL of the relay. */
  relay: string;
  /** The host name, as in atproto.hosts. */
  host: string;
  /** Accounts of the host at the relay by its own word, those included that it withholds; null if it does not
   * say. */
  accounts: Int8 | null;
  /** The status of the host at the relay: active, idle, offline, throttled, banned, or as sent; null if none. */
  status: string | null;
  /** Tracked accounts that the relay withheld when the list of the host was last read; null if it never was. */
  withheld_accounts: Int8 | null;
  /** The same by the status that the relay gives as its reason: a JSON object; null if there are none. */
  withheld_by_status: Json;
  /** When the relay last listed the host. */
  listed_at: Date;
}

/** Every tracked repo. Indexed by did; other conditions scan the whole table. */
export interface Repo {
  /** The DID of the account. */
  did: string;
  /** The verified handle. handle.invalid if verification failed; null if not checked yet. */
  handle: string | null;
  /** The base URL of the PDS; null if it is not known. */
  pds: string | null;
  /** desynchronized, in-progress, or synchronized. */
  sync_status: string;
  /** Why the repo is not synchronized (docs/reasons.md); null if it is. */
  sync_reason: string | null;
  /** The rev of the stored records; null if none. */
  rev: string | null;
  /** The CID of their MST root; null if none. */
  data: string | null;
  /** The hosting status as sent upstream, otherwise active or inactive. */
  hosting_status: string;
  /** True after a local takedown. */
  takedown: boolean;
  /** True if active upstream and without local takedown. */
  visible: boolean;
  /** Failed resyncs and repeated desynchronizations since the repo last settled. */
  resync_attempts: number;
  /** When the next resync may start; null: now; infinity: when an event unparks the repo. */
  next_attempt_at: DateOrInfinity | null;
  /** last_failure, with details. Null if the last fetch did not fail. */
  last_error: string | null;
  /** When the repo last became synchronized; null if never. */
  synchronized_at: Date | null;
  /** When this row was last updated. */
  updated_at: Date;
  /** The bucket of the DID. Queries on a cluster compare it with atproto.bucket_of($1). */
  bucket: number;
  /** Since when the relay does not pass on the account, for a reason of its own; null if it does. Records may be
   * outdated, unless sync_status is synchronized: then the stream of the host is read. */
  withheld_since: Date | null;
  /** Why the last fetch failed (docs/reasons.md); null if it did not fail. */
  last_failure: string | null;
  /** All writes before this time are stored (docs/protocol.md#firehose-and-jetstream-compared). Null: it is not
   * known, or the repo is not synchronized. */
  complete_at: Date | null;
}

/** The collections to store, with the progress of their backfill. Reads the row of every repo. */
export interface ScopeProgress {
  /** An NSID, the beginning of one with .*, or *. */
  collection: string;
  /** The version of the scope that added it. */
  added_in: Int8;
  /** True if the latest version of the scope added it. */
  newest: boolean;
  /** Tracked repos of active accounts. */
  repos: Int8;
  /** The repos whose records of the collection are all stored, or known not to exist. */
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
  "atproto.relay_hosts": RelayHost;
  "atproto.repos": Repo;
  "atproto.scope_progress": ScopeProgress;
}
