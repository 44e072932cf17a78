// The panel of a rollout: how far the new version is, what is not proven yet, and what somebody may do about it.

import { timeAt } from "./curve.js";
import { Differences } from "./differences.js";
import { el, find, setText, setTone, svg } from "./dom.js";
import { milliseconds, NOTHING, number, percent, rate } from "./format.js";
import { hasKey, keyed } from "./key.js";
import { limited, MOVES, sentence, span, standing, sure, tone, track } from "./rollout_words.js";
import { percentile } from "./tiles.js";

const EVERY_MS = 2000;
const PATIENCE_MS = 5000;
const LONGEST_REASON = 500;
const OVER = ["done", "rolled-back", "failed"];
const RARE = 0.02; // of the candidate's answers, as in rollout_guards.py
const [WIDTH, HEIGHT] = [320, 120];

export const rolloutPath = (name) => `/v2/models/${encodeURIComponent(name)}/rollout`;

export class RolloutPanel {
  #state = el("p", { class: "status", role: "status" });
  #says = el("p", { class: "says" });
  #track = el("ol", { class: "states", "aria-label": "The steps of its plan" });
  #bar = el("div", { class: "stack", role: "img" });
  #legend = el("ul", { class: "legend" });
  #versions = el("div", { class: "versions" });
  #curves = svg("svg", { class: "two-curves", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  #capacity = el("p", { class: "hint" });
  #guards = el("ul", { class: "guards" });
  #history = el("ol", { class: "story" });
  #buttons = el("div", { class: "actions" });
  #form = el("form", { class: "sure", hidden: true });
  #reason = el("input", { class: "filter", maxlength: LONGEST_REASON, placeholder: "Why, for the history (may be empty)", "aria-label": "Why, for the history" });
  #differences;
  #panel;
  #key;
  #model = null;
  #asked = -Infinity;
  #found = null;
  #action = "";

