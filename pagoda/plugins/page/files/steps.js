// SPDX-License-Identifier: Apache-2.0
// The steps of the last minute: height says how long, colour what was in them.

import { h, onResize, placeAfter, setText, slider, svg, tellSlider } from "./dom.js";
import { axisMs, count, ms, plural } from "./format.js";
import { label, niceCeiling } from "./chart.js";

const SPAN_S = 60;
const LEFT = 50;
const BOTTOM = 18;
const TOP = 6;
const BAR = 3;

export class StepTimeline {
  constructor(root) {
    this.steps = [];
    this.now = 0;
    this.replica = "";
    this.plot = svg("svg", { class: "plot", "aria-hidden": "true" });
    this.slider = slider("Steps of the last minute", "steps", this.plot);
    this.readout = h("p", { class: "readout muted" }, "No steps in the last minute.");
    this.select = h("select", { "aria-label": "Replica whose steps are shown", hidden: true });
    root.append(
      h(
        "div",
        { class: "head" },
        h("h3", { id: "steps-title" }, "Steps of the last minute"),
        this.select,
        h(
          "ul",
          { class: "legend inline" },
          h("li", {}, h("span", { class: "key prefill" }), "prompt tokens"),
          h("li", {}, h("span", { class: "key decode" }), "decoding"),
        ),
      ),
      this.slider,
      this.readout,
    );
    this.chosen = null;
    onResize(this.slider, (width, height) => {
      this.size = [width, height];
      this.draw();
    });
    this.select.addEventListener("change", () => {
      this.replica = this.select.value;
      this.chosen = null;
      this.draw();
    });
    this.slider.addEventListener("pointermove", (event) => {
      this.choose(this.nearest(event.clientX - this.slider.getBoundingClientRect().left));
    });
    this.slider.addEventListener("pointerleave", () => this.choose(null));
    this.slider.addEventListener("blur", () => this.choose(null));
    this.slider.addEventListener("keydown", (event) => this.onKey(event));
  }

  // Adds steps without drawing them. `steps`: { replica: [[age_s, step, num_steps, step_time_s, prefill, decode, seqs], ...] }
  add(steps, now) {
    this.now = now;
    for (const [replica, bins] of Object.entries(steps)) {
      for (const [age, step, number, time, prefill, decode, seqs] of bins) {
        this.steps.push({ replica, t: now - age, step, number, time, prefill, decode, seqs });
      }
    }
    this.steps = this.steps.filter((step) => step.t >= now - SPAN_S);
    this.steps.sort((a, b) => a.t - b.t);
  }

  clear() {
    this.steps = [];
  }

  listReplicas() {
    const names = [...new Set(this.steps.map((step) => step.replica))].sort();
    if (this.replica) names.includes(this.replica) || names.push(this.replica);
    this.select.hidden = names.length < 2;
    const known = [...this.select.options].map((option) => option.value).slice(1);
    if (known.join() === names.join()) return;
    this.select.replaceChildren(
      h("option", { value: "" }, "All replicas"),
      ...names.map((name) => h("option", { value: name }, `Replica ${name}`)),
    );
    this.select.value = this.replica;
  }

  get shown() {
    return this.replica ? this.steps.filter((step) => step.replica === this.replica) : this.steps;
  }

  x(t) {
    const right = this.size[0] - 6;
    return right - ((this.now - t) / SPAN_S) * (right - LEFT);
  }

  // Steps on the same few pixels share one bar, as high as the longest step.
  bars() {
    const bars = new Map();
    for (const step of this.shown) {
      const at = Math.floor(this.x(step.t) / BAR) * BAR;
      const bar = bars.get(at) ?? { time: 0, prefill: 0, decode: 0 };
      bar.time = Math.max(bar.time, step.time);
      bar.prefill += step.prefill;
      bar.decode += step.decode;
      bars.set(at, bar);
    }
    return bars;
  }

