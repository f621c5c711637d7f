// Receives the events of the feed, and acknowledges each one after it was stored.
import type { HandlerOpts, TapEvent, TapHandler } from '@atproto/tap'
import type { Store } from './store.ts'

export class StoreHandler implements TapHandler {
  readonly #store: Store

  constructor(store: Store) {
    this.#store = store
  }

  onEvent(event: TapEvent, { ack }: HandlerOpts): void {
    this.#store.apply(event)
    // Not awaited: if the connection ends now, the client sends the acknowledgement after it has connected again, but
    // it connects again only after this function has returned.
    void ack()
  }

  /** An event that could not be stored was not acknowledged. It comes again within a minute or two. */
  onError(error: Error): void {
    console.error(`feed: ${error.message}: ${error.cause instanceof Error ? error.cause.message : 'unknown cause'}`)
  }
}
