// Small charts in SVG. They are drawn at the size they have on the screen, so that lines and letters stay sharp.

import { svg } from "./dom.js";
import { clockTime } from "./format.js";

const GAP_S = 3.5; // more than this between two points, and the line is broken

/** A number at or above `value` whose half is round as well. */
export function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.2, 1.6, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value * 0.999) * power;
}

/** Runs of points without a gap, as SVG paths. `points` have an age and a value; null values are gaps. */
export function paths(points, x, y) {
  const runs = [];
  let last = null;
  for (const point of points) {
    const known = point.value !== null && Number.isFinite(point.value);
    if (!known) {
      last = null;
      continue;
    }
    const joined = last !== null && last.age - point.age <= GAP_S;
    const place = `${x(point.age).toFixed(1)} ${y(point.value).toFixed(1)}`;
    if (joined) runs[runs.length - 1].push(place);
    else runs.push([place]);
    last = point;
  }
  return runs.map((run) => (run.length > 1 ? `M${run.join("L")}` : `M${run[0]}h0.01`)).join("");
}

/** A line without axes. `limit` draws the promise across it. */
export function spark(node, points, { span, most, limit = null }) {
  const [width, height] = [node.clientWidth || 160, node.clientHeight || 32];
  const top = Math.max(most, limit ?? 0) || 1;
  const x = (age) => width - 2 - (age / span) * (width - 2);
  const y = (value) => height - 2 - (Math.min(value, top) / top) * (height - 4);
  const line = paths(points, x, y);
  const drawn = [];
  if (limit !== null) drawn.push(svg("path", { class: "limit", d: `M0 ${y(limit).toFixed(1)}H${width}` }));
  if (line) drawn.push(svg("path", { class: "line", d: line }));
  resize(node, width, height).replaceChildren(...drawn);
}

/** Lines over the last `span` seconds with an axis, and the promise as a dashed line. */
export function lineChart(node, series, { span, limit, format, end = null }) {
  const [width, height] = [node.clientWidth || 480, node.clientHeight || 200];
  const box = chartBox(width, height);
  const values = series.flatMap(({ points }) => points.map((point) => point.value ?? 0));
  const top = roundUp(Math.max(...values, (limit ?? 0) * 1.15, 0) || 10);
  const x = (age) => box.right - (age / span) * (box.right - box.left);
  const y = (value) => box.bottom - (Math.min(value, top) / top) * (box.bottom - box.top);
  const drawn = [0, 0.5, 1].flatMap((share) => gridLine(box, y(top * share), format(top * share)));
  drawn.push(...timeLabels(box, height, x, span, end));
  const promised = limit === null ? [] : limitLine(box, y(limit), `SLO ${format(limit)}`);
  drawn.push(...promised.slice(0, 1));
  for (const { name, points } of series) drawn.push(svg("path", { class: `line ${name}`, d: paths(points, x, y) || "M0 0" }));
  resize(node, width, height).replaceChildren(...drawn, ...promised.slice(1)); // its words above all lines
}

function gridLine(box, y, label) {
  return [
    svg("path", { class: "grid-line", d: `M${box.left} ${y.toFixed(1)}H${box.right}` }),
    svg("text", { x: box.left - 8, y: y + 3.5, "text-anchor": "end" }, label),
  ];
}

function limitLine(box, y, label) {
  return [
    svg("path", { class: "limit", d: `M${box.left} ${y.toFixed(1)}H${box.right}` }),
    svg("text", { class: "limit-label", x: box.right, y: y - 5, "text-anchor": "end" }, label),
  ];
}

const chartBox = (width, height) => ({ left: 58, right: width - 8, top: 14, bottom: height - 22 });

/** Where in a line chart somebody points: 0 is its end, 1 its beginning, null beside it. */
export function shareFromRight(node, x) {
  const box = chartBox(node.clientWidth, node.clientHeight);
  const share = (box.right - x) / (box.right - box.left);
  return share >= 0 && share <= 1 ? share : null;
}

function timeLabels(box, height, x, span, end) {
  const at = (age) => (end === null ? "" : clockTime(end - age));
  const words = [[span, at(span), "start"], [span / 2, at(span / 2), "middle"], [0, at(0), "end"]];
  return words.map(([age, word, anchor]) => svg("text", { x: x(age), y: height - 5, "text-anchor": anchor }, word));
}

/** Bars with their names below: `bars` have a name and a value. */
export function barChart(node, bars) {
  const [width, height] = [node.clientWidth || 320, node.clientHeight || 160];
  const most = Math.max(...bars.map((bar) => bar.value), 0) || 1;
  const all = bars.reduce((sum, bar) => sum + bar.value, 0);
  const [step, floor] = [width / bars.length, height - 20];
  const drawn = bars.flatMap((bar, index) => {
    const tall = (bar.value / most) * (floor - 20);
    const middle = step * (index + 0.5);
    const share = all && bar.value ? `${Math.max(1, Math.round((100 * bar.value) / all))} %` : "";
    return [
      svg("rect", { class: "column", x: step * index + step * 0.14, y: floor - Math.max(tall, 1), width: step * 0.72, height: Math.max(tall, 1), rx: 2 }),
      svg("text", { x: middle, y: height - 5, "text-anchor": "middle" }, bar.name),
      svg("text", { class: "figure", x: middle, y: floor - tall - 6, "text-anchor": "middle" }, share),
    ];
  });
  resize(node, width, height).replaceChildren(...drawn);
}

function resize(node, width, height) {
  node.setAttribute("viewBox", `0 0 ${width} ${height}`);
  return node;
}
