// A bar in parts with its legend: where the time of one request, or of all, went.

import { el, setText } from "./dom.js";
import { milliseconds } from "./format.js";

/** `parts` have a name for their colour, a label, milliseconds and a share. */
export function stackBar(bar, legend, parts) {
  while (bar.children.length > parts.length) bar.lastChild.remove();
  while (legend.children.length > parts.length) legend.lastChild.remove();
  parts.forEach((part, index) => {
    const piece = bar.children[index] ?? bar.appendChild(el("i"));
    piece.dataset.part = part.name;
    piece.style.flexGrow = String(Math.max(part.share, 0.004));
    const row = legend.children[index] ?? legend.appendChild(el("li", {}, el("span"), el("b", { class: "figure" })));
    row.dataset.part = part.name;
    setText(row.children[0], part.label);
    setText(row.children[1], milliseconds(part.ms));
  });
  bar.setAttribute("aria-label", parts.map((part) => `${part.label} ${milliseconds(part.ms)}`).join(", ") || "Nothing yet");
}
