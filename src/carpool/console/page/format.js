// Numbers as people read them: few digits, the unit always there, a dash for what is not known.

export const NOTHING = "–";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

const known = (value) => typeof value === "number" && Number.isFinite(value);

/** Two or more digits that mean something: 0, 0.4, 3.2, 47, 1,204. */
export function number(value) {
  if (!known(value)) return NOTHING;
  if (Math.abs(value) >= 9.95) return whole.format(value);
  const rounded = Math.round(value * 10) / 10;
  return Number.isInteger(rounded) ? whole.format(rounded) : tenths.format(rounded);
}

export const rate = (value) => (known(value) ? `${number(value)} /s` : NOTHING);

export function milliseconds(value) {
  if (!known(value)) return NOTHING;
  if (value >= 9_950) return `${tenths.format(value / 1000)} s`;
  if (value !== 0 && Math.abs(value) < 0.095) return `${value.toFixed(2)} ms`;
  return `${number(value)} ms`;
}

/** 99.96 % is not 100 %: only what is whole is shown as whole. */
export function percent(share) {
  if (!known(share)) return NOTHING;
  const value = share * 100;
  if (value > 99.9 && value < 100) return `${(Math.floor(value * 100) / 100).toFixed(2)} %`;
  if (value === 0 || value === 100) return `${value} %`;
  return value < 0.1 ? "< 0.1 %" : `${tenths.format(value)} %`;
}

export function bytes(value) {
  if (!known(value)) return NOTHING;
  const units = ["B", "KB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit ? number(value) : whole.format(value)} ${units[unit]}`;
}

export function duration(seconds) {
  if (!known(seconds)) return NOTHING;
  const steps = [[86_400, "d"], [3_600, "h"], [60, "min"], [1, "s"]];
  const first = steps.findIndex(([size]) => seconds >= size);
  if (first < 0) return "0 s";
  const [size, unit] = steps[first];
  const head = `${Math.floor(seconds / size)} ${unit}`;
  const next = steps[first + 1];
  const rest = next && first < 2 ? Math.floor((seconds % size) / next[0]) : 0;
  return rest ? `${head} ${rest} ${next[1]}` : head;
}

/** The time of day, on the clock of whoever looks. */
export const clockTime = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

export function count(value, noun) {
  return `${number(value)} ${noun}${value === 1 ? "" : "s"}`;
}
