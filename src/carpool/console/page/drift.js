// The panel of drift: what the reference was like and what comes now, as two outlines, the furthest apart first.

import { el, find, setText, setTone, svg } from "./dom.js";
import { count, number } from "./format.js";
import { keyed } from "./key.js";

const EVERY_MS = 10_000;
const PATIENCE_MS = 5000;
const MOST_SHOWN = 12; // of an embedding's directions, those that changed most say enough
const [WIDTH, HEIGHT] = [160, 56];

/** A histogram's outline from shares, in steps, as an SVG path; `most` is the height of the highest. */
export function outline(shares, most) {
  if (!shares.length || !(most > 0)) return "";
  const step = WIDTH / shares.length;
  const y = (share) => (HEIGHT - 1 - (share / most) * (HEIGHT - 4)).toFixed(1);
  const stairs = shares.map((share, index) => `V${y(share)}H${((index + 1) * step).toFixed(1)}`);
  return `M0 ${HEIGHT - 1}${stairs.join("")}V${HEIGHT - 1}`;
}

/** What the bins go from and to, in words. */
export function extent(bins) {
  if (!bins.length) return "";
  if (typeof bins[0] === "number") return `${short(bins[0])} – ${short(bins[bins.length - 1])}`;
  const names = bins.filter((name) => name).slice(0, 3);
  return names.length < bins.length - 1 ? `${names.join(", ")} …` : names.join(", ");
}

const short = (value) => (value && Math.abs(value) < 0.1 ? value.toPrecision(1) : number(value));

export class DriftPanel {
  #title = el("h2", { id: "drift-title" }, "Drift");
  #says = el("p", { class: "drift", role: "status" });
  #measures = el("ul", { class: "measures" });
  #sources = el("ul", { class: "cameras" });
  #panel = el(
    "section",
    { class: "panel drift-panel", "aria-labelledby": "drift-title", hidden: true },
    el("header", {}, this.#title, this.#says),
    el("ul", { class: "legend outlines" }, el("li", { class: "before" }, "reference"), el("li", {}, "now")),
    this.#measures,
    this.#sources,
  );
  #model = null;
  #asked = -Infinity;

  constructor() {
    find("curve-title").closest("section").after(this.#panel);
  }

  show({ model }) {
    const watched = Boolean(model.drift) && model.state === "READY";
    if (this.#panel.hidden === watched) this.#panel.hidden = !watched;
    const key = `${model.name}/${model.version}`;
    if (key !== this.#model) {
      this.#model = key;
      this.#asked = -Infinity;
      this.#clear();
    }
    if (watched && performance.now() - this.#asked >= EVERY_MS) this.#ask(model, key);
  }

  async #ask(model, key) {
    this.#asked = performance.now();
    const [name, version] = [model.name, model.version].map(encodeURIComponent);
    try {
      const signal = AbortSignal.timeout(PATIENCE_MS);
      const response = await fetch(`/v2/models/${name}/versions/${version}/drift`, { cache: "no-store", headers: keyed(), signal });
      if (response.ok && key === this.#model) this.#take(await response.json());
    } catch {
      // the next one may come
    }
  }

  #clear() {
    setText(this.#says, "Asking the engine …");
    setTone(this.#says, "quiet");
    this.#measures.replaceChildren();
    this.#sources.replaceChildren();
  }

  #take(found) {
    const broken = found.sources.filter((source) => source.state);
    const cameras = broken.length ? `; ${count(broken.length, "camera")} not well` : "";
    setText(this.#says, `${found.says[0].toUpperCase()}${found.says.slice(1)}${cameras}`);
    setTone(this.#says, found.alarms.length || broken.length ? "warn" : "quiet");
    this.#measures.replaceChildren(...found.measures.slice(0, MOST_SHOWN).map((line) => measure(line)));
    this.#sources.replaceChildren(...found.sources.map((source) => camera(source)));
  }
}

function measure({ what, words, psi, alarm, bins, reference, now }) {
  const most = Math.max(...reference, ...now, 0);
  const said = psi === null ? "not judged yet" : `PSI ${psi.toFixed(2)}`;
  const node = svg(
    "svg",
    { class: "outline", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `${words}: ${said}` },
    svg("path", { class: "before", d: outline(reference, most) || "M0 0" }),
    svg("path", { class: "after", d: outline(now, most) || "M0 0" }),
  );
  const name = what.startsWith("embedding-") ? `${words} (${what.slice(10)})` : words;
  return el(
    "li",
    { "data-tone": alarm ? "warn" : false },
    el("span", { class: "tile-name" }, name),
    el("b", { class: "figure" }, said),
    node,
    el("span", { class: "hint" }, extent(bins)),
  );
}

function camera({ source, state, alarms, pictures }) {
  const why = alarms.length ? `: ${alarms.join(", ")}` : "";
  return el(
    "li",
    { "data-tone": state ? "warn" : "good" },
    el("bdi", {}, source),
    el("span", { class: "word" }, state ? `${state}${why}` : "well"),
    el("span", { class: "hint figure" }, count(pictures, "image")),
  );
}
