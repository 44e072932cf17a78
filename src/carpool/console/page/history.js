// What the server remembers of one model, as counts that only grow, and what happened between two of the points.

import { difference } from "./histogram.js";

const KEPT_S = 970; // 15 minutes, and a minute before the first of them
const MOST_POINTS = 300; // of a line: more than this cannot be told apart
const HISTOGRAMS = { request: "latency", queue: "queue", infer: "infer", batch: "batch", first: "first_token" };
const WORDS = { failures: "failed", sheds: "rejected" };

export class History {
  #bounds;
  #samples = [];

  constructor(bounds) {
    this.#bounds = bounds;
  }

  /** The next second: when it ended, how long it was, and what happened to this model, or null. */
  add(clock, seconds, happened) {
    const last = this.#samples.at(-1);
    if (last && clock <= last.clock) return;
    if (!last) this.#samples.push({ clock: clock - seconds, counts: nothing(this.#bounds) });
    this.#samples.push({ clock, counts: plus(this.#samples.at(-1).counts, happened) });
    const oldest = clock - KEPT_S;
    const first = this.#samples.findIndex((sample) => sample.clock >= oldest);
    if (first > 0) this.#samples.splice(0, first);
  }

  /** When the last point was taken that is not after `end`; null without any. */
  clock(end = Infinity) {
    return this.#samples[this.#at(end)]?.clock ?? null;
  }

  get first() {
    return this.#samples[0]?.clock ?? null;
  }

  /** What happened in the `seconds` before `end`; null until there are two samples. */
  window(seconds, end = Infinity) {
    return this.#windowAt(this.#at(end), seconds);
  }

  /** Points over the `span` seconds before `end`: how long before it, and `read` of the window that ends there. */
  series(span, seconds, read, end = Infinity) {
    const last = this.#at(end);
    const clock = this.#samples[last]?.clock ?? 0;
    const points = [];
    const step = Math.max(1, Math.ceil(span / MOST_POINTS));
    for (let index = last; index >= 1; index -= step) {
      const age = clock - this.#samples[index].clock;
      if (age > span) break;
      points.push({ age, value: read(this.#windowAt(index, Math.max(seconds, step))) });
    }
    return points.reverse();
  }

  #at(end) {
    let index = this.#samples.length - 1;
    while (index > 0 && this.#samples[index].clock > end) index -= 1;
    return index;
  }

  #windowAt(index, seconds) {
    if (index < 1) return null;
    const to = this.#samples[index];
    let from = index - 1;
    while (from > 0 && to.clock - this.#samples[from].clock < seconds - 0.25) from -= 1;
    return between(this.#samples[from], to);
  }
}

function nothing(bounds) {
  const empty = (name) => ({ buckets: new Array(bounds[name === "batch" ? "batch" : "seconds"].length + 1).fill(0), sum: 0 });
  const counts = { failures: {}, sheds: {}, pending: 0, saturation: 0, tokens: 0, slots: null };
  for (const name of Object.keys(HISTOGRAMS)) counts[name] = empty(name);
  return counts;
}

/** The counts a second later. Most of it stays the same, and is shared. */
function plus(counts, happened) {
  const point = happened ?? {};
  const next = { ...counts, pending: point.pending ?? 0, saturation: point.saturation ?? 0, slots: point.slots ?? counts.slots };
  if (counts.slots && !point.slots) next.slots = [0, counts.slots[1]];
  next.tokens += point.tokens ?? 0;
  for (const [name, theirs] of Object.entries(HISTOGRAMS)) {
    const more = point[theirs];
    if (!more) continue;
    const buckets = [...counts[name].buckets];
    for (const [index, count] of Object.entries(more.buckets)) buckets[index] += count;
    next[name] = { buckets, sum: counts[name].sum + more.sum };
  }
  for (const [name, theirs] of Object.entries(WORDS)) {
    if (!point[theirs]) continue;
    next[name] = { ...counts[name] };
    for (const [word, count] of Object.entries(point[theirs])) next[name][word] = (next[name][word] ?? 0) + count;
  }
  return next;
}

/** The difference of two samples; gauges are those of the later one. */
export function between(earlier, later) {
  const [a, b] = [earlier.counts, later.counts];
  const result = { from: earlier.clock, to: later.clock, seconds: later.clock - earlier.clock, pending: b.pending, saturation: b.saturation };
  for (const name of Object.keys(HISTOGRAMS)) {
    const same = a[name] === b[name];
    result[name] = { buckets: same ? a[name].buckets.map(() => 0) : difference(b[name].buckets, a[name].buckets), sum: b[name].sum - a[name].sum };
  }
  for (const name of Object.keys(WORDS)) result[name] = wordDifference(b[name], a[name]);
  result.ok = result.request.buckets.reduce((sum, count) => sum + count, 0);
  result.text = b.slots ? { used: b.slots[0], tokens: b.tokens - a.tokens, first: result.first } : null;
  return result;
}

export const sumOf = (words) => Object.values(words).reduce((sum, count) => sum + count, 0);

function wordDifference(later, earlier) {
  const found = {};
  for (const [word, count] of Object.entries(later)) {
    const more = count - (earlier[word] ?? 0);
    if (more > 0) found[word] = more;
  }
  return found;
}
