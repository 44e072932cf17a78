// The last two minutes of one model's counters, and what happened between two of the samples.

import { difference } from "./histogram.js";

const KEPT_S = 190; // two minutes to draw, and a minute before the first of them
const HISTOGRAMS = ["request", "queue", "infer", "batch"];
const WORDS = ["failures", "sheds"];

export class History {
  #samples = [];

  add(clock, counts) {
    const last = this.#samples.at(-1);
    if (last && (clock <= last.clock || hasFallen(last.counts, counts))) {
      if (clock === last.clock) return; // the same page twice
      this.#samples = []; // loaded anew, so it counts from nothing
    }
    this.#samples.push({ clock, counts });
    const oldest = clock - KEPT_S;
    const first = this.#samples.findIndex((sample) => sample.clock >= oldest);
    if (first > 0) this.#samples.splice(0, first);
  }

  get latest() {
    return this.#samples.at(-1) ?? null;
  }

  /** What happened in the last `seconds`; null until there are two samples. */
  window(seconds) {
    return this.#windowAt(this.#samples.length - 1, seconds);
  }

  /** A point for each sample of the last `span` seconds: how long ago, and `read` of the window that ends there. */
  series(span, seconds, read) {
    const end = this.latest?.clock ?? 0;
    const points = [];
    for (let index = 1; index < this.#samples.length; index += 1) {
      const age = end - this.#samples[index].clock;
      if (age <= span) points.push({ age, value: read(this.#windowAt(index, seconds)) });
    }
    return points;
  }

  #windowAt(index, seconds) {
    if (index < 1) return null;
    const to = this.#samples[index];
    let from = index - 1;
    while (from > 0 && to.clock - this.#samples[from].clock < seconds - 0.25) from -= 1;
    return between(this.#samples[from], to);
  }
}

/** The difference of two samples; gauges are those of the later one. */
export function between(earlier, later) {
  const [a, b] = [earlier.counts, later.counts];
  const result = {
    seconds: later.clock - earlier.clock,
    ok: b.ok - a.ok,
    pending: b.pending,
    saturation: b.saturation,
  };
  for (const name of HISTOGRAMS) {
    result[name] = { buckets: difference(b[name].buckets, a[name].buckets), sum: b[name].sum - a[name].sum };
  }
  for (const name of WORDS) result[name] = wordDifference(b[name], a[name]);
  result.text = a.text && b.text ? written(a.text, b.text) : null;
  return result;
}

/** Of a model that writes. */
function written(a, b) {
  return { used: b.used, tokens: b.tokens - a.tokens, first: { buckets: difference(b.first.buckets, a.first.buckets) } };
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

function hasFallen(before, after) {
  const words = (after.text?.tokens ?? 0) < (before.text?.tokens ?? 0);
  return words || after.ok < before.ok || after.batch.sum < before.batch.sum || sumOf(after.sheds) < sumOf(before.sheds);
}
