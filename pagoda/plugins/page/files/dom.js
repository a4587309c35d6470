// SPDX-License-Identifier: Apache-2.0
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

// Sets text only if it differs, so that nothing is drawn or read out without need.
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

// Makes a screen reader say a text, even the same text again (screen readers speak changes).
export function announce(text) {
  $("announce").textContent = "";
  setTimeout(() => ($("announce").textContent = text), 100);
}

const MOVES = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -10, PageUp: 10 };

// The place that a key leads to on a slider of `length` places, from `at`; null for other keys.
export function placeAfter(key, at, length) {
  const next = { Home: 0, End: length - 1 }[key] ?? at + MOVES[key];
  return Number.isNaN(next) ? null : Math.min(length - 1, Math.max(0, next));
}

// Texts of a slider for a screen reader. While the slider has the focus, only a key changes them.
export function tellSlider(slider, { at, length, text }, isAsked) {
  if (slider === document.activeElement && !isAsked) return;
  slider.setAttribute("aria-valuemax", String(Math.max(0, length - 1)));
  slider.setAttribute("aria-valuenow", String(Math.max(0, at)));
  slider.setAttribute("aria-valuetext", text);
}

export function slider(label, kind, plot) {
  const props = {
    class: `frame ${kind}`,
    role: "slider",
    tabindex: "0",
    "aria-label": label,
    "aria-orientation": "horizontal",
    "aria-valuemin": "0",
    "aria-valuemax": "0",
    "aria-valuenow": "0",
    "aria-valuetext": "nothing yet",
  };
  return h("div", props, plot);
}
