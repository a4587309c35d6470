// SPDX-License-Identifier: Apache-2.0
// The Live view: follows the server's snapshots, keeps the last minutes of them, and draws.

import { ApiFailure, events, request, sentence } from "./api.js";
import { LineChart } from "./chart.js";
import { $, announce, h, setText } from "./dom.js";
import { axisMs, count, ms, percent, roughMs } from "./format.js";
import { KVPicture } from "./kv.js";
import { RequestTable } from "./requests.js";
import { StepTimeline } from "./steps.js";

const KEPT_S = 300;
const LEAST_SPAN_S = 60;
const TOLD_S = 20;
const SILENT_S = 5;
const RETRY_S = [0.5, 1, 2, 4];

const of = (name, part) => (point) => (part ? (point[name]?.[part] ?? null) : point[name]);
const percentiles = (name) => ["p50", "p90", "p99"].map((part) => ({ name: part, label: part, of: of(name, part) }));

const CHARTS = [
  [
    "Tokens per second",
    [
      { name: "decode", label: "generated", of: of("output_tokens_per_s") },
      { name: "prefill", label: "prompts", of: of("prompt_tokens_per_s") },
    ],
    { format: count, unit: "/s", least: 10 },
  ],
  ["Time to first token", percentiles("ttft_ms"), { format: roughMs, axis: axisMs, least: 1 }],
  [
    "Requests",
    [
      { name: "used", label: "running", of: of("num_running") },
      { name: "prefill", label: "waiting", of: (point) => point.num_waiting + point.num_awaiting_kv },
    ],
    { format: count, least: 4 },
  ],
  ["Time between tokens", percentiles("itl_ms"), { format: roughMs, axis: axisMs, least: 1 }],
];

const TILES = [
  ["Generated", (s) => count(s.output_tokens_per_s), "tokens/s"],
  ["Prompts", (s) => count(s.prompt_tokens_per_s), "tokens/s"],
  ["TTFT p50", (s) => roughMs(s.ttft_ms?.p50), ""],
  ["ITL p50", (s) => roughMs(s.itl_ms?.p50), ""],
  ["Running", (s) => count(s.num_running), ""],
  ["Waiting", (s) => count(s.num_waiting + s.num_awaiting_kv), ""],
  ["Prefix hits", (s) => percent(s.prefix_hit_rate), ""],
  ["Draft steps", (s) => s.draft_length?.toFixed(1) ?? "–", "tokens"],
  ["Preemptions", (s) => count(s.num_preemptions), ""],
  ["Restarts", (s) => count(s.num_restarts), ""],
];

export function startLive() {
  const tiles = TILES.map(([name, , unit]) => {
    const value = h("span", { class: "big" }, "–");
    $("tiles").append(
      h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, value, unit ? h("span", { class: "unit" }, unit) : null)),
    );
    return value;
  });
  const charts = CHARTS.map((chart) => new LineChart(...chart));
  $("charts").append(...charts.map((chart) => chart.element));
  const kv = new KVPicture($("kv"));
  const steps = new StepTimeline($("steps"));
  const table = new RequestTable($("requests"), $("requests-more"));
  const history = [];
  const follower = new Follower(take);
  let last = null;

  function take(snapshot, isNew) {
    const now = performance.now() / 1000;
    if (isNew || snapshot.history) steps.clear();
    if (snapshot.history) history.splice(0, Infinity, ...snapshot.history.map((point) => ({ ...point, t: now - point.age_s })));
    history.push({ ...snapshot, t: now, history: null, steps: null, answers: null, replicas: null });
    while (history[0].t < now - KEPT_S) history.shift();
    steps.add(snapshot.steps, now);
    last = snapshot;
    draw();
  }

  // Nothing is drawn while the other view is shown.
  function draw() {
    if (!last || $("live").hidden) return;
    const snapshot = last;
    const now = history.at(-1).t;
    const span = Math.min(KEPT_S, Math.max(LEAST_SPAN_S, now - history[0].t));
    for (const chart of charts) chart.show(history, now, span);
    TILES.forEach(([, text], index) => setText(tiles[index], text(snapshot)));
    kv.show(snapshot.tiers, snapshot.replicas);
    steps.draw();
    table.show(snapshot.answers, snapshot.num_answers, snapshot.num_running);
    $("steps").hidden = snapshot.is_router;
    setText($("replicas-title"), snapshot.is_router ? "Hosts" : "Replicas");
    showReplicas(snapshot);
  }

  follower.run();
  return { draw, retry: () => follower.retry(), onServer: (listener) => follower.listeners.push(listener) };
}

