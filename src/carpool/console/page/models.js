// The list of models. Rows are kept and changed in place, so that focus and scrolling survive every poll.

import { el, find, setText, setTone } from "./dom.js";
import { milliseconds, NOTHING, rate } from "./format.js";
import { taskName } from "./health.js";

const FILTER_FROM = 10;

export const keyOf = (model) => `${model.name}/${model.version}`;

export class ModelList {
  #list = find("model-list");
  #filter = find("model-filter");
  #empty = find("models-empty");
  #rows = new Map();
  #onSelect;

  constructor(onSelect) {
    this.#onSelect = onSelect;
    this.#filter.addEventListener("input", () => this.#applyFilter());
  }

  /** `lines` are models with their health and rate; `leftOut` is how many the server did not list. */
  show(lines, selected, leftOut) {
    const present = new Set(lines.map(({ model }) => keyOf(model)));
    for (const [key, row] of this.#rows) {
      if (present.has(key)) continue;
      row.item.remove();
      this.#rows.delete(key);
    }
    lines.forEach((line, index) => this.#update(line, index, selected));
    this.#filter.hidden = lines.length < FILTER_FROM;
    this.#applyFilter();
    const more = leftOut ? `and ${leftOut} more` : "";
    setText(this.#empty, lines.length ? more : "None yet.");
    this.#empty.hidden = lines.length > 0 && !leftOut;
  }

  #update({ model, health, perSecond }, index, selected) {
    const key = keyOf(model);
    let row = this.#rows.get(key);
    if (!row) {
      row = newRow(model, () => this.#onSelect(key));
      this.#rows.set(key, row);
    }
    if (this.#list.children[index] !== row.item) this.#list.insertBefore(row.item, this.#list.children[index] ?? null);
    if (row.input.checked !== (key === selected)) row.input.checked = key === selected;
    setText(row.health, health.word);
    setTone(row.health, health.tone);
    setText(row.rate, perSecond === null ? "" : rate(perSecond));
    const about = [`v${model.version || NOTHING}`];
    if (model.state === "READY") about.push(taskName(model.task).toLowerCase());
    if (model.slo_ms) about.push(milliseconds(model.slo_ms));
    setText(row.about, about.join(" · "));
  }

  #applyFilter() {
    const wanted = this.#filter.hidden ? "" : this.#filter.value.trim().toLowerCase();
    for (const [key, row] of this.#rows) row.item.hidden = !key.toLowerCase().includes(wanted);
  }
}

function newRow(model, select) {
  const input = el("input", { type: "radio", name: "model", class: "unseen" });
  const health = el("span", { class: "word", "data-tone": "quiet" });
  const perSecond = el("span", { class: "figure" });
  const about = el("span", { class: "hint" });
  const label = el(
    "label",
    {},
    input,
    el("span", { class: "model-row" }, el("bdi", { class: "name" }, model.name), health, about, perSecond),
  );
  input.addEventListener("change", select);
  return { item: el("li", {}, label), input, health, rate: perSecond, about };
}