  /** `key` is told when an action needs another key. */
  constructor(key) {
    this.#key = key;
    this.#differences = new Differences(() => this.#wantKey());
    this.#panel = el(
      "section",
      { class: "panel rollout", "aria-labelledby": "rollout-title", hidden: true },
      el("header", {}, el("div", {}, el("h2", { id: "rollout-title" }, "Rollout"), this.#state), this.#buttons),
      this.#form,
      this.#says,
      this.#track,
      el("div", {}, this.#bar, this.#legend),
      el("div", { class: "two" }, el("div", {}, el("h3", {}, "Both versions"), this.#versions, this.#curves, this.#capacity), el("div", {}, el("h3", {}, "Guards"), this.#guards)),
      this.#differences.node,
      el("details", {}, el("summary", {}, "History"), this.#history),
    );
    find("try").before(this.#panel);
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
  }

  /** `windowOf` gives what another version of this model answered lately, or null. */
  show({ model, bounds }, windowOf) {
    const rolls = Boolean(model.rollout);
    if (this.#panel.hidden === rolls) this.#panel.hidden = !rolls;
    if (model.name !== this.#model) {
      this.#model = model.name;
      this.#asked = -Infinity;
      this.#found = null;
      this.#clear();
    }
    if (!rolls) return;
    if (performance.now() - this.#asked >= EVERY_MS || this.#found?.state !== model.rollout) this.#ask();
    if (this.#found) this.#showVersions(bounds, windowOf);
  }

  async #ask() {
    if (performance.now() - this.#asked < EVERY_MS / 4) return; // a state that changed is asked for soon, not all the time
    this.#asked = performance.now();
    const name = this.#model;
    try {
      const signal = AbortSignal.timeout(PATIENCE_MS);
      const response = await fetch(rolloutPath(name), { cache: "no-store", headers: keyed(), signal });
      if (response.ok) this.#take(name, await response.json());
    } catch {
      // the next one may come
    }
  }

  #clear() {
    setText(this.#state, "Asking the engine …");
    setTone(this.#state, "quiet");
    this.#form.hidden = true;
    for (const node of [this.#says, this.#track, this.#versions, this.#curves, this.#guards, this.#history, this.#buttons, this.#legend, this.#bar]) {
      node.replaceChildren();
    }
    setText(this.#capacity, "");
    this.#differences.use(null, null);
  }

  #take(name, found) {
    if (name !== this.#model || found.state === "none") return;
    this.#found = found;
    setText(this.#state, standing(found));
    setTone(this.#state, tone(found.state));
    setText(this.#says, sentence(found));
    this.#track.replaceChildren(
      ...track(found).map(({ name: step, when }) => el("li", { class: when, "aria-current": when === "now" ? "step" : false }, step)),
    );
    this.#showShare(found);
    drawCurves(this.#curves, found);
    setText(this.#capacity, found.capacity.sentence ? `${found.capacity.sentence[0].toUpperCase()}${found.capacity.sentence.slice(1)}.` : "");
    this.#guards.replaceChildren(...Object.values(found.guards).map(guard));
    this.#history.replaceChildren(...found.history.slice(-40).reverse().map(past));
    this.#offer(found.actions.filter((action) => MOVES.includes(action) && !(OVER.includes(found.state) && action === "abort")));
    this.#differences.use(name, found);
  }

  #showShare({ share, stable, candidate, state, shadow }) {
    const given = OVER.includes(state) ? [["stable", stable, 1]] : [["stable", stable, 1 - share], ["candidate", candidate, share]];
    const parts = given.filter(([, , part]) => part > 0);
    const bars = parts.map(([side, , part]) => {
      const piece = el("i", { "data-part": side });
      piece.style.flexGrow = String(part);
      return piece;
    });
    const words = parts.map(([side, version, part]) => [side, `version ${version} answers ${percent(part)}`]);
    if (shadow > 0) words.push(["candidate", `version ${candidate} is shown ${percent(shadow)}, as far as there is room`]);
    this.#bar.setAttribute("aria-label", words.map(([, text]) => text).join(", "));
    this.#bar.replaceChildren(...bars);
    this.#legend.replaceChildren(...words.map(([side, text]) => el("li", { "data-part": side }, text)));
  }

  #showVersions(bounds, windowOf) {
    const { stable, candidate, state } = this.#found;
    const sides = OVER.includes(state) ? [[stable, "serves"]] : [[stable, "stable"], [candidate, "candidate"]];
    const lines = sides.map(([version, side]) => {
      const recent = windowOf(version);
      const facts = [rate(recent ? recent.ok / recent.seconds : null), `p99 ${recent ? milliseconds(percentile(recent, bounds, 0.99)) : NOTHING}`];
      return el("p", { "data-part": side === "candidate" ? "candidate" : "stable" }, el("b", {}, `Version ${version}`), ` ${side} `, el("span", { class: "figure" }, facts.join(" · ")));
    });
    this.#versions.replaceChildren(...lines);
  }

  // ---- what somebody may do

  #offer(actions) {
    const shown = [...this.#buttons.children].map((button) => button.dataset.action);
    if (shown.join() === actions.join()) return; // whoever is about to press one is left alone
    if (!actions.includes(this.#action)) this.#form.hidden = true;
    this.#buttons.replaceChildren(
      ...actions.map((action) => {
        const button = el("button", { class: "button", type: "button", "data-action": action }, titled(action));
        button.addEventListener("click", () => this.#confirm(action));
        return button;
      }),
    );
  }

  #confirm(action) {
    this.#action = action;
    const { candidate } = this.#found;
    const cancel = el("button", { class: "button", type: "button" }, "Cancel");
    cancel.addEventListener("click", () => {
      this.#form.hidden = true;
    });
    this.#reason.value = "";
    this.#form.replaceChildren(
      el("p", {}, `${titled(action)} version ${candidate} of `, el("bdi", {}, this.#model), `? ${sure(action)}`),
      this.#reason,
      el("div", { class: "actions" }, el("button", { class: "button primary", type: "submit" }, `Yes, ${action}`), cancel),
      el("p", { class: "said", role: "alert" }),
    );
    this.#form.hidden = false;
    this.#reason.focus();
  }

  async #send() {
    const [name, action] = [this.#model, this.#action];
    const said = this.#form.querySelector(".said");
    setText(said, "Asking …");
    try {
      const response = await fetch(rolloutPath(name), {
        method: "POST",
        headers: keyed({ "content-type": "application/json" }),
        body: JSON.stringify({ action, reason: this.#reason.value.trim() }),
      });
      const found = await response.json();
      if (response.ok) {
        this.#form.hidden = true;
        this.#take(name, found);
        return;
      }
      setText(said, found.error ?? `HTTP status ${response.status}`);
      if (response.status === 401 || (response.status === 403 && hasKey())) this.#wantKey();
    } catch {
      setText(said, "No answer. It may have been done all the same: look at the state.");
    }
  }

  #wantKey() {
    this.#key.ask("This takes an admin key. It is kept in this tab only, and forgotten with it.");
  }
}

const titled = (word) => `${word[0].toUpperCase()}${word.slice(1)}`;

/** Where next to nothing happens to anybody, it is the rare part that closes in. */
function guard({ name, limit, low, high, verdict, sentence: said, rare }) {
  const seldom = high === null && low === 0 && typeof rare === "number";
  const known = limit !== null && (seldom || low > 0 || high !== null);
  const where = !known ? null : span(seldom ? { low: 0, high: rare, limit: RARE } : { low, high, limit });
  const band = el("i", { class: "band" });
  if (where) {
    band.style.left = `${where.from.toFixed(2)}%`;
    band.style.width = `${where.wide.toFixed(2)}%`;
  }
  return el(
    "li",
    { "data-verdict": verdict },
    el("b", {}, name),
    el("span", { class: "word", "data-tone": { breach: "bad", proven: "good" }[verdict] ?? "quiet" }, verdict),
    where ? el("div", { class: "range", role: "img", "aria-label": `${name}: ${said}` }, band, el("i", { class: "edge" })) : null,
    where ? el("span", { class: "hint edge-label" }, seldom ? `proven at ${percent(RARE)} of its responses` : `limit ${limited(name, limit)}`) : null,
    el("span", { class: "hint" }, said),
  );
}

function past({ time, to, step, why }) {
  const at = new Date(time * 1000);
  const state = step ? `${to} ${step}` : to;
  return el("li", {}, el("time", { class: "figure", datetime: at.toISOString() }, at.toLocaleString()), el("b", {}, state), el("span", {}, why));
}

/** Both as lines over the batch size; the promise, if it is near. */
function drawCurves(node, { curves, stable, candidate }) {
  const known = [["stable", curves[stable]], ["candidate", curves[candidate]]].filter(([, curve]) => curve?.points.length);
  node.toggleAttribute("hidden", !known.length);
  if (!known.length) return;
  const largest = Math.max(...known.flatMap(([, curve]) => curve.points.map(([size]) => size)), 2);
  const lines = known.map(([side, { points }]) => [side, points.length > 1 ? points : [1, largest].map((size) => [size, timeAt(points, size)])]);
  const most = Math.max(...lines.flatMap(([, corners]) => corners.map(([, ms]) => ms)));
  const x = (size) => 40 + (size / largest) * (WIDTH - 50);
  const y = (ms) => HEIGHT - 18 - (ms / most) * (HEIGHT - 32);
  const drawn = lines.map(([side, corners]) => svg("path", { class: side, d: `M${corners.map(([size, ms]) => `${x(size).toFixed(1)} ${y(ms).toFixed(1)}`).join("L")}` }));
  const words = (text, at, level, anchor) => svg("text", { x: at, y: level, "text-anchor": anchor }, text);
  const grid = svg("path", { class: "grid-line", d: `M40 ${y(0)}H${WIDTH - 10}M40 ${y(most)}H${WIDTH - 10}` });
  const axis = [words(milliseconds(most), 36, y(most) + 4, "end"), words("0", 36, y(0) + 4, "end"), words(`batches of up to ${number(largest)}`, WIDTH - 10, HEIGHT - 4, "end")];
  node.replaceChildren(grid, ...axis, ...drawn);
  const carries = known.map(([side, { capacity_rps: most_rps }]) => `${side} ${most_rps ? rate(most_rps) : NOTHING}`);
  node.setAttribute("aria-label", `Time of a batch by its size. Within the SLO: ${carries.join(", ")}`);
}
