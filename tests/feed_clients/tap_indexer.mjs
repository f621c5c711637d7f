// Runs the indexer of @atproto/tap, unchanged, against a server, and prints each event as a line of JSON.
// Usage: node tap_indexer.mjs URL PASSWORD [RKEY]: events of records with this key are refused.
import { SimpleIndexer, Tap } from '@atproto/tap'

const [url, adminPassword, refused] = process.argv.slice(2)
const print = (line) => process.stdout.write(`${JSON.stringify(line)}\n`)

const tap = new Tap(url, adminPassword ? { adminPassword } : {})
const indexer = new SimpleIndexer()
indexer.record(async (event) => {
  if (event.rkey === refused) throw new Error('refused')
  print(event)
})
indexer.identity(async (event) => print(event))
indexer.error((error) => print({ error: `${error.message}: ${error.cause?.message ?? ''}` }))

const channel = tap.channel(indexer, {
  maxReconnectSeconds: 1,
  onReconnectError: (error) => print({ reconnecting: String(error) }),
})
channel.start().then(
  () => print({ ended: true }),
  (error) => print({ failed: String(error) }),
)

// Commands on standard input, one per line: a method of the client and its argument.
let rest = ''
for await (const chunk of process.stdin) {
  const lines = (rest + chunk).split('\n')
  rest = lines.pop()
  for (const line of lines) {
    const [method, argument] = JSON.parse(line)
    try {
      print({ method, result: (await tap[method](argument)) ?? null })
    } catch (error) {
      print({ method, failed: error.message })
    }
  }
}
