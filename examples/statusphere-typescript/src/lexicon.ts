// The record type of Statusphere: one emoji, and when the account chose it. An app with more lexicons would generate
// this file with `lex build`, which comes with @atproto/lex.
import { l } from '@atproto/lex'

export const COLLECTION = 'xyz.statusphere.status'

export const Status = l.record(
  'any',
  COLLECTION,
  l.object({
    status: l.string({ minLength: 1, maxGraphemes: 1, maxLength: 32 }),
    createdAt: l.string({ format: 'datetime' }),
  }),
)
