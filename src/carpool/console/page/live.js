// The charts of one model: percentiles over time, batch sizes, rejections by reason, where the time goes.

import { barChart, lineChart, shareFromRight } from "./charts.js";
import { el, find, setText, svg } from "./dom.js";
import { clockTime, count, milliseconds, NOTHING, number, percent, rate } from "./format.js";
import { labels, mean, total } from "./histogram.js";
import { sumOf } from "./history.js";
import { meaning, meaningPage } from "./refusals.js";
import { stackBar } from "./stack.js";
import { percentile } from "./tiles.js";

const LINES = [["p50", 0.5], ["p90", 0.9], ["p99", 0.99]];

export class LivePanel {
  #latency = card("Latency", "wide");
  #batch = card("Batch sizes");
  #time = card("Where the time goes");
  #refusals = card("Rejected", "wide");
  #chart = svg("svg", { class: "chart tall", role: "img" });
  #bars = svg("svg", { class: "chart tall", role: "img" });
  #legend = el("ul", { class: "legend lines" });
  #stack = el("div", { class: "stack", role: "img" });
  #stackLegend = el("ul", { class: "legend" });
  #reasons = el("ul", { class: "reasons" });
  #nothing = el("li", { class: "hint" });
  #known = new Map(); // lines of reasons, by word

  #span = 120;
  /** Told where somebody points in the chart: how many seconds before its end. */
  pointed = () => {};

  constructor() {
    this.#chart.addEventListener("click", (event) => {
      const share = shareFromRight(this.#chart, event.offsetX);
      if (share !== null) this.pointed(share * this.#span);
    });
    this.#latency.body.append(this.#legend, this.#chart);
    this.#batch.body.append(this.#bars);
    this.#time.body.append(this.#stack, this.#stackLegend);
    this.#refusals.body.append(this.#reasons);
    const cards = [this.#latency, this.#batch, this.#refusals, this.#time];
    find("live-grid").append(...cards.map(({ node }) => node));
  }

  show(view) {
    this.#showLatency(view);
    this.#showBatches(view);
    this.#showTime(view);
    this.#showRefusals(view);
  }

  #showLatency({ history, recent, bounds, slo, span, seconds, end }) {
    const now = LINES.map(([name, q]) => [name, percentile(recent, bounds, q)]);
    this.#legend.replaceChildren(
      ...now.map(([name, value]) => el("li", { class: name }, name, el("b", { class: "figure" }, milliseconds(value)))),
    );
    const series = LINES.map(([name, q]) => ({
      name,
      points: history.series(span, seconds, (period) => percentile(period, bounds, q), end),
    }));
    lineChart(this.#chart, series, { span, limit: slo, format: milliseconds, end: history.clock(end) });
    this.#span = span;
    const said = now.map(([name, value]) => `${name} ${milliseconds(value)}`).join(", ");
    this.#chart.setAttribute("aria-label", `Latency: ${said}${slo ? `; SLO ${milliseconds(slo)}` : ""}`);
    const answers = recent ? total(recent.request.buckets) : 0;
    setText(this.#latency.note, answers ? `${count(answers, "answer")} in ${covered(recent)}` : `no answers in ${covered(recent) || NOTHING}`);
  }

  #showBatches({ minute, bounds, model }) {
    const limit = model.max_batch || 1;
    const names = labels(bounds.batch);
    const fits = bounds.batch.findIndex((bound) => bound >= limit);
    const shown = fits < 0 ? names.length : fits + 1;
    const buckets = minute?.batch.buckets ?? names.map(() => 0);
    barChart(this.#bars, names.slice(0, shown).map((name, index) => ({ name, value: buckets[index] })));
    const average = minute ? mean(minute.batch) : null;
    const over = covered(minute);
    const note = average === null ? `no batches in ${over || NOTHING}` : `mean ${number(average)} of at most ${limit}, in ${over}`;
    setText(this.#batch.note, note);
    this.#bars.setAttribute("aria-label", `Batch sizes: ${note}`);
  }

  #showTime({ minute }) {
    const whole = minute ? mean(minute.request) : null;
    if (whole === null) {
      setText(this.#time.note, `no answers in ${covered(minute) || NOTHING}`);
      stackBar(this.#stack, this.#stackLegend, []);
      return;
    }
    const queue = mean(minute.queue) ?? 0;
    const infer = mean(minute.infer) ?? 0;
    const parts = [
      { name: "queue", label: "Wait", ms: queue * 1000 },
      { name: "infer", label: "Model", ms: infer * 1000 },
      { name: "post", label: "The rest", ms: Math.max(0, whole - queue - infer) * 1000 },
    ];
    const sum = parts.reduce((all, part) => all + part.ms, 0) || 1;
    stackBar(this.#stack, this.#stackLegend, parts.map((part) => ({ ...part, share: part.ms / sum })));
    setText(this.#time.note, `mean ${milliseconds(whole * 1000)}, in ${covered(minute)}`);
  }

  #showRefusals({ recent, minute }) {
    const sheds = minute?.sheds ?? {};
    const all = sumOf(sheds);
    const lately = recent?.sheds ?? {};
    const rows = Object.entries(sheds).sort((a, b) => b[1] - a[1]);
    const shown = rows.map(([word, times]) => {
      const reason = this.#reason(word);
      setText(reason.now, rate((lately[word] ?? 0) / (recent?.seconds || 1)));
      setText(reason.share, percent(times / all));
      return reason.item;
    });
    setText(this.#nothing, minute ? `Nothing was rejected in ${covered(minute)}.` : NOTHING);
    this.#list(shown.length ? shown : [this.#nothing]);
    const asked = all + (minute?.ok ?? 0);
    setText(this.#refusals.note, all ? `${count(all, "request")}, ${percent(all / asked)} of those in ${covered(minute)}` : "");
  }

  #reason(word) {
    if (!this.#known.has(word)) {
      const now = el("span", { class: "figure" });
      const share = el("span", { class: "hint figure" });
      const item = el("li", {}, el("a", { href: meaningPage(word) }, word), el("p", { class: "hint" }, meaning(word)), now, share);
      this.#known.set(word, { item, now, share });
    }
    return this.#known.get(word);
  }

  /** Links stay in place while only figures change: a click is lost whose link goes between press and release. */
  #list(items) {
    const before = [...this.#reasons.children];
    if (before.length !== items.length || items.some((item, index) => item !== before[index])) this.#reasons.replaceChildren(...items);
  }
}

/** Which time a figure is of: so many seconds, and when they ended. */
export const covered = (period) => (period ? `the ${number(period.seconds)} s to ${clockTime(period.to)}` : "");

export function card(title, more = "") {
  const note = el("span", { class: "hint" });
  const body = el("div", { class: "card-body" });
  const head = el("header", {}, el("h3", {}, title), note);
  return { node: el("article", { class: `panel card ${more}` }, head, body), body, note };
}
