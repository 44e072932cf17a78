// What a model's cache did since it was loaded: hits by kind, what is kept, and how often they would be wrong.

import { el, find, setText } from "./dom.js";
import { bytes, count, percent } from "./format.js";
import { sumOf } from "./history.js";
import { card } from "./live.js";

const KINDS = [
  ["hit", "The same request"],
  ["similar", "The same scene"],
  ["joined", "Joined another"],
  ["shared", "From other servers"],
  ["miss", "Computed"],
  ["bypass", "Not looked up"],
];
const COMPUTED = ["miss", "bypass"];

export class CachePanel {
  #card = card("Cached responses", "wide");
  #kinds = el("ul", { class: "kinds" });
  #audit = el("p", { class: "hint" });

  constructor() {
    this.#card.node.id = "cache";
    this.#card.node.hidden = true;
    this.#card.body.append(this.#kinds, this.#audit);
    find("live-grid").append(this.#card.node);
  }

  /** Models without a cache have no such panel. */
  show({ model, latest }) {
    const cache = model.cache ? latest?.cache : null;
    this.#card.node.hidden = !cache;
    if (!cache) return;
    const all = sumOf(cache.requests);
    const computed = COMPUTED.reduce((sum, kind) => sum + (cache.requests[kind] ?? 0), 0);
    const saved = all ? `${percent((all - computed) / all)} answered without the model` : "nothing was asked yet";
    setText(this.#card.note, `${saved} · ${count(cache.entries, "answer")}, ${bytes(cache.bytes)}`);
    const rows = KINDS.filter(([kind]) => cache.requests[kind]);
    this.#kinds.replaceChildren(
      ...rows.map(([kind, words]) => {
        const times = cache.requests[kind];
        const figures = [el("span", { class: "figure" }, String(times)), el("span", { class: "hint figure" }, percent(times / all))];
        return el("li", {}, el("span", {}, words), ...figures);
      }),
    );
    setText(this.#audit, auditWords(cache));
  }
}

function auditWords({ audits, wrong, sources_off: off }) {
  const trials = (audits.same ?? 0) + (audits.differs ?? 0);
  const lines = [];
  if (wrong) {
    const [low, high] = wrong.map((share) => percent(share));
    lines.push(`Of ${count(trials, "audited answer")} ${audits.differs ?? 0} differed: ${low} to ${high} of all would.`);
  }
  if (audits["exact-differs"]) lines.push("The same request was answered differently: this model is not always the same.");
  if (off) lines.push(`${count(off, "source")} differed too often and is computed for now.`);
  return lines.join(" ");
}
