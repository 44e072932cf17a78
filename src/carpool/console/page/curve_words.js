// What can be said of a batch curve: whether it still holds, what is in force, and all of it for those who cannot see it.

import { count, milliseconds, NOTHING, number, percent, rate } from "./format.js";

const STEADY = 0.05; // less than this is the weather
const QUIET = {
  LOADING: "It is being loaded and measured. The curve follows.",
  UNLOADING: "It finishes its requests and is unloaded.",
  UNAVAILABLE: "It does not serve, so nothing is measured.",
};

/** Why there is no curve; "" when there should be one. */
export function absence(model) {
  if (model.state === "READY") return "";
  return QUIET[model.state] ?? "It does not serve.";
}

/** Whether what was measured still holds, in words and a tone. */
export function drift({ speed, points }) {
  const known = points.length ? "measured at start-up" : "it was set to be";
  const off = speed.factor - 1;
  if (Math.abs(off) < STEADY) {
    const again = speed.relearned ? "; single sizes were re-learned" : "";
    return { text: `As fast as ${known}${again}.`, tone: "good" };
  }
  const much = percent(Math.abs(off)).replace(/\.\d/, "");
  const way = off > 0 ? "slower" : "faster";
  const since = speed.relearned ? "re-learned" : "batches are planned with that";
  return { text: `${much} ${way} than ${known}; ${since}.`, tone: off > 0 ? "warn" : "good" };
}

/** The settings in force, as pairs; before the engine has told them, as many dashes. */
export function settings(model, profile) {
  const at = profile ? `${profile.instances} × ${profile.threads ? count(profile.threads, "thread") : "its own threads"}` : NOTHING;
  if (model.slo_ms) {
    const { largest_batch: largest, promised_batch: near, capacity_rps: carried } = profile?.promise ?? {};
    return [
      ["SLO", milliseconds(model.slo_ms)],
      ["Largest batch", profile ? `${largest} of ${profile.max_batch}` : NOTHING],
      ["Batch under load", profile ? (near ? `near ${near}` : "not known") : NOTHING],
      ["Capacity", profile ? (near ? `${rate(carried).replace(" /s", "")} images/s` : NOTHING) : NOTHING],
      ["Instances", at],
    ];
  }
  const knobs = profile?.knobs;
  const delay = knobs ? (knobs.max_delay_ms ? milliseconds(knobs.max_delay_ms) : "none: waiting requests run at once") : NOTHING;
  return [
    ["SLO", "none"],
    ["Largest batch", knobs ? String(knobs.max_batch) : NOTHING],
    ["Waits for more", delay],
    ["Queue", knobs ? (knobs.max_queue_size ? `at most ${number(knobs.max_queue_size)}` : "no limit set") : NOTHING],
    ["Instances", at],
  ];
}

/** Sentences on why: those of the loading, and what follows from the mode where there are none. */
export function reasons(model) {
  const said = [...(model.choices ?? [])];
  if (model.state !== "READY") return said;
  if (model.mode === "knobs") said.push("Batching follows the fixed settings of the model; no request is rejected to meet an SLO.");
  if (model.mode === "eager") said.push("No SLO and no fixed settings: requests that wait when an instance is free form a batch.");
  if (!(model.max_batch > 1)) said.push("It takes one image at a time, so there is no batch to choose.");
  return said;
}

/** The picture in one sentence or two. */
export function described(profile, slo, point) {
  const parts = profile.points.map(({ size, ms }) => `${size}: ${milliseconds(ms)}`);
  const said = ["Time of a batch by its size."];
  if (parts.length) said.push(`Measured ${parts.join(", ")}.`);
  said.push(`Line: ${line(profile.fit)}.`);
  if (slo) said.push(`SLO ${milliseconds(slo)}, half of it ${milliseconds(slo / 2)}.`);
  said.push(point ? `Now: ${operating(point)}.` : "Nothing ran recently.");
  return said.join(" ");
}

/** Kept short enough to stand in a legend. */
export const line = (fit) => `${short(fit.fixed_ms)} + ${short(fit.per_image_ms)} ms × images`;

const short = (ms) => (ms >= 100 ? ms.toFixed(0) : ms >= 10 ? ms.toFixed(1) : ms.toFixed(2));

export const operating = (point) => `batches of ${number(point.size)} take ${milliseconds(point.ms)}`;
