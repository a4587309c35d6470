// SPDX-License-Identifier: Apache-2.0
// Numbers as people read them.

export function count(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1e6) return `${(value / 1e6).toFixed(value >= 1e7 ? 0 : 1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(value >= 1e5 ? 0 : 1)} k`;
  return value < 10 && !Number.isInteger(value) ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}

export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} s`;
  if (value >= 1e3) return `${(value / 1e3).toFixed(2)} s`;
  return `${value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2)} ms`;
}

// Two digits, for values known to a few percent.
export function roughMs(value) {
  if (value === null || value === undefined) return "–";
  const rough = +value.toPrecision(2);
  return rough >= 1000 ? `${rough / 1000} s` : `${rough} ms`;
}

// Short labels for the side of a chart.
export function axisMs(value) {
  if (value === 0) return "0";
  return value >= 1000 ? `${+(value / 1000).toPrecision(3)} s` : `${+value.toPrecision(3)} ms`;
}

export function percent(value) {
  if (value === null || value === undefined) return "–";
  return `${(100 * value).toFixed(value < 0.1 && value > 0 ? 1 : 0)} %`;
}

export function seconds(value) {
  if (value < 60) return `${value.toFixed(1)} s`;
  return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
}

export const plural = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
