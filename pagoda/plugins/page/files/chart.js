// SPDX-License-Identifier: Apache-2.0
// Lines over time, in SVG: themes come from the style sheet, and there is nothing to repaint by hand.

import { h, onResize, placeAfter, setText, slider, svg, tellSlider } from "./dom.js";

const LEFT = 50;
const BOTTOM = 18;
const TOP = 6;

// The smallest round number that is not below `value`, and whose half is round too.
export function niceCeiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.2, 1.6, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value * 0.999) * power;
}

export class LineChart {
  // `series`: [{ name, label, of(point) }]; a value of null is a gap. `format` makes text of values.
  constructor(title, series, { format, axis = format, unit = "", least = 1 }) {
    this.title = title;
    this.series = series;
    this.format = format;
    this.axis = axis;
    this.unit = unit;
    this.least = least;
    this.points = [];
    this.span = 60;
    this.cursor = null; // where the pointer is
    this.picked = null; // the point that keys chose
    this.plot = svg("svg", { class: "plot", "aria-hidden": "true" });
    this.values = series.map(() => h("span", { class: "value" }, "–"));
    this.when = h("span", { class: "muted when" });
    const legend = h(
      "ul",
      { class: "legend" },
      series.map((one, index) =>
        h("li", {}, h("span", { class: `key ${one.name}` }), one.label, " ", this.values[index]),
      ),
    );
    this.frame = slider(title, "", this.plot);
    this.element = h(
      "figure",
      { class: "card chart" },
      h("figcaption", { class: "head" }, h("h3", {}, title), this.when),
      legend,
      this.frame,
    );
    this.width = this.height = 0;
    onResize(this.frame, (width, height) => {
      this.width = width;
      this.height = height;
      this.draw();
    });
    this.frame.addEventListener("pointermove", (event) => {
      this.cursor = event.clientX - this.frame.getBoundingClientRect().left;
      this.draw();
    });
    this.frame.addEventListener("pointerleave", () => {
      this.cursor = null;
      this.draw();
    });
    this.frame.addEventListener("keydown", (event) => this.onKey(event));
    this.frame.addEventListener("blur", () => this.pick(null));
  }

  // `points` have `t`, in seconds; the right edge is `now`.
  show(points, now, span) {
    this.points = points;
    this.now = now;
    this.span = span;
    this.draw();
  }

  get inView() {
    return this.points.filter((point) => point.t >= this.now - this.span);
  }

  onKey(event) {
    if (event.key === "Escape") return this.pick(null);
    const points = this.inView;
    const next = placeAfter(event.key, this.picked ? points.indexOf(this.picked) : points.length, points.length);
    if (next === null) return;
    event.preventDefault();
    if (points.length) this.pick(points[next]);
  }

  pick(point) {
    this.picked = point;
    this.draw(true);
  }

  // `isAsked`: the user chose a point with the keyboard.
  draw(isAsked = false) {
    if (!this.width || !this.points.length) return;
    const inView = this.inView;
    if (!inView.includes(this.picked)) this.picked = null;
    const most = Math.max(this.least, ...inView.flatMap((point) => this.series.map((one) => one.of(point) ?? 0)));
    const top = niceCeiling(most);
    const right = this.width - 6;
    const x = (t) => right - ((this.now - t) / this.span) * (right - LEFT);
    const y = (value) => this.height - BOTTOM - (value / top) * (this.height - BOTTOM - TOP);
    const parts = [...this.grid(top, x, y, right)];
    for (const one of this.series) {
      parts.push(svg("path", { class: `line ${one.name}`, d: linePath(inView, one, x, y) }));
    }
    const chosen = this.chosen(inView, x);
    if (chosen && this.isPointed) {
      parts.push(svg("path", { class: "cursor", d: `M${x(chosen.t).toFixed(1)} ${TOP}V${this.height - BOTTOM}` }));
    }
    this.plot.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.plot.replaceChildren(...parts);
    this.write(chosen, inView, isAsked);
  }

  get isPointed() {
    return this.cursor !== null || this.picked !== null;
  }

  *grid(top, x, y, right) {
    for (const share of [0, 0.5, 1]) {
      const at = Math.round(y(top * share)) + 0.5;
      yield svg("path", { class: "grid", d: `M${LEFT} ${at}H${right}` });
      yield label(this.axis(top * share), LEFT - 6, at + 3.5, "end");
    }
    const fits = (step) => (step / this.span) * (right - LEFT) >= 56;
    const step = [15, 30, 60].find(fits) ?? 120;
    for (let age = 0; age <= this.span; age += step) {
      const text = age === 0 ? "now" : step >= 60 ? `−${age / 60} min` : `−${age} s`;
      const anchor = age === 0 ? "end" : x(this.now - age) < LEFT + 18 ? "start" : "middle";
      yield label(text, x(this.now - age), this.height - 4, anchor);
    }
  }

  chosen(inView, x) {
    if (this.cursor === null) return this.picked ?? inView.at(-1);
    return inView.reduce(
      (best, point) =>
        best === null || Math.abs(x(point.t) - this.cursor) < Math.abs(x(best.t) - this.cursor) ? point : best,
      null,
    );
  }

  write(point, inView, isAsked) {
    if (!point) return;
    const told = this.series.map((one, index) => {
      const text = this.format(one.of(point));
      setText(this.values[index], text + (this.unit && text !== "–" ? ` ${this.unit}` : ""));
      return `${one.label} ${text === "–" ? "unknown" : text + this.unit}`;
    });
    const when = this.isPointed ? `${Math.round(this.now - point.t)} s ago` : "now";
    setText(this.when, this.isPointed ? when : "");
    const text = `${when}: ${told.join(", ")}`;
    tellSlider(this.frame, { at: inView.indexOf(point), length: inView.length, text }, isAsked);
  }
}

export function label(text, x, y, anchor) {
  const element = svg("text", { x: x.toFixed(1), y: y.toFixed(1), "text-anchor": anchor });
  element.textContent = text;
  return element;
}

function linePath(points, one, x, y) {
  const parts = [];
  let previous = null;
  for (const point of points) {
    const value = one.of(point);
    const goesOn = previous !== null && point.t - previous < 3.5;
    if (value === null || value === undefined) {
      previous = null;
      continue;
    }
    const at = `${x(point.t).toFixed(1)} ${y(value).toFixed(1)}`;
    parts.push(goesOn ? `L${at}` : `M${at}h.01`);
    previous = point.t;
  }
  return parts.join("");
}
