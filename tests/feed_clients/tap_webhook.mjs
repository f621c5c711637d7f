// A webhook as the README of @atproto/tap shows it. It answers 500 to the first FAILURES requests, and prints events.
// Usage: node tap_webhook.mjs PASSWORD FAILURES
import { createServer } from 'node:http'
import { assureAdminAuth, parseTapEvent } from '@atproto/tap'
import { lexParse } from '@atproto/lex-json'

const [password, failures] = process.argv.slice(2)
const print = (line) => process.stdout.write(`${JSON.stringify(line)}\n`)
let left = Number(failures)

const server = createServer(async (request, response) => {
  const answer = (status) => response.writeHead(status).end()
  try {
    assureAdminAuth(password, request.headers.authorization)
  } catch {
    return answer(401)
  }
  let body = ''
  for await (const chunk of request) body += chunk
  if (left-- > 0) return answer(500)
  try {
    print(parseTapEvent(lexParse(body, { strict: true })))
    return answer(200)
  } catch (error) {
    print({ error: error.message })
    return answer(500)
  }
})
server.listen(0, '127.0.0.1', () => print({ url: `http://127.0.0.1:${server.address().port}/webhook` }))
