// SPDX-License-Identifier: Apache-2.0
// One answer in a pane: takes the events of its stream, shows them, and says how fast it was.

import { h, setText } from "./dom.js";
import { count, ms } from "./format.js";
import { TokenView, hideTip, tokensOf } from "./tokens.js";

const LEAST_STREAMED_S = 0.1; // what took less came in too few pieces to say how fast

const REASONS = {
  stop: "complete",
  length: "cut at max_tokens",
  tool_calls: "calls tools",
  abort: "cancelled",
  stopped: "stopped here",
};

// The parts of an answer, for the messages that follow it.
class Choice {
  constructor() {
    this.text = "";
    this.calls = [];
    this.content = document.createTextNode("");
    this.reasoning = document.createTextNode("");
    this.thoughts = h("details", { class: "thoughts", hidden: true }, h("summary", {}, "Reasoning"), h("p", {}, this.reasoning));
    this.plain = h("p", { class: "text" }, this.content);
    this.tokens = null;
    this.callList = h("ul", { class: "calls" });
    this.finish = "";
    this.element = h("div", { class: "choice" }, this.thoughts, this.plain, this.callList);
  }

  add(choice) {
    const delta = choice.delta ?? { content: choice.text };
    if (delta.reasoning_content) {
      this.thoughts.hidden = false;
      this.reasoning.appendData(delta.reasoning_content);
    }
    if (delta.content) {
      this.text += delta.content;
      this.content.appendData(delta.content);
    }
    for (const call of delta.tool_calls ?? []) this.addCall(call);
    for (const token of tokensOf(choice.logprobs)) this.addToken(token);
    this.finish = choice.finish_reason ?? this.finish;
  }

  addToken(token) {
    if (!this.tokens) {
      this.tokens = new TokenView();
      this.plain.replaceWith(this.tokens.element);
    }
    this.tokens.add(token);
  }

  addCall(delta) {
    let call = this.calls[delta.index];
    if (!call) {
      call = this.calls[delta.index] = { id: "", name: "", arguments: "" };
      call.code = h("code", {});
      call.input = h("input", { type: "text", placeholder: "what the tool returns" });
      call.element = h("li", {}, call.code, h("label", {}, h("span", {}, "Result"), call.input));
      this.callList.append(call.element);
    }
    call.id = delta.id ?? call.id;
    call.name += delta.function?.name ?? "";
    call.arguments += delta.function?.arguments ?? "";
    setText(call.code, `${call.name}(${call.arguments})`);
  }

  message() {
    const message = { role: "assistant", content: this.text };
    if (this.calls.length) {
      message.tool_calls = this.calls.map((call) => ({
        id: call.id,
        type: "function",
        function: { name: call.name, arguments: call.arguments },
      }));
    }
    return message;
  }

  results() {
    return this.calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: call.input.value }));
  }
}

export class Answer {
  // `actions`: { regenerate, curl, python, results }
  constructor(path, body, actions) {
    this.path = path;
    this.body = body;
    this.choices = [];
    this.began = performance.now();
    this.firstAt = null;
    this.usage = null;
    this.numEvents = 0;
    this.meta = h("p", { class: "meta muted" }, "waiting for the first token");
    this.error = h("p", { class: "error", role: "alert", hidden: true });
    this.again = button("Regenerate", actions.regenerate);
    this.sendResults = button("Send results", actions.results);
    this.sendResults.hidden = true;
    this.buttons = h(
      "div",
      { class: "row actions" },
      this.sendResults,
      this.again,
      button("curl", actions.curl, "Copy as curl"),
      button("Python", actions.python, "Copy as Python"),
    );
    this.parts = h("div", { class: "parts" });
    this.element = h(
      "article",
      { class: "turn assistant", "aria-busy": "true", "aria-label": "Answer" },
      this.parts,
      this.error,
      this.meta,
      this.buttons,
    );
    this.setBusy(true);
  }

  setBusy(busy) {
    this.busy = busy;
    this.element.setAttribute("aria-busy", String(busy));
    this.again.disabled = busy;
  }

  take(event) {
    if (event.usage) this.usage = event.usage;
    for (const choice of event.choices) {
      const delta = choice.delta ?? { content: choice.text };
      const says = delta.content || delta.reasoning_content || delta.tool_calls || choice.logprobs;
      if (says) {
        this.firstAt ??= performance.now();
        this.numEvents++;
      }
      this.choice(choice.index).add(choice);
    }
  }

  choice(index) {
    while (this.choices.length <= index) {
      const choice = new Choice();
      this.choices.push(choice);
      this.parts.append(choice.element);
    }
    if (this.choices.length > 1) {
      this.choices.forEach((one, number) => (one.element.dataset.number = String(number + 1)));
    }
    return this.choices[index];
  }

  // Shows how the answer ended; `error` is a sentence, or empty.
  end(error, reason = "") {
    this.endedAt = performance.now();
    this.setBusy(false);
    hideTip();
    if (error) {
      setText(this.error, error);
      this.error.hidden = false;
    }
    if (reason) for (const choice of this.choices) choice.finish ||= reason;
    this.sendResults.hidden = !this.choices[0]?.calls.length || Boolean(error);
    setText(this.meta, this.summary());
  }

  summary() {
    const told = [...new Set(this.choices.map((choice) => REASONS[choice.finish] ?? choice.finish))].filter(Boolean);
    const output = this.usage?.completion_tokens ?? this.numEvents;
    if (this.firstAt === null) return told.join(", ") || "no answer";
    told.push(`${count(output)} tokens`, `TTFT ${ms(this.firstAt - this.began)}`);
    const streamed = (this.endedAt - this.firstAt) / 1000;
    if (output > 1 && streamed >= LEAST_STREAMED_S) told.push(`${count((output - 1) / streamed)} tokens/s`);
    if (this.usage) {
      const cached = this.usage.prompt_tokens_details?.cached_tokens;
      told.push(`prompt ${count(this.usage.prompt_tokens)}${cached ? ` (${count(cached)} cached)` : ""}`);
    }
    return told.join(" · ");
  }
}

function button(text, onclick, label) {
  return h("button", { type: "button", class: "small quiet", onclick, "aria-label": label, title: label }, text);
}
