// The web page, and the same content as JSON.
import { createServer, type Server } from 'node:http'
import type { Count, ShownStatus, Store } from './store.ts'

export function createWebServer(store: Store): Server {
  return createServer((request, response) => {
    const answer = (status: number, type: string, body: string) =>
      response.writeHead(status, { 'content-type': `${type}; charset=utf-8` }).end(body)
    const path = request.url?.split('?')[0]
    if (request.method !== 'GET') answer(405, 'text/plain', 'only GET is supported\n')
    else if (path === '/') answer(200, 'text/html', page(store.latestStatuses(), store.counts()))
    else if (path === '/statuses.json') answer(200, 'application/json', json(store.latestStatuses(), store.counts()))
    else answer(404, 'text/plain', 'not found\n')
  })
}

function json(statuses: ShownStatus[], counts: Count[]): string {
  return JSON.stringify({ statuses, counts })
}

function page(statuses: ShownStatus[], counts: Count[]): string {
  const rows = statuses.map(
    ({ did, handle, status, createdAt }) =>
      `<li>${escapeHtml(status)} <b>${escapeHtml(handle ?? did)}</b> <small>${escapeHtml(createdAt)}</small></li>`,
  )
  return `<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="refresh" content="5">
<title>Statusphere</title>
<h1>Statusphere</h1>
<p>${counts.map(({ status, count }) => `${escapeHtml(status)} ${count}`).join(' · ')}</p>
<ul>
${rows.join('\n')}
</ul>
</html>
`
}

function escapeHtml(text: string): string {
  return text.replaceAll('&', '&amp;').replaceAll('<', '&lt;').replaceAll('>', '&gt;').replaceAll('"', '&quot;')
}
