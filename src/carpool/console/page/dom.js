// Elements without markup: text goes in as text, so nothing a model or a picture says can become HTML.

const SVG = "http://www.w3.org/2000/svg";

export const find = (id) => document.getElementById(id);

export function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** Only touches the page when the text is new: a screen reader is not told the same thing twice. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setTone(node, tone) {
  if (node.dataset.tone !== tone) node.dataset.tone = tone;
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
