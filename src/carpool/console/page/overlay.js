// Draws an answer over its picture: boxes, turned boxes and keypoints as SVG in the picture's own pixels, masks and
// depth as tinted pixels below them.

import { find, svg } from "./dom.js";
import { boxInside, colour, colourBytes, heat, limbs, maskFromRuns, placeLabel, pointsOf, scaleToFit, shrunk } from "./geometry.js";

const MOST_BOXES = 300;
const MOST_MASKS = 64;
const MASK_SIDE = 1024;
const MASK_ALPHA = 130;
const DEPTH_ALPHA = 225;
const DOT = 3.5; // pixels on the screen
const LETTER = { width: 6.7, height: 17, size: 11.5, before: 5 }; // on the screen

export class Overlay {
  #stage;
  #svg;
  #canvas;
  #shown = null;

  constructor(stage = find("stage"), drawing = find("overlay"), canvas = find("masks")) {
    [this.#stage, this.#svg, this.#canvas] = [stage, drawing, canvas];
    new ResizeObserver(() => this.#drawBoxes()).observe(this.#stage);
  }

  clear() {
    this.#shown = null;
    this.#svg.replaceChildren();
    this.#svg.toggleAttribute("hidden", true);
    this.#canvas.hidden = true;
  }

  /** `things` have a label, a score and a box, and masks also pixels; `depth` is one PNG for the whole picture. */
  async show(picture, things, summary, depth = null) {
    this.clear();
    this.#shown = { picture, things: things.slice(0, MOST_BOXES) };
    this.#svg.setAttribute("viewBox", `0 0 ${picture.width} ${picture.height}`);
    this.#svg.setAttribute("aria-label", summary);
    this.#svg.toggleAttribute("hidden", false);
    this.#drawBoxes();
    if (depth) await this.#drawDepth(picture, depth);
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

  async #drawDepth(picture, png) {
    const shown = this.#shown;
    const size = shrunk(picture, MASK_SIDE);
    try {
      const pixels = await pixelsOf(png, size, { x: 0, y: 0, ...size });
      if (this.#shown !== shown) return; // another picture came meanwhile
      for (let at = 0; at < pixels.data.length; at += 4) pixels.data.set([...heat(pixels.data[at] / 255), DEPTH_ALPHA], at);
      this.#put(pixels, size);
    } catch {
      // not a PNG that this browser reads: the numbers beside the picture are still right
    }
  }

  #put(image, size) {
    this.#canvas.width = size.width;
    this.#canvas.height = size.height;
    this.#canvas.getContext("2d").putImageData(image, 0, 0);
    this.#canvas.hidden = false;
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
    this.#put(image, size);
  }
}

function boxGroup(thing, index, picture, scale) {
  const rect = boxInside(thing.box, picture);
  if (!rect) return null;
  const group = svg("g", { "data-index": index });
  const stroke = { class: "box", stroke: colour(thing.colour) };
  const corners = pointsOf(thing.corners);
  if (corners.length === 4) group.append(svg("polygon", { ...stroke, points: corners.map(({ x, y }) => `${x},${y}`).join(" ") }));
  else group.append(svg("rect", { ...stroke, ...rect }));
  const points = pointsOf(thing.keypoints);
  for (const [from, to] of limbs(points)) group.append(svg("line", { ...stroke, x1: from.x, y1: from.y, x2: to.x, y2: to.y }));
  for (const { x, y, sure } of points) {
    if (sure) group.append(svg("circle", { cx: x, cy: y, r: DOT / scale, fill: colour(thing.colour) }));
  }
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
  const bitmap = await bitmapOf(thing.png);
  const rect = boxInside(thing.box, picture);
  const whole = bitmap.width === picture.width && bitmap.height === picture.height;
  const into = whole || !rect ? { x: 0, y: 0, ...picture } : rect;
  const factor = size.width / picture.width;
  const place = { x: into.x * factor, y: into.y * factor, width: into.width * factor, height: into.height * factor };
  const pixels = painted(bitmap, size, place).data;
  const mask = new Uint8Array(size.width * size.height);
  for (let index = 0; index < mask.length; index += 1) {
    mask[index] = pixels[index * 4] > 127 && pixels[index * 4 + 3] > 127 ? 1 : 0;
  }
  return mask;
}

const pixelsOf = async (png, size, place) => painted(await bitmapOf(png), size, place);

async function bitmapOf(png) {
  const raw = atob(png.replace(/^data:[^,]*,/, ""));
  return createImageBitmap(new Blob([Uint8Array.from(raw, (letter) => letter.charCodeAt(0))]));
}

function painted(bitmap, size, place) {
  const context = new OffscreenCanvas(size.width, size.height).getContext("2d", { willReadFrequently: true });
  context.drawImage(bitmap, place.x, place.y, place.width, place.height);
  bitmap.close();
  return context.getImageData(0, 0, size.width, size.height);
}

function tint(data, mask, [red, green, blue]) {
  for (let index = 0; index < mask.length; index += 1) {
    if (mask[index]) data.set([red, green, blue, MASK_ALPHA], index * 4);
  }
}
