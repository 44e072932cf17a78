// A model that writes its answers token by token: its slots over the last minute, and how soon the first token comes.

import { el, find, setText, svg } from "./dom.js";
import { milliseconds, number, rate } from "./format.js";
import { quantile } from "./histogram.js";
import { card } from "./live.js";

const SPAN_S = 60;
const SMOOTH_S = 3; // tokens per second over less than this flicker

export class WritingPanel {
  #card = card("Slots", "wide");
  #strip = svg("svg", { class: "strip", role: "img" });
  #legend = el("ul", { class: "legend" });
  #why = el("ul", { class: "why" });

  constructor() {
    this.#card.node.id = "writing";
    this.#card.node.hidden = true;
    this.#card.body.append(this.#strip, this.#legend, this.#why);
    find("live-grid").prepend(this.#card.node);
  }

  /** Other models have no such panel. */
  show({ model, latest, history, recent, bounds, profile, seconds, end }) {
    const text = latest?.text;
    this.#card.node.hidden = !text;
    if (!text) return;
    const slots = text.used + text.free;
    const used = `${number(text.used)} of ${number(slots)} in use`;
    setText(this.#card.note, `${used}, last 60 s`);
    this.#draw(history.series(SPAN_S, 0, (period) => (period?.text ? period.text.used / slots : null), end));
    const short = history.window(SMOOTH_S, end);
    const tokens = short?.text ? short.text.tokens / short.seconds : null;
    const first = recent?.text ? quantile(recent.text.first.buckets, bounds.seconds, 0.99) : null;
    const promised = profile?.ttft_ms ? `, SLO ${milliseconds(profile.ttft_ms)}` : "";
    const figures = [
      ["Tokens", rate(tokens)],
      ["First token, p99", `${milliseconds(first && first.value * 1000)} in ${seconds} s${promised}`],
      ["Waiting", number(latest.pending)],
    ];
    this.#legend.replaceChildren(...figures.map(([name, value]) => el("li", {}, name, el("b", { class: "figure" }, value))));
    const said = figures.map(([name, value]) => `${name}: ${value}`).join("; ");
    this.#strip.setAttribute("aria-label", `Slots: ${used}. ${said}`);
    this.#showWhy(model.choices ?? []);
  }

  /** A column for each second: from below, what was in use. */
  #draw(points) {
    const [width, height] = [this.#strip.clientWidth || 480, this.#strip.clientHeight || 40];
    const column = width / SPAN_S;
    const known = points.filter((point) => point.value);
    const drawn = known.map(({ age, value }) => {
      const tall = Math.max(1, Math.min(1, value) * height);
      return svg("rect", { class: "plus", x: width - (age + 1) * column, y: height - tall, width: Math.max(1, column - 0.5), height: tall });
    });
    this.#strip.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.#strip.replaceChildren(...drawn);
  }

  /** Only when they change: whoever reads or selects them is left alone. */
  #showWhy(sentences) {
    if (sentences.join("\n") === [...this.#why.children].map((node) => node.textContent).join("\n")) return;
    this.#why.replaceChildren(...sentences.map((sentence) => el("li", {}, sentence)));
  }
}