  // `isAsked`: the user chose a step with the keyboard.
  draw(isAsked = false) {
    this.listReplicas();
    if (!this.size) return;
    const [width, height] = this.size;
    const bars = this.bars();
    const top = niceCeiling(Math.max(1e-3, ...[...bars.values()].map((bar) => bar.time)));
    const floor = height - BOTTOM;
    let [prefill, decode] = ["", ""];
    for (const [at, bar] of bars) {
      if (at < LEFT) continue;
      const tall = Math.max(1, (bar.time / top) * (floor - TOP));
      const share = bar.prefill / Math.max(1, bar.prefill + bar.decode);
      const rect = (bottom, tall) => `M${at} ${bottom.toFixed(1)}h${BAR - 1}v-${tall.toFixed(1)}h-${BAR - 1}z`;
      if (share < 1) decode += rect(floor, tall * (1 - share));
      if (share > 0) prefill += rect(floor - tall * (1 - share), tall * share);
    }
    const parts = [];
    for (const part of [0, 0.5, 1]) {
      const at = Math.round(floor - part * (floor - TOP)) + 0.5;
      parts.push(svg("path", { class: "grid", d: `M${LEFT} ${at}H${width - 6}` }));
      parts.push(label(axisMs(1e3 * top * part), LEFT - 6, at + 3.5, "end"));
    }
    for (const age of [60, 45, 30, 15, 0]) {
      const anchor = age === 0 ? "end" : age === 60 ? "start" : "middle";
      parts.push(label(age ? `−${age} s` : "now", this.x(this.now - age), height - 4, anchor));
    }
    parts.push(svg("path", { class: "decode", d: decode }), svg("path", { class: "prefill", d: prefill }));
    if (this.chosen) {
      parts.push(svg("path", { class: "cursor", d: `M${this.x(this.chosen.t).toFixed(1)} ${TOP}V${floor}` }));
    }
    this.plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.plot.replaceChildren(...parts);
    this.write(isAsked);
  }

  nearest(x) {
    let best = null;
    for (const step of this.shown) {
      if (!best || Math.abs(this.x(step.t) - x) < Math.abs(this.x(best.t) - x)) best = step;
    }
    return best && Math.abs(this.x(best.t) - x) < 12 ? best : null;
  }

  choose(step) {
    this.chosen = step;
    this.draw(true);
  }

  onKey(event) {
    const shown = this.shown;
    if (event.key === "Escape") return this.choose(null);
    const next = placeAfter(event.key, this.chosen ? shown.indexOf(this.chosen) : shown.length, shown.length);
    if (next === null) return;
    event.preventDefault();
    if (shown.length) this.choose(shown[next]);
  }

  write(isAsked) {
    const shown = this.shown;
    const index = shown.indexOf(this.chosen);
    if (index < 0) this.chosen = null;
    const text = this.chosen ? describe(this.chosen, this.now) : summary(shown);
    setText(this.readout, text);
    tellSlider(this.slider, { at: index, length: shown.length, text }, isAsked);
  }
}

function describe(step, now) {
  const which =
    step.number > 1 ? `${step.number} steps up to number ${step.step}, the longest` : `step ${step.step}`;
  const where = step.replica && step.replica !== "0" ? `, replica ${step.replica}` : "";
  return (
    `${(now - step.t).toFixed(1)} s ago: ${which} ${ms(1e3 * step.time)}; ` +
    `${plural(step.prefill, "prompt token")}, ${step.decode} decoding, ${plural(step.seqs, "sequence")}${where}`
  );
}

function summary(steps) {
  if (!steps.length) return "No steps in the last minute.";
  const number = steps.reduce((sum, step) => sum + step.number, 0);
  const longest = Math.max(...steps.map((step) => step.time));
  return `${count(number)} steps, the longest ${ms(1e3 * longest)}. Point at one, or use the arrow keys, to see it.`;
}
