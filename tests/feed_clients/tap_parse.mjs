// Parses each line of standard input as @atproto/tap parses an event, and prints why it refuses it, or null.
// Usage: node tap_parse.mjs
import { createInterface } from 'node:readline'
import { lexParse } from '@atproto/lex'
import { parseTapEvent } from '@atproto/tap'

for await (const line of createInterface({ input: process.stdin })) {
  let refused = null
  try {
    parseTapEvent(lexParse(JSON.parse(line), { strict: true }))
  } catch (error) {
    refused = error.message
  }
  process.stdout.write(`${JSON.stringify({ refused })}\n`)
}
