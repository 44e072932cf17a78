// One word for how a model is doing, with a tone for its colour and a sentence for why.

import { milliseconds, percent } from "./format.js";
import { shareWithin, total } from "./histogram.js";
import { sumOf } from "./history.js";

const STATES = {
  LOADING: { word: "loading", tone: "quiet", why: "The model is being loaded and warmed up." },
  UNLOADING: { word: "unloading", tone: "quiet", why: "The model finishes its requests and is unloaded." },
  UNAVAILABLE: { word: "unavailable", tone: "bad", why: "The model could not be loaded." },
};
const GOOD_SHARE = 0.99;
const TASKS = {
  classify: "Classifier",
  detect: "Detector",
  segment: "Segmenter",
  embed: "Embedder",
  read: "Reader",
  raw: "Raw outputs",
};

/** `recent` is what happened lately, or null. */
export function health(model, recent, bounds) {
  if (model.state !== "READY") {
    return STATES[model.state] ?? { word: model.state.toLowerCase(), tone: "quiet", why: "" };
  }
  if (!recent) return { word: "ready", tone: "quiet", why: "" };
  if (recent.failures.BACKEND) return { word: "failing", tone: "bad", why: "The model raises errors." };
  const refused = sumOf(recent.sheds);
  if (refused) {
    const share = refused / (refused + recent.ok);
    return { word: "rejecting", tone: "warn", why: `It rejects ${percent(share)} of its requests to answer the others within the SLO.` };
  }
  if (!total(recent.request.buckets)) return { word: "idle", tone: "quiet", why: "" };
  if (!model.slo_ms) return { word: "serving", tone: "good", why: "" };
  const kept = shareWithin(recent.request.buckets, bounds.seconds, model.slo_ms / 1000);
  if (kept >= GOOD_SHARE) return { word: "on time", tone: "good", why: "" };
  return { word: "late", tone: "warn", why: `Only ${percent(kept)} of its responses were within ${milliseconds(model.slo_ms)}.` };
}

/** A model that fails, else one that rejects or is late, else the first that takes images, else the first that serves. */
export function worthALook(models, toneOf) {
  const ready = models.filter((model) => model.state === "READY" && model.newest);
  const toned = (tone) => ready.find((model) => toneOf(model) === tone);
  return toned("bad") ?? toned("warn") ?? ready.find((model) => model.task) ?? ready[0] ?? models[0];
}

export const taskName = (task) => TASKS[task] ?? (task ? String(task) : "Tensors only");

export function promise(model) {
  if (model.slo_ms) return `SLO ${milliseconds(model.slo_ms)}`;
  return model.mode === "knobs" ? "fixed batching settings" : "no SLO";
}
