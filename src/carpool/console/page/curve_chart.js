// The batch curve, drawn: what was measured, the line through it, what is believed now, the promise, and a point that
// shows where the model works. Below it stand the sizes of the last batches.

import { roundUp } from "./charts.js";
import { extent, operatingPoint, sizeTicks } from "./curve.js";
import { svg } from "./dom.js";
import { milliseconds } from "./format.js";

const BAND = 34; // the histogram below the axis
const LOWEST_BAR = 2;

export class CurveChart {
  #node;
  #still = svg("g");
  #now = svg("g", { class: "now" }, svg("circle", { class: "halo", r: 11 }), svg("circle", { class: "dot", r: 5 }));

  constructor(node) {
    this.#node = node;
    node.append(this.#still, this.#now);
  }

  /** `profile` may be null: then the picture is empty and says why. */
  show(profile, slo, why) {
    const [width, height] = [this.#node.clientWidth || 560, this.#node.clientHeight || 300];
    this.#node.setAttribute("viewBox", `0 0 ${width} ${height}`);
    if (!profile) {
      this.#now.setAttribute("visibility", "hidden");
      this.#still.replaceChildren(svg("text", { class: "absent", x: width / 2, y: height / 2, "text-anchor": "middle" }, why));
      return;
    }
    const plot = scales(profile, slo, width, height);
    const [limits, words] = promised(plot, slo);
    const drawn = [axes(plot, height), limits, bars(plot, profile.recent.sizes, height), curves(plot, profile), words];
    this.#still.replaceChildren(...drawn.flat());
    this.#place(plot, operatingPoint(profile));
  }

  /** Moved, not drawn anew: the eye can follow it, from its second place on. */
  #place({ x, y, most }, point) {
    this.#now.classList.toggle("moving", this.#now.getAttribute("visibility") === "visible");
    this.#now.setAttribute("visibility", point ? "visible" : "hidden");
    if (!point) return;
    const [left, top] = [x(Math.min(point.size, most.size)), y(Math.min(point.ms, most.ms))];
    this.#now.style.transform = `translate(${left.toFixed(1)}px, ${top.toFixed(1)}px)`;
  }
}

function scales(profile, slo, width, height) {
  const found = extent(profile, slo);
  const most = { size: found.size, ms: roundUp(found.ms) };
  const box = { left: 58, right: width - 16, top: 16, bottom: height - BAND - 30 };
  const x = (size) => box.left + (size / (most.size + 0.5)) * (box.right - box.left);
  const y = (ms) => box.bottom - (ms / most.ms) * (box.bottom - box.top);
  return { box, x, y, most };
}

function axes({ box, x, y, most }, height) {
  const drawn = [0, 0.5, 1].flatMap((share) => [
    svg("path", { class: "grid-line", d: `M${box.left} ${y(most.ms * share).toFixed(1)}H${box.right}` }),
    svg("text", { x: box.left - 8, y: y(most.ms * share) + 3.5, "text-anchor": "end" }, milliseconds(most.ms * share)),
  ]);
  for (const size of sizeTicks(most.size)) {
    drawn.push(svg("text", { x: x(size), y: box.bottom + 16, "text-anchor": "middle" }, String(size)));
  }
  drawn.push(svg("text", { x: box.left - 8, y: box.bottom + 16, "text-anchor": "end" }, "images"));
  drawn.push(svg("text", { x: box.left - 8, y: height - 3, "text-anchor": "end" }, "batches"));
  return drawn;
}

/** The promise, and half of it: who comes just after a batch began waits for that one and rides in the next. */
function promised({ box, y, most }, slo) {
  if (!slo) return [[], []];
  const limits = [["slo", slo, `SLO ${milliseconds(slo)}`], ["half", slo / 2, `half of it, ${milliseconds(slo / 2)}: two such batches fit`]];
  const inside = limits.filter(([, ms]) => ms <= most.ms);
  const above = slo > most.ms;
  // Words that would lie on those of the promise above the chart go below their line.
  const place = (ms) => (above && y(ms) < box.top + 16 ? y(ms) + 13 : y(ms) - 5);
  const words = inside.map(([, ms, text]) => limitLabel(box, place(ms), text));
  if (above) words.push(limitLabel(box, box.top - 4, `SLO ${milliseconds(slo)}, far above`));
  return [inside.map(([name, ms]) => svg("path", { class: `limit ${name}`, d: `M${box.left} ${y(ms).toFixed(1)}H${box.right}` })), words];
}

function limitLabel(box, y, text) {
  return svg("text", { class: "limit-label", x: box.left + 6, y }, text);
}

function curves({ box, x, y, most }, { points, believed, fit }) {
  const inside = ([size]) => size <= most.size;
  const corners = believed.filter(inside);
  const cut = believed.findIndex((corner) => !inside(corner));
  if (cut > 0) corners.push(between(believed[cut - 1], believed[cut], most.size));
  const path = corners.map(([size, ms]) => `${x(size).toFixed(1)} ${y(ms).toFixed(1)}`).join("L");
  const end = Math.min(most.size, fit.per_image_ms > 0 ? (most.ms - fit.fixed_ms) / fit.per_image_ms : most.size);
  const straight = `M${x(0)} ${y(fit.fixed_ms).toFixed(1)}L${x(end).toFixed(1)} ${y(fit.fixed_ms + fit.per_image_ms * end).toFixed(1)}`;
  const shown = points.filter(({ size, ms }) => size <= most.size && ms <= most.ms);
  return [
    svg("path", { class: "line believed", d: corners.length > 1 ? `M${path}` : `M${path}h0.01` }),
    ...(fit.fixed_ms <= most.ms ? [svg("path", { class: "fit", d: straight })] : []),
    ...shown.map(({ size, ms }) => svg("circle", { class: "measured", cx: x(size), cy: y(ms), r: 4 })),
    svg("path", { class: "grid-line", d: `M${box.left} ${box.bottom}H${box.right}` }),
  ];
}

function between([sizeA, msA], [sizeB, msB], size) {
  return [size, msA + ((msB - msA) * (size - sizeA)) / (sizeB - sizeA)];
}

function bars({ x, most }, sizes, height) {
  const highest = Math.max(...sizes.map(([, batches]) => batches), 1);
  const wide = Math.max(2, Math.min(26, (x(2) - x(1)) * 0.7));
  return sizes
    .filter(([size]) => size <= most.size)
    .map(([size, batches]) => {
      const tall = Math.max(LOWEST_BAR, (batches / highest) * (BAND - 6));
      return svg("rect", { class: "recent", x: x(size) - wide / 2, y: height - 2 - tall, width: wide, height: tall, rx: 1.5 });
    });
}
