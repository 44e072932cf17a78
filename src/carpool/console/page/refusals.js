// What to say when there is no answer: what happened, and what to do about it, without blaming anybody.

import { milliseconds } from "./format.js";

const BY_REASON = {
  "cannot-finish": "The queue is too long for the promise, so the server said no at once instead of answering late.",
  overload: "The model is at its limit. Taking this one would have made others late.",
  "over-share": "This source already has its fair share of a busy model.",
  "queue-full": "The queue is full.",
  "given-up": "It was waiting, and was given up so that those behind it could make it.",
  deadline: "Its deadline passed while it waited.",
  timeout: "It waited longer than the model's queue allows.",
  replaced: "A newer frame of the same source took its place.",
  "not-serving": "The server is starting, stopping or restarting.",
  stopping: "The server is stopping.",
  "model-not-ready": "The model is still loading.",
  restarting: "The model died and is being started again.",
  "no-slots": "All of the server's memory for pictures is in use.",
  "model-error": "The model failed on this picture.",
  "too-large": "The picture is larger than the server takes.",
  "unknown-model": "The server has no model of that name any more.",
};
const BY_STATUS = [
  [429, "Refused, to keep the promise", "warn"],
  [409, "Replaced by a newer picture", "warn"],
  [504, "Too late", "warn"],
  [503, "Not now", "warn"],
  [400, "This picture cannot be used", "bad"],
  [413, "This picture is too large", "bad"],
  [415, "This picture cannot be read", "bad"],
  [404, "Not found", "bad"],
  [405, "This server takes no pictures yet", "bad"],
  [501, "Not done here", "bad"],
];

const SHEDS = {
  "cannot-finish": "What ran and waited before them took too long for their deadline, so they were told at once.",
  overload: "Taking them would have made batches too small to keep up, and others late.",
  "over-share": "Their source already had its fair share of a busy model.",
  "given-up": "Accepted, then dropped so that those behind them made it.",
  deadline: "Their deadline passed while they waited.",
  "queue-full": "The queue was at its limit.",
  timeout: "They waited longer than the model's queue allows.",
  "too-large": "They brought more images than a batch may hold.",
  replaced: "A newer frame of the same source took their place.",
  restarting: "The model had died and was being started again.",
};

/** What a reason of the counters means, for many requests; "" for one that this page does not know. */
export const meaning = (word) => SHEDS[word] ?? "";

export const meaningPage = (word) => `/console/refusals.html#${encodeURIComponent(word)}`;

/** `body` is the error document, or null where there was none. */
export function explain(status, body) {
  const [, title, tone] = BY_STATUS.find(([known]) => known === status) ?? [0, "The server failed on this picture", "bad"];
  const lines = [];
  const kind = BY_REASON[body?.reason];
  if (kind) lines.push(kind);
  if (typeof body?.predicted_ms === "number") {
    lines.push(`The answer would have taken about ${milliseconds(body.predicted_ms)}.`);
  }
  if (typeof body?.retry_after_s === "number") {
    lines.push(`Try again in ${milliseconds(Math.max(1, body.retry_after_s * 1000))}.`);
  }
  const said = typeof body?.error === "string" ? body.error : `The server answered ${status}.`;
  return { title, tone, lines, said, reason: typeof body?.reason === "string" ? body.reason : "" };
}

export const unreachable = {
  title: "The server cannot be reached",
  tone: "bad",
  lines: ["Nothing came back. It may be restarting, or the network between is down."],
  said: "",
  reason: "",
};

export const notAPicture = {
  title: "That is not a picture",
  tone: "bad",
  lines: ["JPEG, PNG, WebP and a few others will do."],
  said: "",
  reason: "",
};
