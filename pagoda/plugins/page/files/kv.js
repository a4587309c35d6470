// SPDX-License-Identifier: Apache-2.0
// KV blocks as a picture: a field of cells for the device, or a bar for each of several replicas, of which one may
// be full while another is empty; and a bar for each tier below.

import { h, onResize, setText, svg } from "./dom.js";
import { count, percent } from "./format.js";

const CELL = 9;
const GAP = 2;
const KINDS = [
  ["used", "in use"],
  ["cached", "cached"],
  ["free", "free"],
];

// The number of `cells` for each part; a part that is not empty gets at least one.
export function shareOut(parts, total, cells) {
  const shares = parts.map((part) => (part > 0 ? Math.max(1, Math.floor((part / total) * cells)) : 0));
  shares[parts.indexOf(Math.max(...parts))] += cells - shares.reduce((sum, share) => sum + share, 0);
  return shares;
}

export class KVPicture {
  constructor(root) {
    this.plot = svg("svg", { class: "field", role: "img", "aria-label": "KV blocks" });
    this.frame = h("div", { class: "field-frame" }, this.plot);
    this.values = Object.fromEntries(KINDS.map(([kind]) => [kind, h("span", { class: "value" }, "–")]));
    this.replicas = h("ul", { class: "tiers of-replicas", tabindex: "0", "aria-label": "KV blocks by replica" });
    this.scale = h("p", { class: "muted small" });
    this.tiers = h("ul", { class: "tiers" });
    root.append(
      h(
        "ul",
        { class: "legend" },
        KINDS.map(([kind, text]) => h("li", {}, h("span", { class: `key ${kind}` }), text, " ", this.values[kind])),
      ),
      this.frame,
      this.replicas,
      this.scale,
      this.tiers,
    );
    onResize(this.frame, (width, height) => {
      this.size = [width, height];
      this.draw();
    });
  }

  show(tiers, replicas) {
    [this.device, ...this.below] = tiers;
    this.frame.hidden = replicas.length > 1;
    this.replicas.hidden = replicas.length < 2;
    this.drawLegend();
    if (replicas.length > 1) this.drawReplicas(replicas);
    else this.draw();
    this.drawTiers();
  }

  drawLegend() {
    const numbers = partsOf(this.device.num_total, this.device.num_used, this.device.num_cached);
    KINDS.forEach(([kind], index) => setText(this.values[kind], count(numbers[index])));
  }

  draw() {
    const device = this.device;
    if (!device || !this.size || this.frame.hidden) return;
    const { num_total: total, num_used: used, num_cached: cached } = device;
    const [, , free] = partsOf(total, used, cached);
    const columns = Math.max(8, Math.floor((this.size[0] + GAP) / (CELL + GAP)));
    const room = columns * Math.max(4, Math.floor((this.size[1] + GAP) / (CELL + GAP)));
    const cells = Math.min(room, total);
    const shares = shareOut([used, cached, free], total, cells);
    const paths = [];
    let cell = 0;
    KINDS.forEach(([kind], index) => {
      let d = "";
      for (const end = cell + shares[index]; cell < end; cell++) {
        d += `M${(cell % columns) * (CELL + GAP)} ${Math.floor(cell / columns) * (CELL + GAP)}h${CELL}v${CELL}h-${CELL}z`;
      }
      paths.push(svg("path", { class: kind, d }));
    });
    this.plot.setAttribute("viewBox", `0 0 ${this.size[0]} ${this.size[1]}`);
    this.plot.replaceChildren(...paths);
    this.plot.setAttribute(
      "aria-label",
      `Of ${total} KV blocks on the device ${used} are in use, ${cached} cached and ${free} free.`,
    );
    const each = total / cells;
    setText(
      this.scale,
      `${count(total)} blocks on the device${each > 1.5 ? `; a cell stands for ${count(Math.round(each))}` : ""}`,
    );
  }

  drawReplicas(replicas) {
    while (this.replicas.children.length > replicas.length) this.replicas.lastChild.remove();
    replicas.forEach((replica, index) => {
      const row = this.replicas.children[index] ?? this.replicas.appendChild(replicaRow());
      const [name, bar, text] = row.children;
      const { num_blocks: total, num_used_blocks: used, num_cached_blocks: cached } = replica;
      setText(name, replica.name);
      const [inUse, kept] = total ? [(100 * used) / total, (100 * cached) / total] : [0, 0];
      bar.replaceChildren(stripe("free", 0, 100), stripe("used", 0, inUse), stripe("cached", inUse, kept));
      setText(
        text,
        total === null ? "does not answer" : `${count(used)} in use, ${count(cached)} cached of ${count(total)}`,
      );
    });
    setText(this.scale, `${count(this.device.num_total)} blocks on the devices`);
  }

  drawTiers() {
    while (this.tiers.children.length > this.below.length) this.tiers.lastChild.remove();
    this.below.forEach((tier, index) => {
      const row = this.tiers.children[index] ?? this.tiers.appendChild(tierRow());
      const share = tier.num_total > 0 ? tier.num_cached / tier.num_total : 0;
      const [name, meter, text] = row.children;
      setText(name, tier.name);
      meter.setAttribute("value", String(share));
      meter.setAttribute("aria-label", `${tier.name}: ${percent(share)} full`);
      const total = tier.num_total > 0 ? ` of ${count(tier.num_total)}` : "";
      setText(text, `${count(tier.num_cached)}${total} cached${tier.is_indexed ? "" : ", still being listed"}`);
    });
  }
}

const tierRow = () =>
  h("li", {}, h("span", { class: "name" }), h("progress", { max: "1", value: "0" }), h("span", { class: "muted" }));

const partsOf = (total, used, cached) => [used, cached, total - used - cached];

const replicaRow = () =>
  h(
    "li",
    {},
    h("span", { class: "name" }),
    svg("svg", { class: "bar-of-parts", viewBox: "0 0 100 1", preserveAspectRatio: "none", "aria-hidden": "true" }),
    h("span", { class: "muted" }),
  );

const stripe = (kind, from, width) => svg("path", { class: kind, d: `M${from} 0h${width}v1h-${width}z` });
