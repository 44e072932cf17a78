// Histograms as the server counts them: `buckets[i]` is what fell between bounds[i - 1] and bounds[i],
// and the last bucket is everything above the last bound.

export const total = (buckets) => buckets.reduce((sum, count) => sum + count, 0);

export const difference = (later, earlier) => later.map((count, index) => count - earlier[index]);

/**
 * The value below which the share `q` of the observations lies, interpolated inside its bucket.
 * Null without observations; `beyond` when it is only known to be above the last bound.
 */
export function quantile(buckets, bounds, q) {
  const all = total(buckets);
  if (!(all > 0)) return null;
  const wanted = q * all;
  let below = 0;
  for (let index = 0; index < bounds.length; index += 1) {
    const here = buckets[index];
    if (here > 0 && below + here >= wanted) {
      const from = index ? bounds[index - 1] : 0;
      return { value: from + (bounds[index] - from) * ((wanted - below) / here), beyond: false };
    }
    below += here;
  }
  return { value: bounds[bounds.length - 1], beyond: true };
}

/** The share of observations up to `limit`: exact where the limit is a bound. Null without observations. */
export function shareWithin(buckets, bounds, limit) {
  const all = total(buckets);
  if (!(all > 0)) return null;
  let within = 0;
  for (let index = 0; index < bounds.length; index += 1) {
    const from = index ? bounds[index - 1] : 0;
    if (bounds[index] <= limit) within += buckets[index];
    else if (from < limit) within += (buckets[index] * (limit - from)) / (bounds[index] - from);
  }
  return within / all;
}

export function mean(histogram) {
  const all = total(histogram.buckets);
  return all > 0 ? histogram.sum / all : null;
}

/** What each bucket of a histogram of whole numbers holds: 1, 2, 3–4, 5–8 … */
export function labels(bounds) {
  const names = bounds.map((bound, index) => {
    const from = index ? bounds[index - 1] + 1 : bound;
    return from === bound ? String(bound) : `${from}–${bound}`;
  });
  return [...names, `> ${bounds[bounds.length - 1]}`];
}
