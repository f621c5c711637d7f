// Reads public views with node-postgres and the generated types. A test compiles it strictly; another one runs it, and
// checks that each column has a value of the type that is declared for it.
// Usage: node public_schema.ts CONNECTION_AS_JSON VIEW...
import pg from 'pg'
import type { Change, Int8, Json, Record as StoredRecord, Repo, Views } from '../../examples/public_schema/atproto.ts'

async function select<View extends keyof Views>(client: pg.ClientBase, view: View): Promise<Views[View][]> {
  const { rows } = await client.query<Views[View]>(`select * from ${view}`)
  return rows
}

/** What an application does with rows. */
async function summarize(client: pg.ClientBase): Promise<string> {
  const [repos, records, changes] = [
    await select(client, 'atproto.repos'),
    await select(client, 'atproto.records'),
    await select(client, 'atproto.changes'),
  ]
  const handles = new Map<string, string | null>(repos.map((repo: Repo) => [repo.did, repo.handle]))
  const texts = records.map(
    (record: StoredRecord): string => `${handles.get(record.did) ?? record.did}: ${textOf(record.value)}`,
  )
  const newest: Int8 | undefined = changes.at(-1)?.seq
  const latest: number = Math.max(...changes.map((change: Change) => change.time.getTime()))
  return `${texts.join(', ')}; change ${BigInt(newest ?? 0)} in ${new Date(latest).getFullYear()}`
}

/** What the compiler must refuse. It is not called. */
export function mistakes(client: pg.ClientBase, change: Change, repo: Repo): unknown[] {
  return [
    // @ts-expect-error a bigint is text, so arithmetic needs BigInt
    change.seq - 1,
    // @ts-expect-error the collection may be null
    change.collection.length,
    // @ts-expect-error the time may be infinity, which is a number
    repo.next_attempt_at?.getTime(),
    // @ts-expect-error there is no such column
    change.record,
    // @ts-expect-error there is no such view
    select(client, 'atproto.nothing'),
  ]
}

function textOf(value: Json): string {
  return typeof value === 'object' && value !== null && !Array.isArray(value) ? String(value['text']) : ''
}

/** The name of a type as the generated file writes it. */
function typeOf(value: unknown): string {
  if (value === null) return 'null'
  return value instanceof Date ? 'Date' : Array.isArray(value) ? 'array' : typeof value
}

const [connection = '{}', ...views] = process.argv.slice(2)
const client = new pg.Client(JSON.parse(connection) as pg.ClientConfig)
await client.connect()
const types: { [view: string]: { [column: string]: string }[] } = {}
for (const view of views as (keyof Views)[]) {
  const rows = await select(client, view)
  types[view] = rows.map((row) => Object.fromEntries(Object.entries(row).map(([name, value]) => [name, typeOf(value)])))
}
console.log(JSON.stringify({ types, summary: await summarize(client) }))
await client.end()
