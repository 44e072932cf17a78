// Answers as something to read: boxes and masks as a list, classes as bars, an embedding as a strip.

import { el, svg } from "./dom.js";
import { count, number, percent } from "./format.js";
import { colour } from "./geometry.js";

const LISTED = 12;
const STRIP = 256;
const RAW_CHARS = 4000;

const list = (value) => (Array.isArray(value) ? value.filter((item) => item && typeof item === "object") : []);
const nameOf = (item) => (item.label || item.label === 0 ? String(item.label) : `class ${item.class_id ?? "?"}`);
const scoreOf = (item) => (Number.isFinite(item.score) ? item.score : null);

/** What can be drawn over the picture, surest first, each with its colour and caption. */
export function drawable(answer) {
  const texts = [...list(answer.lines), ...list(answer.regions)].map((item) => ({ ...item, label: item.text ?? "text" }));
  const found = [...list(answer.detections), ...list(answer.masks), ...texts];
  const labels = [];
  const sorted = found.sort((a, b) => (scoreOf(b) ?? 0) - (scoreOf(a) ?? 0));
  return sorted.map((item) => {
    const name = nameOf(item);
    if (!labels.includes(name)) labels.push(name);
    const id = Number.isInteger(item.class_id) ? item.class_id : labels.indexOf(name);
    const score = scoreOf(item);
    const caption = score === null ? name : `${name} ${score.toFixed(2)}`;
    return { ...item, name, score, colour: id, caption: caption.slice(0, 40) };
  });
}

/** One sentence for people who cannot see the picture, and for everybody above it. */
export function summary(answer, things) {
  if (Array.isArray(answer.detections)) return things.length ? found(things, "object") : "Nothing found in this image.";
  if (Array.isArray(answer.masks)) return things.length ? found(things, "mask") : "No object found in this image.";
  if (typeof answer.text === "string") return answer.text ? `“${answer.text.slice(0, 120)}”` : "No text to read in this image.";
  if (Array.isArray(answer.regions)) return things.length ? `${count(things.length, "region")} of text` : "No text in this image.";
  const [best] = list(answer.classes);
  if (best) return `${nameOf(best)}, ${percent(scoreOf(best))}`;
  if (answer.depth) return `Depth from ${number2(answer.depth.low)} to ${number2(answer.depth.high)}, in the model's own unit`;
  if (answer.anomaly) return `${answer.anomaly.anomalous ? "Anomalous" : "Normal"}, score ${number2(answer.anomaly.score)}`;
  if (answer.restored) return `An image of ${answer.restored.width} × ${answer.restored.height} pixels`;
  if (Array.isArray(answer.embedding)) return `An embedding of ${count(answer.embedding.length, "number")}`;
  return "Answered.";
}

function found(things, noun) {
  const counts = new Map();
  for (const thing of things) counts.set(thing.name, (counts.get(thing.name) ?? 0) + 1);
  const parts = [...counts].slice(0, 4).map(([name, times]) => (times > 1 ? `${times} × ${name}` : name));
  const more = counts.size > 4 ? ` and ${counts.size - 4} more` : "";
  return `${count(things.length, noun)}: ${parts.join(", ")}${more}`;
}

/** The list beside the picture. `highlight` is told which thing the pointer is on, or null. */
export function rendered(answer, things, highlight) {
  if (things.length) return thingList(things, highlight);
  if (Array.isArray(answer.detections) || Array.isArray(answer.masks)) return null;
  if (Array.isArray(answer.classes)) return classBars(list(answer.classes));
  if (answer.depth || answer.anomaly || answer.restored) return null;
  if (Array.isArray(answer.embedding)) return embeddingStrip(answer.embedding);
  return el("pre", { tabindex: 0, "aria-label": "The answer" }, JSON.stringify(answer, null, 1).slice(0, RAW_CHARS));
}

function thingList(things, highlight) {
  const rows = things.map((thing, index) => {
    const swatch = el("i", { class: "swatch", "aria-hidden": "true" });
    swatch.style.background = colour(thing.colour);
    const row = el("li", {}, swatch, el("bdi", {}, thing.name), el("span", { class: "figure" }, number2(thing.score)));
    row.addEventListener("pointerenter", () => highlight(index));
    row.addEventListener("pointerleave", () => highlight(null));
    return row;
  });
  return folded(el("ol", { class: "things" }), rows);
}

function folded(node, rows) {
  node.append(...rows.slice(0, LISTED));
  if (rows.length <= LISTED) return node;
  const more = el("button", { class: "quiet", type: "button" }, `Show all ${rows.length}`);
  more.addEventListener("click", () => {
    node.append(...rows.slice(LISTED));
    more.remove();
  });
  return el("div", {}, node, more);
}

function classBars(classes) {
  const most = Math.max(...classes.map((item) => scoreOf(item) ?? 0), 1e-9);
  const rows = classes.map((item) => {
    const bar = el("i", { class: "bar-fill", "aria-hidden": "true" });
    const score = scoreOf(item);
    bar.style.width = `${Math.max(0.5, (100 * Math.max(0, score ?? 0)) / Math.max(most, 1))}%`;
    return el("li", {}, el("bdi", {}, nameOf(item)), el("span", { class: "figure" }, number2(score)), el("span", { class: "bar-track" }, bar));
  });
  return folded(el("ol", { class: "classes" }), rows);
}

function embeddingStrip(values) {
  const shown = values.slice(0, STRIP).map((value) => (Number.isFinite(value) ? value : 0));
  const most = Math.max(...shown.map(Math.abs), 1e-9);
  const cells = shown.map((value, index) => {
    const strength = (Math.abs(value) / most).toFixed(3);
    return svg("rect", { x: index, y: 0, width: 1.05, height: 1, class: value < 0 ? "minus" : "plus", "fill-opacity": strength });
  });
  const norm = Math.sqrt(values.reduce((sum, value) => sum + value * value, 0));
  const note = `${count(values.length, "number")}, length ${norm.toFixed(2)}${values.length > STRIP ? `, the first ${STRIP} shown` : ""}`;
  const strip = svg("svg", { class: "strip", viewBox: `0 0 ${shown.length || 1} 1`, preserveAspectRatio: "none", role: "img", "aria-label": note }, ...cells);
  return el("div", {}, strip, el("p", { class: "hint" }, note));
}

const number2 = (score) => (Number.isFinite(score) ? score.toFixed(2) : "");
