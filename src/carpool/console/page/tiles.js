// The row of key figures: each a number, what it means, and how it went over the time that is looked at.

import { spark } from "./charts.js";
import { el, find, setText, setTone, svg } from "./dom.js";
import { milliseconds, NOTHING, number, percent, rate } from "./format.js";
import { quantile, shareWithin } from "./histogram.js";
import { sumOf } from "./history.js";

const SMOOTH_S = 3; // rates over less than this flicker

const perSecond = (part) => (period) => (period ? part(period) / period.seconds : null);
const answered = perSecond((period) => period.ok);
const refused = perSecond((period) => sumOf(period.sheds));

export function percentile(period, bounds, q) {
  const found = period ? quantile(period.request.buckets, bounds.seconds, q) : null;
  return found && found.value * 1000;
}

function kept(period, bounds, slo) {
  return period && slo ? shareWithin(period.request.buckets, bounds.seconds, slo / 1000) : null;
}

/** The most frequent reason among sheds. */
export const mainReason = (sheds) => Object.entries(sheds).sort((a, b) => b[1] - a[1])[0]?.[0] ?? "";

const TILES = [
  {
    name: "Answered",
    read: ({ short }) => ({ text: rate(answered(short)), note: "mean of 3 s" }),
    series: ({ history, span, end }) => ({ points: history.series(span, SMOOTH_S, answered, end) }),
  },
  {
    name: "p99",
    read: ({ recent, bounds, slo, seconds }) => {
      const value = percentile(recent, bounds, 0.99);
      const tone = slo && value > slo ? "warn" : "";
      return { text: milliseconds(value), note: `${seconds} s, ${slo ? `SLO ${milliseconds(slo)}` : "no SLO"}`, tone };
    },
    series: ({ history, span, end, bounds, slo, seconds }) => ({
      points: history.series(span, seconds, (period) => percentile(period, bounds, 0.99), end),
      limit: slo,
    }),
  },
  {
    name: "Within SLO",
    read: ({ minute, bounds, slo }) => {
      const share = kept(minute, bounds, slo);
      const note = slo ? "of responses, 60 s" : "no SLO";
      return { text: percent(share), note, tone: share !== null && share < 0.99 ? "warn" : "" };
    },
    series: ({ history, span, end, bounds, slo }) => ({
      points: history.series(span, 10, (period) => kept(period, bounds, slo), end),
      most: 1,
    }),
  },
  {
    name: "Rejected",
    read: ({ short, recent }) => {
      const value = refused(short);
      return { text: rate(value), note: (recent && mainReason(recent.sheds)) || "mean of 3 s", tone: value ? "warn" : "" };
    },
    series: ({ history, span, end }) => ({ points: history.series(span, SMOOTH_S, refused, end) }),
  },
  {
    name: "Waiting",
    read: ({ short }) => ({ text: short ? number(short.pending) : NOTHING, note: "in the queue" }),
    series: ({ history, span, end }) => ({ points: history.series(span, 0, (period) => period?.pending ?? null, end) }),
  },
  {
    name: "Saturation",
    read: ({ short, slo }) => {
      if (!slo || !short) return { text: NOTHING, note: slo ? "of the allowed wait" : "no SLO" };
      const tone = short.saturation >= 0.9 ? "warn" : "";
      return { text: percent(Math.min(1, short.saturation)), note: "of the allowed wait", tone };
    },
    series: ({ history, span, end, slo }) => ({
      points: slo ? history.series(span, 0, (period) => period?.saturation ?? null, end) : [],
      most: 1,
    }),
  },
];

export class Tiles {
  #tiles;

  constructor() {
    this.#tiles = TILES.map((kind) => ({ kind, ...newTile(kind.name) }));
    find("tiles").append(...this.#tiles.map((tile) => tile.item));
  }

  show(view) {
    for (const tile of this.#tiles) {
      const { text, note, tone = "" } = tile.kind.read(view);
      setText(tile.value, text);
      setText(tile.note, note);
      setTone(tile.value, tone);
      const { points, limit = null, most } = tile.kind.series(view);
      const highest = most ?? Math.max(...points.map((point) => point.value ?? 0), 0);
      spark(tile.spark, points, { span: view.span, most: highest, limit });
    }
  }
}

function newTile(name) {
  const value = el("strong", { class: "figure" }, NOTHING);
  const note = el("span", { class: "hint" }, " ");
  const line = svg("svg", { class: "spark", "aria-hidden": "true" });
  return { item: el("li", {}, el("span", { class: "tile-name" }, name), value, note, line), value, note, spark: line };
}
