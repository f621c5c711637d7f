// The AppView: follow the feed of an indexer, and serve the statuses on loopback. Environment variables:
//
//     INDEXER_URL               the HTTP server of the indexer, which has the role feed
//     INDEXER_ADMIN_PASSWORD    its password, if it has one
//     PORT                      the port to serve at
//     DATA_DIR                  the directory of the database of this app
import { join } from 'node:path'
import { Tap } from '@atproto/tap'
import { StoreHandler } from './handler.ts'
import { Store } from './store.ts'
import { createWebServer } from './web.ts'

const MAX_RECONNECT_SECONDS = 5

const { INDEXER_URL = 'http://127.0.0.1:2580', INDEXER_ADMIN_PASSWORD, PORT = '2475', DATA_DIR = '.' } = process.env

const store = new Store(join(DATA_DIR, 'statusphere.sqlite'))
const server = createWebServer(store).listen(Number(PORT), '127.0.0.1')
const tap = new Tap(INDEXER_URL, INDEXER_ADMIN_PASSWORD ? { adminPassword: INDEXER_ADMIN_PASSWORD } : {})
const channel = tap.channel(new StoreHandler(store), {
  maxReconnectSeconds: MAX_RECONNECT_SECONDS,
  onReconnectError: (error) => console.error(`feed: no connection (${codeOf(error)}), trying again`),
})

let stopping = false
server.once('error', (error) => {
  console.error(`page: ${error.message}`)
  process.exit(1)
})
for (const signal of ['SIGINT', 'SIGTERM'] as const) {
  process.once(signal, () => {
    stopping = true
    void channel.destroy()
  })
}

try {
  await channel.start() // until it is destroyed, or until the indexer refuses the connection
} catch (error) {
  console.error(`feed: ${String(error)}`)
}
server.close()
server.closeAllConnections()
store.close()
process.exitCode = stopping ? 0 : 1

function codeOf(error: unknown): string {
  return String(error instanceof Error && 'code' in error ? error.code : error)
}
