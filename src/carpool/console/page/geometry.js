// From a picture's own pixels to the screen. Everything is drawn in the picture's pixels; only text and lines
// have to know how many of those make one pixel of the screen.

/** Screen pixels per picture pixel, for a picture that is shown whole inside a stage. */
export function scaleToFit(picture, stage) {
  if (!(picture.width > 0 && picture.height > 0 && stage.width > 0 && stage.height > 0)) return 1;
  return Math.min(stage.width / picture.width, stage.height / picture.height);
}

/** A box as x, y, width, height inside the picture; null for what is not a box. */
export function boxInside(box, picture) {
  if (!Array.isArray(box) || box.length !== 4 || !box.every((edge) => Number.isFinite(edge))) return null;
  const clamp = (value, most) => Math.min(Math.max(value, 0), most);
  const [x1, x2] = [box[0], box[2]].map((x) => clamp(x, picture.width)).sort((a, b) => a - b);
  const [y1, y2] = [box[1], box[3]].map((y) => clamp(y, picture.height)).sort((a, b) => a - b);
  return { x: x1, y: y1, width: x2 - x1, height: y2 - y1 };
}

/** Where a label of this size goes: above its box, inside it where there is no room above, never off the picture. */
export function placeLabel(rect, size, picture) {
  const above = rect.y - size.height;
  const y = above >= 0 ? above : Math.min(rect.y, Math.max(0, picture.height - size.height));
  const x = Math.min(rect.x, Math.max(0, picture.width - size.width));
  return { x: Math.max(0, x), y };
}

const UNSURE = 0.3; // keypoints below this are not drawn
const LIMBS = "0-1 0-2 1-3 2-4 5-6 5-7 7-9 6-8 8-10 5-11 6-12 11-12 11-13 13-15 12-14 14-16".split(" ");

/** Points of an answer as x, y and whether they are sure; what is no list of points is none. */
export function pointsOf(points) {
  if (!Array.isArray(points) || !points.every((point) => Array.isArray(point) && point.slice(0, 2).every(Number.isFinite))) return [];
  return points.map(([x, y, score]) => ({ x, y, sure: !(score < UNSURE) }));
}

/** Which of a person's seventeen points in COCO are joined, where both are sure. */
export function limbs(points) {
  if (points.length !== 17) return [];
  const pairs = LIMBS.map((limb) => limb.split("-").map((number) => points[Number(number)]));
  return pairs.filter((pair) => pair.every((point) => point.sure));
}

/** Red, green, blue from dark violet (0) over red to yellow (1). */
export function heat(share) {
  return [255 * Math.min(1, 1.6 * share), 255 * Math.max(0, 1.7 * share - 0.7), 255 * Math.max(0, 0.35 - Math.abs(share - 0.25))].map(Math.round);
}

/** The size to draw masks at: the picture's shape, no side over `most`. */
export function shrunk(picture, most) {
  const factor = Math.min(1, most / Math.max(picture.width, picture.height));
  return {
    width: Math.max(1, Math.round(picture.width * factor)),
    height: Math.max(1, Math.round(picture.height * factor)),
  };
}

/**
 * Runs of 0 and 1 in turn, down the columns (as COCO has them), as one byte per pixel of `target`, row by row.
 * Null when the runs do not fill the picture.
 */
export function maskFromRuns(counts, picture, target) {
  const ends = [];
  let end = 0;
  for (const count of counts) {
    if (!Number.isInteger(count) || count < 0) return null;
    end += count;
    ends.push(end);
  }
  if (end !== picture.width * picture.height) return null;
  const mask = new Uint8Array(target.width * target.height);
  let run = 0;
  for (let x = 0; x < target.width; x += 1) {
    const column = Math.floor(((x + 0.5) * picture.width) / target.width) * picture.height;
    for (let y = 0; y < target.height; y += 1) {
      const place = column + Math.floor(((y + 0.5) * picture.height) / target.height);
      while (ends[run] <= place) run += 1;
      mask[y * target.width + x] = run % 2;
    }
  }
  return mask;
}

const GOLDEN = 0.61803398875;
const TONES = [[0.74, 0.17], [0.66, 0.2], [0.82, 0.14]]; // lightness and chroma, in turn

export const colour = (id) => `rgb(${colourBytes(id).join(" ")})`;

/** A class's own colour, as red, green and blue: the one that the server draws with (vision/draw.py). */
export function colourBytes(id) {
  const number = Math.abs(Math.trunc(id) || 0);
  const angle = 2 * Math.PI * ((0.6 + number * GOLDEN) % 1);
  const [lightness, chroma] = TONES[number % 3];
  const [a, b] = [chroma * Math.cos(angle), chroma * Math.sin(angle)];
  const long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const short = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
    -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
    -0.0041960863 * long - 0.7034186147 * medium + 1.707614701 * short,
  ];
  return linear.map((part) => Math.min(1, Math.max(0, part))).map((part) => Math.round(255 * gamma(part)));
}

const gamma = (part) => (part <= 0.0031308 ? 12.92 * part : 1.055 * part ** (1 / 2.4) - 0.055);
