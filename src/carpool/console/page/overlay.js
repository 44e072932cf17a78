// Draws an answer over its picture: boxes as SVG in the picture's own pixels, masks as tinted pixels below them.

import { find, svg } from "./dom.js";
import { boxInside, colour, colourBytes, maskFromRuns, placeLabel, scaleToFit, shrunk } from "./geometry.js";

const MOST_BOXES = 300;
const MOST_MASKS = 64;
const MASK_SIDE = 1024;
const MASK_ALPHA = 130;
const LETTER = { width: 6.7, height: 17, size: 11.5, before: 5 }; // on the screen

export class Overlay {
  #stage = find("stage");
  #svg = find("overlay");
  #canvas = find("masks");
  #shown = null;

  constructor() {
    new ResizeObserver(() => this.#drawBoxes()).observe(this.#stage);
  }

  clear() {
    this.#shown = null;
    this.#svg.replaceChildren();
    this.#svg.toggleAttribute("hidden", true);
    this.#canvas.hidden = true;
  }

  /** `things` have a label, a score and a box, and masks also pixels. */
  async show(picture, things, summary) {
    this.clear();
    this.#shown = { picture, things: things.slice(0, MOST_BOXES) };
    this.#svg.setAttribute("viewBox", `0 0 ${picture.width} ${picture.height}`);
    this.#svg.setAttribute("aria-label", summary);
    this.#svg.toggleAttribute("hidden", false);
    this.#drawBoxes();
    await this.#drawMasks(picture, things.slice(0, MOST_MASKS));
  }

  highlight(index) {
    for (const group of this.#svg.children) {
      group.classList.toggle("dimmed", index !== null && group.dataset.index !== String(index));
    }
  }

  #drawBoxes() {
    if (!this.#shown) return;
    const { picture, things } = this.#shown;
    const scale = scaleToFit(picture, { width: this.#stage.clientWidth, height: this.#stage.clientHeight });
    const groups = things.map((thing, index) => boxGroup(thing, index, picture, scale)).filter(Boolean);
    this.#svg.replaceChildren(...groups.reverse()); // the surest one on top
  }

  async #drawMasks(picture, things) {
    const masked = things.filter((thing) => thing.png || thing.rle);
    if (!masked.length) return;
    const shown = this.#shown;
    const size = shrunk(picture, MASK_SIDE);
    const image = new ImageData(size.width, size.height);
    for (const thing of masked) {
      const mask = await maskOf(thing, picture, size);
      if (this.#shown !== shown) return; // another picture came meanwhile
      if (mask) tint(image.data, mask, colourBytes(thing.colour));
    }
    this.#canvas.width = size.width;
    this.#canvas.height = size.height;
    this.#canvas.getContext("2d").putImageData(image, 0, 0);
    this.#canvas.hidden = false;
  }
}

function boxGroup(thing, index, picture, scale) {
  const rect = boxInside(thing.box, picture);
  if (!rect) return null;
  const group = svg("g", { "data-index": index });
  group.append(svg("rect", { class: "box", ...rect, stroke: colour(thing.colour) }));
  if (!thing.caption) return group;
  const size = { width: (thing.caption.length * LETTER.width + 2 * LETTER.before) / scale, height: LETTER.height / scale };
  const place = placeLabel(rect, size, picture);
  const text = { x: place.x + LETTER.before / scale, y: place.y + size.height * 0.71, "font-size": LETTER.size / scale };
  group.append(svg("rect", { ...place, ...size, fill: colour(thing.colour) }), svg("text", text, thing.caption));
  return group;
}

async function maskOf(thing, picture, size) {
  if (thing.rle) {
    const counts = Array.isArray(thing.rle) ? thing.rle : thing.rle.counts;
    return Array.isArray(counts) ? maskFromRuns(counts, picture, size) : null;
  }
  try {
    return await maskFromPng(thing, picture, size);
  } catch {
    return null; // not a PNG that this browser reads: the box is still right
  }
}

/** A mask of the whole picture, or of its box when it has that size. */
async function maskFromPng(thing, picture, size) {
  const raw = atob(thing.png.replace(/^data:[^,]*,/, ""));
  const bitmap = await createImageBitmap(new Blob([Uint8Array.from(raw, (letter) => letter.charCodeAt(0))]));
  const canvas = new OffscreenCanvas(size.width, size.height);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const rect = boxInside(thing.box, picture);
  const whole = bitmap.width === picture.width && bitmap.height === picture.height;
  const into = whole || !rect ? { x: 0, y: 0, ...picture } : rect;
  const factor = size.width / picture.width;
  context.drawImage(bitmap, into.x * factor, into.y * factor, into.width * factor, into.height * factor);
  bitmap.close();
  const pixels = context.getImageData(0, 0, size.width, size.height).data;
  const mask = new Uint8Array(size.width * size.height);
  for (let index = 0; index < mask.length; index += 1) {
    mask[index] = pixels[index * 4] > 127 && pixels[index * 4 + 3] > 127 ? 1 : 0;
  }
  return mask;
}

function tint(data, mask, [red, green, blue]) {
  for (let index = 0; index < mask.length; index += 1) {
    if (mask[index]) data.set([red, green, blue, MASK_ALPHA], index * 4);
  }
}
