// The tables of the app. Each event is applied by one statement, which is a transaction: when `apply` returns, the
// effect is on the disk. To apply an event again changes nothing, because the feed may deliver it more than once.
import { DatabaseSync } from 'node:sqlite'
import type { IdentityEvent, RecordEvent, TapEvent } from '@atproto/tap'
import { COLLECTION, Status } from './lexicon.ts'

const INVALID_HANDLE = 'handle.invalid'

const SCHEMA = `
  pragma journal_mode = wal;

  create table if not exists account (
    did text primary key,
    handle text, -- null: not verified
    active integer not null
  ) strict;

  create table if not exists status (
    did text not null,
    rkey text not null,
    status text not null,
    created_at text not null, -- in UTC with six digits after the second, so that the order is that of the times
    primary key (did, rkey)
  ) strict;
  create index if not exists status_by_time on status (did, created_at desc, rkey desc);
`

const PUT_ACCOUNT = `
  insert into account (did, handle, active) values (?, ?, ?)
  on conflict do update set handle = excluded.handle, active = excluded.active
`
const PUT_STATUS = `
  insert into status (did, rkey, status, created_at) values (?, ?, ?, ?)
  on conflict do update set status = excluded.status, created_at = excluded.created_at
`
const DELETE_STATUS = 'delete from status where did = ? and rkey = ?'

/** The statuses of active accounts. An account without an event of its own is active. */
const VISIBLE = 'status left join account using (did) where coalesce(active, 1)'
const LATEST = `
  select did, handle, rkey, status, created_at from (
    select *, row_number() over (partition by did order by created_at desc, rkey desc) as number from ${VISIBLE}
  ) where number = 1 order by created_at desc, did
`
const COUNTS = `select status, count(*) as count from ${VISIBLE} group by status order by count desc, status`

export type ShownStatus = { did: string; handle: string | null; status: string; createdAt: string; uri: string }
export type Count = { status: string; count: number }

export class Store {
  readonly #database: DatabaseSync

  constructor(path: string) {
    this.#database = new DatabaseSync(path)
    this.#database.exec(SCHEMA)
  }

  apply(event: TapEvent): void {
    if (event.type === 'identity') this.#applyIdentity(event)
    else if (event.collection === COLLECTION) this.#applyRecord(event)
  }

  #applyIdentity({ did, handle, isActive }: IdentityEvent): void {
    this.#run(PUT_ACCOUNT, did, handle === INVALID_HANDLE ? null : handle, Number(isActive))
  }

  /** Store what the record is now. A record that does not fit the lexicon is not shown, so it counts as deleted. */
  #applyRecord({ did, rkey, record }: RecordEvent): void {
    const checked = Status.safeValidate(record)
    if (checked.success) {
      const { status, createdAt } = checked.value
      this.#run(PUT_STATUS, did, rkey, status, inUtc(createdAt))
    } else {
      this.#run(DELETE_STATUS, did, rkey)
    }
  }

  /** Return the latest status of each account, newest first. */
  latestStatuses(): ShownStatus[] {
    return this.#database.prepare(LATEST).all().map((row) => ({
      did: String(row['did']),
      handle: row['handle'] === null ? null : String(row['handle']),
      status: String(row['status']),
      createdAt: `${String(row['created_at']).slice(0, 23)}Z`,
      uri: `at://${row['did']}/${COLLECTION}/${row['rkey']}`,
    }))
  }

  /** Return how many statuses there are of each kind, the most frequent first. */
  counts(): Count[] {
    return this.#database.prepare(COUNTS).all().map((row) => ({
      status: String(row['status']),
      count: Number(row['count']),
    }))
  }

  close(): void {
    this.#database.close()
  }

  #run(statement: string, ...values: (string | number | null)[]): void {
    this.#database.prepare(statement).run(...values)
  }
}

/** Return a datetime of a record in UTC with six digits after the second. `Date` has only three. */
function inUtc(datetime: string): string {
  const fraction = /\.(\d+)/.exec(datetime)?.[1] ?? ''
  return `${new Date(datetime).toISOString().slice(0, 19)}.${fraction.padEnd(6, '0').slice(0, 6)}Z`
}
