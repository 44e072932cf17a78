// A pipeline's promise as one bar, cut into its steps: what each of them takes on average, and what is left.

import { el, find, setText } from "./dom.js";
import { milliseconds, number } from "./format.js";
import { card } from "./live.js";
import { stackBar } from "./stack.js";

const PHASES = [
  ["between", "decode", "cut"],
  ["queue", "queue", "wait"],
  ["infer", "infer", "model"],
];

export class PipelinePanel {
  #card = card("One SLO, step by step", "wide");
  #bar = el("div", { class: "stack", role: "img" });
  #legend = el("ul", { class: "legend" });
  #steps = el("ul", { class: "kinds" });

  constructor() {
    this.#card.node.id = "pipeline";
    this.#card.node.hidden = true;
    this.#card.body.append(this.#bar, this.#legend, this.#steps);
    find("live-grid").append(this.#card.node);
  }

  /** Models without steps have no such panel. */
  show({ model, slo }) {
    const steps = model.steps ?? [];
    this.#card.node.hidden = !steps.length;
    if (!steps.length) return;
    const parts = promiseParts(steps, slo);
    const taken = parts.filter((part) => part.name !== "network").reduce((sum, part) => sum + part.ms, 0);
    setText(this.#card.note, slo ? `${milliseconds(taken)} of ${milliseconds(slo)} on average` : `${milliseconds(taken)} on average`);
    stackBar(this.#bar, this.#legend, parts);
    this.#steps.replaceChildren(
      ...steps.map((step) => {
        const images = step.fan_out.count ? `${number(step.fan_out.sum / step.fan_out.count)} images per request` : "the whole image";
        const later = step.later_s ? `leaves ${milliseconds(step.later_s * 1e3)} to later steps` : "";
        return el("li", {}, el("span", {}, step.step), el("span", { class: "hint" }, images), el("span", { class: "hint" }, later));
      }),
    );
  }
}

/** What a request spends in each phase of each step, in milliseconds, and last what its promise leaves. */
export function promiseParts(steps, slo) {
  const parts = [];
  for (const step of steps) {
    for (const [phase, name, word] of PHASES) {
      const { count, sum } = step[phase];
      if (count) parts.push({ name, label: `${step.step}: ${word}`, ms: (1e3 * sum) / count });
    }
  }
  const taken = parts.reduce((sum, part) => sum + part.ms, 0);
  if (slo) parts.push({ name: "network", label: "Left", ms: Math.max(0, slo - taken) });
  const whole = Math.max(taken, slo ?? 0) || 1;
  return parts.map((part) => ({ ...part, share: part.ms / whole }));
}
