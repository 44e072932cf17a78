// Pictures that the two versions answered differently, side by side, the worst first; asked for when somebody looks.

import { drawable, rendered, summary } from "./answers.js";
import { el, setText } from "./dom.js";
import { count, percent } from "./format.js";
import { keyed } from "./key.js";
import { Overlay } from "./overlay.js";

const LISTED = 8;

export class Differences {
  node = el("details", { class: "differences", hidden: true });
  #title = el("summary", {}, "Images that differ");
  #says = el("p", { class: "hint", role: "status" });
  #list = el("ol");
  #again = el("button", { class: "button", type: "button" }, "Look again");
  #name = null;
  #urls = [];
  #onKey;

  /** `onKey` is called when the server wants another key for them. */
  constructor(onKey) {
    this.#onKey = onKey;
    this.node.append(this.#title, this.#says, this.#list, this.#again);
    this.node.addEventListener("toggle", () => this.#load());
    this.#again.addEventListener("click", () => this.#load());
  }

  /** Of this model; null is none. */
  use(name, found) {
    const counts = found?.counts;
    this.node.hidden = !counts || (!counts.compared && !counts.seen);
    if (counts) setText(this.#title, `Images that differ: ${count(counts.differ, "image")} of ${count(counts.compared, "comparison")}`);
    if (name === this.#name) return;
    this.#name = name;
    this.node.open = false;
    this.#forget();
  }

  #forget() {
    for (const url of this.#urls) URL.revokeObjectURL(url);
    this.#urls = [];
    this.#list.replaceChildren();
    setText(this.#says, "");
  }

  async #load() {
    if (!this.node.open || !this.#name) return;
    const name = this.#name;
    setText(this.#says, "Asking …");
    try {
      const response = await this.#fetch(name, `?limit=${LISTED}`);
      const found = await response.json();
      if (name !== this.#name) return;
      this.#forget();
      if (!response.ok) {
        setText(this.#says, found.error ?? `HTTP status ${response.status}`);
        if (response.status === 401 || response.status === 403) this.#onKey();
        return;
      }
      const lines = found.disagreements;
      const none = found.kept ? "None is kept yet." : `None is kept: ${found.why}.`;
      setText(this.#says, lines.length ? "The worst first." : none);
      this.#list.append(...lines.map((line) => this.#pair(name, line)));
    } catch {
      setText(this.#says, "No answer.");
    }
  }

  #fetch(name, rest) {
    return fetch(`/v2/models/${encodeURIComponent(name)}/rollout/disagreements${rest}`, { cache: "no-store", headers: keyed() });
  }

  #pair(name, line) {
    const sides = [[line.versions[0], line.stable], [line.versions[1], line.candidate]].map(([version, answer]) => side(version, answer));
    if (line.file) this.#show(name, line.number, sides);
    const source = line.source ? [" · ", el("bdi", {}, line.source)] : [];
    const head = el("p", {}, el("b", { class: "figure" }, percent(line.how_much)), ` ${line.why}`, ...source);
    return el("li", {}, head, el("div", { class: "pair" }, ...sides.map(({ node }) => node)));
  }

  /** Fetched by hand: the key goes in a header, which an <img> does not send. */
  async #show(name, index, sides) {
    try {
      const response = await this.#fetch(name, `/${index}`);
      if (!response.ok) return;
      const url = URL.createObjectURL(new Blob([await response.arrayBuffer()]));
      this.#urls.push(url);
      for (const { show } of sides) show(url);
    } catch {
      // the answers are there without it
    }
  }
}

/** One version's answer: the picture with what it found drawn over it, and the same in words. */
function side(version, answer) {
  const image = el("img", { alt: "" });
  const canvas = el("canvas", { width: 1, height: 1, hidden: true });
  const drawing = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  drawing.setAttribute("role", "img");
  const stage = el("div", { class: "stage", hidden: true }, image, canvas, drawing);
  const things = answer ? drawable(answer) : [];
  const said = answer ? summary(answer, things) : "Its tensors are not kept.";
  const list = answer && !things.length ? rendered(answer, things, () => {}) : null;
  const node = el("figure", {}, el("figcaption", {}, el("b", {}, `Version ${version}`), ` ${said}`), stage, list);
  const show = (url) => {
    image.src = url;
    stage.hidden = false;
    const { width, height } = answer?.image ?? {};
    if (width > 0 && height > 0) new Overlay(stage, drawing, canvas).show({ width, height }, things, said, answer.depth?.png ?? answer.anomaly?.map.png ?? null);
  };
  return { node, show };
}
