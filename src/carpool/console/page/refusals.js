// What to say when there is no answer: what happened, and what to do about it, without blaming anybody.

import { milliseconds } from "./format.js";

const BY_REASON = {
  "cannot-finish": "The queue is too long for the SLO, so the server rejected it at once instead of answering late.",
  overload: "The model is at its limit. Accepting this request would have made others late.",
  "over-share": "This source already has its fair share of a busy model.",
  "queue-full": "The queue is full.",
  "given-up": "It waited, and was dropped so that the requests behind it meet their deadlines.",
  deadline: "Its deadline passed while it waited.",
  timeout: "It waited longer than the model's queue allows.",
  replaced: "A newer frame of the same source replaced it.",
  "not-serving": "The server is starting, stopping or restarting.",
  stopping: "The server is stopping.",
  "model-not-ready": "The model is still loading.",
  restarting: "The model died and is being restarted.",
  "no-slots": "All of the server's memory for images is in use.",
  "model-error": "The model failed on this image.",
  "too-large": "The image is larger than the server accepts.",
  "unknown-model": "The server has no model of that name any more.",
};
const BY_STATUS = [
  [429, "Rejected, to meet the SLO", "warn"],
  [409, "Replaced by a newer image", "warn"],
  [504, "Too late", "warn"],
  [503, "Not now", "warn"],
  [400, "This image cannot be used", "bad"],
  [413, "This image is too large", "bad"],
  [415, "This image cannot be read", "bad"],
  [404, "Not found", "bad"],
  [405, "This server takes no images yet", "bad"],
  [501, "Not supported", "bad"],
];

const SHEDS = {
  "cannot-finish": "The running batch and the queue took too long for their deadline, so they were rejected at once.",
  overload: "Accepting them would have made batches too small, and other requests late.",
  "over-share": "Their source already had its fair share of a busy model.",
  "given-up": "Accepted, then dropped so that the requests behind them met their deadlines.",
  deadline: "Their deadline passed while they waited.",
  "queue-full": "The queue was at its limit.",
  timeout: "They waited longer than the model's queue allows.",
  "too-large": "They had more images than a batch may have.",
  replaced: "A newer frame of the same source replaced them.",
  restarting: "The model had died and was being restarted.",
};

/** What a reason of the counters means, for many requests; "" for one that this page does not know. */
export const meaning = (word) => SHEDS[word] ?? "";

export const meaningPage = (word) => `/console/refusals.html#${encodeURIComponent(word)}`;

/** `body` is the error document, or null where there was none. */
export function explain(status, body) {
  const [, title, tone] = BY_STATUS.find(([known]) => known === status) ?? [0, "The server failed on this image", "bad"];
  const lines = [];
  const kind = BY_REASON[body?.reason];
  if (kind) lines.push(kind);
  if (typeof body?.predicted_ms === "number") {
    lines.push(`The response would have taken about ${milliseconds(body.predicted_ms)}.`);
  }
  if (typeof body?.retry_after_s === "number") {
    lines.push(`Retry in ${milliseconds(Math.max(1, body.retry_after_s * 1000))}.`);
  }
  const said = typeof body?.error === "string" ? body.error : `The server answered ${status}.`;
  return { title, tone, lines, said, reason: typeof body?.reason === "string" ? body.reason : "" };
}

export const unreachable = {
  title: "The server cannot be reached",
  tone: "bad",
  lines: ["There was no response. The server may be restarting, or the network is down."],
  said: "",
  reason: "",
};

export const notAPicture = {
  title: "That is not an image",
  tone: "bad",
  lines: ["Use JPEG, PNG, WebP, BMP, TIFF or GIF."],
  said: "",
  reason: "",
};
