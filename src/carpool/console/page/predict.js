// Sends one picture to one model and tells what came back, and how long it took.

import { predictPath } from "./curl.js";
import { keyed } from "./key.js";
import { explain, unreachable } from "./refusals.js";
import { parseServerTiming } from "./timing.js";

/** Null when it was called off. */
export async function predict(file, model, signal) {
  const started = performance.now();
  let response;
  let text;
  try {
    response = await fetch(predictPath(model), {
      method: "POST",
      headers: keyed({ "content-type": file.type || "application/octet-stream", accept: "application/json" }),
      body: file,
      signal,
    });
    text = await response.text();
  } catch {
    return signal.aborted ? null : { refusal: unreachable };
  }
  const totalMs = performance.now() - started;
  const timing = parseServerTiming(response.headers.get("server-timing"));
  const body = parsed(text);
  if (!response.ok || body === null) return { refusal: explain(response.status, body), timing, totalMs };
  return { answer: body, timing, totalMs };
}

function parsed(text) {
  try {
    const value = JSON.parse(text);
    return value !== null && typeof value === "object" ? value : null;
  } catch {
    return null;
  }
}
