// The few lines that stand in for a framework.

export const $ = (id) => document.getElementById(id);

// An element with properties (`class`, `on*`, `data-*`, `aria-*` and whatever else it takes) and children.
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name === "className" ? "class" : name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Sets text only where it is another one, so that nothing is drawn or read out for nothing.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Calls `draw` with width and height of an element, now and when they change.
export function onResize(element, draw) {
  new ResizeObserver(([entry]) => {
    const { width, height } = entry.contentRect;
    if (width > 0) requestAnimationFrame(() => draw(Math.floor(width), Math.floor(height)));
  }).observe(element);
}

export function announce(text) {
  setText($("announce"), text);
}