function showReplicas(snapshot) {
  const list = $("replicas");
  const entries = snapshot.pools.length ? snapshot.pools.flatMap((pool) => ofPool(pool, snapshot)) : snapshot.replicas;
  while (list.children.length > entries.length) list.lastChild.remove();
  entries.forEach((replica, index) => {
    const row = list.children[index] ?? list.appendChild(replicaRow());
    const [name, state, text] = row.firstChild.children;
    row.classList.toggle("pool", "of" in replica);
    state.hidden = "of" in replica;
    if ("of" in replica) {
      setText(name, replica.of);
      setText(text, replica.text);
      return;
    }
    setText(name, replica.name);
    setText(state, replica.state);
    state.dataset.state = replica.state;
    const known = replica.num_blocks !== null;
    const step = known ? ` · step ${ms(replica.step_time_ms)}` : "";
    const waiting = replica.num_waiting ? `, ${count(replica.num_waiting)} waiting` : "";
    setText(text, `${count(replica.num_running ?? replica.num_requests)} running${waiting}${step}`);
  });
  const hidden = snapshot.num_replicas - snapshot.replicas.length;
  setText($("replicas-more"), hidden > 0 ? `and ${count(hidden)} more` : "");
}

// A pool of a router, and its hosts behind it.
function ofPool(pool, snapshot) {
  const hosts = snapshot.replicas.filter((host) => host.model === pool);
  const sums = snapshot.of_pools[pool];
  if (!sums) return [{ of: pool, text: "no host" }];
  const text = `${count(sums.hosts)} ${sums.hosts === 1 ? "host" : "hosts"} · ${count(sums.num_running)} running, ${count(sums.num_waiting)} waiting`;
  return [{ of: pool, text }, ...hosts];
}

const replicaRow = () =>
  h(
    "li",
    {},
    h("div", { class: "row" }, h("span", { class: "name" }), h("span", { class: "badge" }), h("span", { class: "muted" })),
  );

// The reason for closing the stream: the page is hidden.
class Hidden extends Error {}

// Keeps the stream open while the page is visible; when the server is gone, says so and reconnects.
class Follower {
  constructor(onSnapshot) {
    this.onSnapshot = onSnapshot;
    this.listeners = [];
    this.started = null;
    this.failures = 0;
    this.wake = () => {};
    this.stream = new AbortController();
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) this.stream.abort(new Hidden());
      else this.retry();
    });
  }

  async run() {
    for (;;) {
      if (document.hidden) {
        this.say("wait", "Paused");
        await new Promise((resolve) => (this.wake = resolve));
        continue;
      }
      try {
        await this.follow();
        this.say("wait", "Server is stopping", "The server closed the connection.");
      } catch (error) {
        const reason = this.stream.signal.aborted ? this.stream.signal.reason : error;
        if (reason instanceof Hidden) continue;
        this.explain(reason);
      }
      const wait = RETRY_S[Math.min(this.failures++, RETRY_S.length - 1)];
      await new Promise((resolve) => {
        this.wake = resolve;
        if (!this.needsKey) setTimeout(resolve, 1000 * wait);
      });
    }
  }

  retry() {
    this.failures = 0;
    this.wake();
  }

  async follow() {
    this.needsKey = false;
    const stream = (this.stream = new AbortController());
    const giveUp = () => stream.abort(new Error(`The server has said nothing for ${SILENT_S} s.`));
    let silence = setTimeout(giveUp, 1000 * SILENT_S);
    try {
      const response = await request("/v1/live", { signal: stream.signal });
      for await (const snapshot of events(response)) {
        clearTimeout(silence);
        silence = setTimeout(giveUp, 1000 * SILENT_S);
        this.hear(snapshot);
      }
    } finally {
      clearTimeout(silence);
    }
  }

  hear(snapshot) {
    const isNew = this.started !== snapshot.started;
    if (isNew) this.meet(snapshot);
    this.failures = 0;
    if (snapshot.draining) this.say("wait", "Shutting down", "The server is shutting down; running requests finish.");
    else this.say("on", "Live", this.restarted);
    this.onSnapshot(snapshot, isNew);
  }

  meet(snapshot) {
    if (this.started !== null) {
      const time = new Date().toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
      this.restarted = `The server was started again; this page reconnected at ${time}.`;
      announce(this.restarted);
      setTimeout(() => (this.restarted = ""), 1000 * TOLD_S);
    }
    this.started = snapshot.started;
    for (const listener of this.listeners) listener();
  }

  explain(error) {
    if (error instanceof ApiFailure && error.status === 401) {
      this.needsKey = true;
      this.say("off", "Key needed", "This server needs an API key.");
    } else if (error instanceof ApiFailure && error.status === 503) {
      this.say("wait", "Waiting", error.message);
    } else {
      this.say("off", "Reconnecting", `${sentence(error)} This page reconnects when the server is back.`);
    }
  }

  say(state, text, notice = "") {
    $("status").dataset.state = state;
    setText($("status-text"), text);
    setText($("notice"), notice ?? "");
    $("notice").hidden = !notice;
  }
}
