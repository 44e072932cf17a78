// Asks for the live document once a second while somebody can see it, and more and more slowly while nobody answers.

import { keyed } from "./key.js";

const EVERY_MS = 1000;
const SLOWEST_MS = 8000;
const PATIENCE_MS = 5000;

/**
 * `query` is asked what to add to each request; `onDocument` gets each document; `onLost` is told how often in a row
 * there was none, and with which status if any. Returns a function that asks at once.
 */
export function poll(query, onDocument, onLost) {
  let timer = null;
  let failures = 0;
  let asking = false;

  const later = (ms) => {
    clearTimeout(timer);
    timer = document.hidden ? null : setTimeout(ask, ms);
  };

  async function ask() {
    if (asking) return;
    asking = true;
    const started = performance.now();
    let found = null;
    let status = 0;
    try {
      const signal = AbortSignal.timeout(PATIENCE_MS);
      const response = await fetch(`/console/live${query()}`, { cache: "no-store", headers: keyed(), signal });
      status = response.status;
      if (response.ok) found = await response.json();
    } catch {
      found = null;
    }
    asking = false;
    failures = found ? 0 : failures + 1;
    if (found) onDocument(found);
    else onLost(failures, status);
    const pause = found ? EVERY_MS : Math.min(SLOWEST_MS, EVERY_MS * 2 ** (failures - 1));
    later(Math.max(50, pause - (performance.now() - started)));
  }

  document.addEventListener("visibilitychange", () => later(0));
  ask();
  return () => later(0);
}
