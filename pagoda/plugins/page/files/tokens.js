// SPDX-License-Identifier: Apache-2.0
// An answer token by token: the probability of each, and the alternatives.

import { $, h } from "./dom.js";

const LEVELS = [0.9, 0.5, 0.2, 0.05];

// Tokens of a piece of a stream, in either shape of the API: [{ token, logprob, top: [[token, logprob]] }].
export function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map((one) => ({
      token: one.token,
      logprob: one.logprob,
      top: one.top_logprobs.map((top) => [top.token, top.logprob]),
    }));
  }
  return logprobs.tokens.map((token, index) => ({
    token,
    logprob: logprobs.token_logprobs[index],
    top: Object.entries(logprobs.top_logprobs[index] ?? {}).sort((a, b) => b[1] - a[1]),
  }));
}

// Special tokens, which are no text: they end an answer or a turn.
const SPECIAL = /^(<\|[^|]+\|>|<\/?s>|<(bos|eos|pad|unk|start_of_turn|end_of_turn)>)$/;

export class TokenView {
  constructor() {
    this.tokens = [];
    this.element = h("div", {
      class: "tokens",
      role: "group",
      "aria-label": "The answer token by token; arrow keys go from one to the next",
    });
    this.element.addEventListener("pointerover", (event) => this.onOver(event));
    this.element.addEventListener("pointerleave", hideTip);
    this.element.addEventListener("focusin", (event) => this.onOver(event));
    this.element.addEventListener("focusout", hideTip);
    this.element.addEventListener("keydown", (event) => this.onKey(event));
  }

  add(token) {
    const index = this.tokens.push(token) - 1;
    const level = LEVELS.findIndex((least) => Math.exp(token.logprob) >= least);
    this.element.append(
      h(
        "span",
        {
          class: `token p${level < 0 ? LEVELS.length : level}${SPECIAL.test(token.token) ? " special" : ""}`,
          role: "button",
          tabindex: index === 0 ? "0" : "-1",
          "data-index": String(index),
          "aria-label": visible(token.token),
          "aria-describedby": "tip",
        },
        token.token || "∅",
      ),
    );
  }

  onOver(event) {
    const span = event.target.closest(".token");
    if (span) showTip(span, this.tokens[Number(span.dataset.index)]);
  }

  onKey(event) {
    if (event.key === "Escape") return hideTip();
    const span = event.target.closest(".token");
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (!span || !step) return;
    event.preventDefault();
    const last = this.tokens.length - 1;
    const next = Math.min(last, Math.max(0, Number(span.dataset.index) + step));
    span.tabIndex = -1;
    const target = this.element.children[next];
    target.tabIndex = 0;
    target.focus();
  }
}

function showTip(span, token) {
  const tip = $("tip");
  const known = token.top.some(([text]) => text === token.token);
  const top = known ? token.top : [[token.token, token.logprob], ...token.top];
  tip.replaceChildren(
    h("p", { class: "tip-title" }, visible(token.token), h("span", {}, chance(token.logprob))),
    h("p", { class: "muted" }, `log-probability ${token.logprob.toFixed(3).replace("-0.000", "0.000").replace("-", "−")}`),
    h(
      "ul",
      {},
      top.map(([text, logprob]) =>
        h(
          "li",
          { class: text === token.token ? "chosen" : "" },
          h("span", { class: "what" }, visible(text)),
          h("meter", { min: "0", max: "1", value: String(Math.exp(logprob)), "aria-hidden": "true" }),
          h("span", { class: "number" }, chance(logprob)),
        ),
      ),
    ),
  );
  tip.hidden = false;
  const at = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.max(8, Math.min(at.left, innerWidth - width - 8));
  // The popup opens below the token, so that the text before it stays in sight.
  const top_ = at.bottom + height + 12 < innerHeight ? at.bottom + 6 : at.top - height - 6;
  tip.style.left = `${left}px`;
  tip.style.top = `${top_}px`;
}

export function hideTip() {
  $("tip").hidden = true;
}

const code = (character) => `\\x${character.charCodeAt(0).toString(16).padStart(2, "0")}`;

// White space and control characters as visible signs.
function visible(text) {
  const plain = text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ | $/g, "␣");
  return plain.replace(/[\x00-\x1f\x7f]/g, code) || "∅";
}

function chance(logprob) {
  const percent = 100 * Math.exp(logprob);
  if (percent >= 99.95) return "100 %";
  return percent < 0.01 ? "< 0.01 %" : `${percent.toPrecision(3)} %`;
}
