// The panel of the promise: the batch curve, the settings in force and why, and whether what was measured still holds.

import { rows, operatingPoint } from "./curve.js";
import { CurveChart } from "./curve_chart.js";
import { absence, described, drift, line, operating, reasons, settings } from "./curve_words.js";
import { el, find, setText, setTone, svg } from "./dom.js";
import { milliseconds, NOTHING, number } from "./format.js";

const WAITING = "Asking the engine for the curve …";

export class CurvePanel {
  #node = svg("svg", { class: "chart curve-chart", role: "img" });
  #chart = new CurveChart(this.#node);
  #legend = el("ul", { class: "legend marks" });
  #settings = el("dl", { class: "settings" });
  #why = el("ul", { class: "why" });
  #drift = find("curve-drift");
  #body = el("tbody");
  #shown = "";

  constructor() {
    find("curve-picture").append(this.#legend, this.#node);
    find("curve-settings").append(this.#settings);
    find("curve-why").append(this.#why);
    const titles = ["images", "measured", "estimate now", "last 10 s"];
    find("curve-numbers").append(
      el("table", {}, el("thead", {}, el("tr", {}, ...titles.map((title) => el("th", { scope: "col" }, title)))), this.#body),
    );
  }

  /** `profile` is what the engine last said of this model, or null. One that writes has no batches. */
  show({ model, slo, profile, latest }) {
    const writes = Boolean(latest?.text) || Boolean(profile?.step);
    this.#drift.closest("section").hidden = writes;
    if (writes) return;
    const why = absence(model) || WAITING;
    this.#chart.show(profile, slo, why);
    const point = profile && operatingPoint(profile);
    this.#node.setAttribute("aria-label", profile ? described(profile, slo, point) : why);
    this.#showLegend(profile, point);
    this.#showSettings(settings(model, profile));
    this.#showWhy(reasons(model));
    const { text, tone } = profile ? drift(profile) : { text: "", tone: "quiet" };
    setText(this.#drift, text || " ");
    setTone(this.#drift, tone);
    this.#showNumbers(profile);
  }

  #showLegend(profile, point) {
    const marks = [
      ["measured", profile?.points.length ? "measured" : "", ""],
      ["believed", profile ? "estimate now" : "", ""],
      ["fit", profile ? "line" : "", profile ? line(profile.fit) : ""],
      ["now", profile ? (point ? "now" : "nothing ran lately") : "", point ? operating(point) : ""],
    ];
    const shown = marks.filter(([, name]) => name);
    this.#legend.replaceChildren(
      ...shown.map(([mark, name, value]) => el("li", { "data-mark": mark }, el("span", {}, name), value ? el("b", { class: "figure" }, value) : null)),
    );
  }

  #showSettings(pairs) {
    while (this.#settings.children.length > pairs.length) this.#settings.lastChild.remove();
    pairs.forEach(([name, value], index) => {
      const row = this.#settings.children[index] ?? this.#settings.appendChild(el("div", {}, el("dt"), el("dd", { class: "figure" })));
      setText(row.children[0], name);
      setText(row.children[1], value);
    });
  }

  /** Only when they change: whoever reads or selects them is left alone. */
  #showWhy(sentences) {
    const text = sentences.join("\n");
    if (text === this.#shown) return;
    this.#shown = text;
    this.#why.replaceChildren(...sentences.map((sentence) => el("li", {}, sentence)));
  }

  #showNumbers(profile) {
    if (!find("curve-numbers").open) return; // nobody looks; the picture has its own words
    const ms = (value) => (value === null ? NOTHING : milliseconds(value));
    const ran = (found) => (found ? `${number(found.batches)} × ${milliseconds(found.ms)}` : NOTHING);
    const lines = profile ? rows(profile).map((row) => [String(row.size), ms(row.measured), ms(row.believed), ran(row.ran)]) : [];
    this.#body.replaceChildren(...lines.map((cells) => el("tr", {}, ...cells.map((cell) => el("td", { class: "figure" }, cell)))));
  }
}
