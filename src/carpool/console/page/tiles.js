// The row of key figures: each a number, what it means, and its last two minutes.

import { spark } from "./charts.js";
import { el, find, setText, setTone, svg } from "./dom.js";
import { milliseconds, NOTHING, number, percent, rate } from "./format.js";
import { quantile, shareWithin } from "./histogram.js";
import { sumOf } from "./history.js";

export const SPAN_S = 120;
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
    read: ({ short }) => ({ text: rate(answered(short)), note: "requests" }),
    series: ({ history }) => ({ points: history.series(SPAN_S, SMOOTH_S, answered) }),
  },
  {
    name: "p99",
    read: ({ recent, bounds, slo }) => {
      const value = percentile(recent, bounds, 0.99);
      const tone = slo && value > slo ? "warn" : "";
      return { text: milliseconds(value), note: slo ? `promise ${milliseconds(slo)}` : "no promise", tone };
    },
    series: ({ history, bounds, slo, seconds }) => ({
      points: history.series(SPAN_S, seconds, (period) => percentile(period, bounds, 0.99)),
      limit: slo,
    }),
  },
  {
    name: "In time",
    read: ({ minute, bounds, slo }) => {
      const share = kept(minute, bounds, slo);
      const note = slo ? "of answers, last 60 s" : "no promise";
      return { text: percent(share), note, tone: share !== null && share < 0.99 ? "warn" : "" };
    },
    series: ({ history, bounds, slo }) => ({
      points: history.series(SPAN_S, 10, (period) => kept(period, bounds, slo)),
      most: 1,
    }),
  },
  {
    name: "Refused",
    read: ({ short, recent }) => {
      const value = refused(short);
      return { text: rate(value), note: (recent && mainReason(recent.sheds)) || "nothing", tone: value ? "warn" : "" };
    },
    series: ({ history }) => ({ points: history.series(SPAN_S, SMOOTH_S, refused) }),
  },
  {
    name: "Waiting",
    read: ({ latest }) => ({ text: latest ? number(latest.pending) : NOTHING, note: "in the queue" }),
    series: ({ history }) => ({ points: history.series(SPAN_S, 0, (period) => period?.pending ?? null) }),
  },
  {
    name: "Saturation",
    read: ({ latest, slo }) => {
      if (!slo || !latest) return { text: NOTHING, note: slo ? "of the time to wait" : "no promise" };
      const tone = latest.saturation >= 0.9 ? "warn" : "";
      return { text: percent(Math.min(1, latest.saturation)), note: "of the time to wait", tone };
    },
    series: ({ history, slo }) => ({
      points: slo ? history.series(SPAN_S, 0, (period) => period?.saturation ?? null) : [],
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
      spark(tile.spark, points, { span: SPAN_S, most: highest, limit });
    }
  }
}

function newTile(name) {
  const value = el("strong", { class: "figure" }, NOTHING);
  const note = el("span", { class: "hint" }, " ");
  const line = svg("svg", { class: "spark", "aria-hidden": "true" });
  return { item: el("li", {}, el("span", { class: "tile-name" }, name), value, note, line), value, note, spark: line };
}
