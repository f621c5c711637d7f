// Write every lexicon of the package @atproto/api to the directory that the argument names, one file each.
import { mkdirSync, writeFileSync } from 'node:fs'
import { schemas } from './node_modules/@atproto/api/dist/client/lexicons.js'

const directory = process.argv[2]
mkdirSync(directory, { recursive: true })
// The generated code marks references with `lex:`, which the lexicons themselves do not have.
for (const schema of schemas) writeFileSync(`${directory}/${schema.id}.json`, JSON.stringify(schema).replaceAll('"lex:', '"'))
