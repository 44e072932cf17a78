// A rollout in words and numbers: where it stands, the steps of its plan, and where a guard's interval lies.

import { duration, percent } from "./format.js";

const TONES = { "rolled-back": "bad", failed: "bad", paused: "warn", done: "good" };
const SURE = {
  promote: "Promote ignores the guards: the rollout continues without proof.",
  pause: "It stays in this state until it is resumed.",
  resume: "It continues where it was paused.",
  abort: "Every request goes to the stable version again, at once.",
};

export const MOVES = Object.keys(SURE);

/** Behind the button, before anything is sent. */
export const sure = (action) => SURE[action];

export const tone = (state) => TONES[state] ?? "good";

/** "canary, step 1 of 2, for 3 min 10 s". */
export function standing({ state, step, steps, paused_in: pausedIn, elapsed_s: elapsed }) {
  const where = state === "canary" ? `canary, step ${step} of ${steps}` : state === "paused" ? `paused in ${pausedIn}` : state;
  return state === "paused" || !(elapsed >= 1) ? where : `${where}, for ${duration(elapsed)}`;
}

/** What it waits for, or why it ended. */
export function sentence({ state, why, needs = [], trouble }) {
  const waits = why && ["shadow", "canary"].includes(state) ? `it waits: ${why}` : why;
  const said = [waits, ...needs, trouble].filter(Boolean).join(". ");
  return said ? `${said[0].toUpperCase()}${said.slice(1)}.` : "It waits for nothing.";
}

/** The steps of its plan, each with its name and whether it is past, now or to come. */
export function track({ state, step, paused_in: pausedIn, plan }) {
  const shadows = plan.shadow > 0 && plan.shadow_h > 0;
  const names = [
    ["loading"],
    ["checked"],
    ...(shadows ? [["shadow"]] : []),
    ...plan.canary.map((share, index) => ["canary", index + 1, `canary ${percent(share).replace(".0 ", " ")}`]),
    ["full"],
    ["standby"],
    ["done"],
  ];
  const current = { retired: "done" }[pausedIn ?? state] ?? pausedIn ?? state;
  const now = names.findIndex(([name, number]) => name === current && (!number || number === step));
  return names.map(([name, , words], index) => ({
    name: words ?? name,
    when: now < 0 ? "never" : index < now ? "past" : index === now ? "now" : "later",
  }));
}

/** From 0 to 1, with the limit in the middle whatever it is, and no end (null) at the right. */
export const place = (value, limit) => (value === null || value === undefined ? 1 : value / (value + limit));

/** Where an interval lies beside its limit, in percent of the width; null for a guard that is off. */
export function span({ low, high, limit }) {
  if (!(limit > 0)) return null;
  const [from, to] = [place(low, limit), place(high, limit)].map((share) => 100 * share);
  return { from, wide: Math.max(to - from, 1) };
}

/** The limit as people say it: a share of the answers, or so many times as often as stable. */
export const limited = (name, limit) => (limit === null ? "off" : name === "disagreement" || name === "slower" ? percent(limit) : `${limit} ×`);
