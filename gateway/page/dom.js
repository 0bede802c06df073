// Elements without HTML: what came from elsewhere is text, and never markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element with a class, attributes and children; strings become text. */
export function element(tag, { className, text, attributes = {}, children = [] } = {}) {
  return fill(document.createElement(tag), { className, text, attributes, children });
}

/** The same for drawings. */
export function drawn(tag, { className, text, attributes = {}, children = [] } = {}) {
  return fill(document.createElementNS(SVG, tag), { className, text, attributes, children });
}

function fill(made, { className, text, attributes, children }) {
  if (className) made.setAttribute("class", className);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** New children for an element; a button that had the keyboard's focus has it again. */
export function redraw(parent, children) {
  const within = parent.contains(document.activeElement);
  const focused = within ? document.activeElement.textContent : null;
  parent.replaceChildren(...children);
  if (focused === null) return;
  [...parent.querySelectorAll("button")].find((each) => each.textContent === focused)?.focus();
}

/** Seconds as people read them. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${(value * 1000).toPrecision(3)} ms`;
  return value < 100 ? `${value.toPrecision(3)} s` : `${Math.round(value)} s`;
}

/** A count with its thousands apart. */
export function count(value) {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en-US");
}
