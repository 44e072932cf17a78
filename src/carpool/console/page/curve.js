// The batch curve as numbers: t(B) between its points, how much of it to show, and where the model is on it.
// Curves are lists of [size, ms] with rising sizes.

const ROOM = 1.5; // promises beyond so many times the curve are only mentioned, not drawn to scale
const BEYOND = 1.4; // batches that take longer than so many promises are of no use to anybody

/** Straight lines between the points, flat before the first, the last slope after the last. */
export function timeAt(points, size) {
  if (!points.length) return null;
  const after = points.findIndex(([other]) => other >= size);
  if (after === 0 || points.length === 1) return points[0][1] * Math.max(1, size / points[0][0]);
  const upper = after < 0 ? points.length - 1 : after;
  const [[sizeA, timeA], [sizeB, timeB]] = [points[upper - 1], points[upper]];
  return timeA + ((timeB - timeA) * (size - sizeA)) / (sizeB - sizeA);
}

/** The largest size and time to draw: what is of use under the promise, what was measured, what is run. */
export function extent(profile, slo) {
  const { believed, points, recent } = profile;
  const largest = Math.max(...believed.map(([size]) => size), 1);
  let size = largest;
  if (slo) {
    size = 1;
    while (size < largest && timeAt(believed, size) < BEYOND * slo) size += 1;
  }
  const run = recent.sizes.map(([images]) => images);
  const useful = points.filter(({ ms }) => !slo || ms <= BEYOND * slo).map((point) => point.size);
  size = Math.min(largest, Math.max(size, 2, ...run, ...useful));
  const seen = points.filter((point) => point.size <= size).map(({ ms }) => ms);
  const ms = Math.max(timeAt(believed, size), ...seen, recent.mean_ms ?? 0);
  return { size: Math.max(size, 2), ms: slo && slo <= ms * ROOM ? Math.max(ms, slo * 1.12) : ms * 1.08 };
}

/** A few whole sizes from 1 up to `most`, evenly spread, the last one always. */
export function sizeTicks(most, room = 8) {
  const step = [1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128, 256, 512].find((wide) => most / wide <= room) ?? Math.ceil(most / room);
  const ticks = [1];
  for (let size = step > 1 ? step : 2; size <= most; size += step) ticks.push(size);
  if (most - ticks.at(-1) > step / 2) ticks.push(most);
  return ticks;
}

/** Where the model works now: the mean batch and its time; null when nothing ran lately. */
export function operatingPoint({ recent }) {
  return recent.batches ? { size: recent.mean_batch, ms: recent.mean_ms } : null;
}

/** The rows of the table beside the picture: what was measured, what is believed, what ran. */
export function rows({ points, believed, recent }) {
  const measured = new Map(points.map((point) => [point.size, point.ms]));
  const ran = new Map(recent.sizes.map(([size, batches, ms]) => [size, { batches, ms }]));
  const sizes = [...new Set([...measured.keys(), ...believed.map(([size]) => size), ...ran.keys()])];
  return sizes
    .sort((a, b) => a - b)
    .map((size) => ({ size, measured: measured.get(size) ?? null, believed: timeAt(believed, size), ran: ran.get(size) ?? null }));
}
