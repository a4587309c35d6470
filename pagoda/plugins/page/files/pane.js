// SPDX-License-Identifier: Apache-2.0
// One pane of the playground: a model, its parameters, and a conversation of its own.

import { events, request, sentence } from "./api.js";
import { Answer } from "./answer.js";
import { asCurl, asPython } from "./code.js";
import { showCode } from "./code_dialog.js";
import { announce, h, setText } from "./dom.js";
import { GROUPS, readFields } from "./fields.js";

const EXAMPLES = {
  chat: ["What is 17 + 25?", "Reverse the word lantern.", "Sort the numbers 31, 7, 19."],
  completion: ["Once upon a time", "def fibonacci(n):"],
};

let numPanes = 0;

export class Pane {
  constructor({ onClose, onChange, onExample }) {
    this.number = ++numPanes;
    this.onChange = onChange;
    this.onExample = onExample;
    this.mode = "chat";
    this.typed = { temperature: "0.7", max_tokens: "256" };
    this.turns = [];
    this.running = null;
    this.model = h("select", { "aria-label": `Model of pane ${this.number}` });
    this.settings = h("form", { class: "settings", hidden: true, "aria-label": `Parameters of pane ${this.number}` });
    this.settings.addEventListener("submit", (event) => event.preventDefault());
    this.toggle = h(
      "button",
      { type: "button", class: "small", "aria-expanded": "false", onclick: () => this.toggleSettings() },
      "Parameters",
    );
    this.clearButton = h("button", { type: "button", class: "small", onclick: () => this.clear() }, "Clear");
    this.closeButton = h(
      "button",
      { type: "button", class: "small quiet", "aria-label": `Close pane ${this.number}`, onclick: () => onClose(this) },
      "✕",
    );
    this.log = h("div", { class: "log", tabindex: "0", role: "region", "aria-label": `Conversation ${this.number}` });
    this.element = h(
      "section",
      { class: "pane card", "aria-label": `Pane ${this.number}` },
      h("div", { class: "row pane-head" }, this.model, h("span", { class: "grow" }), this.toggle, this.clearButton, this.closeButton),
      this.settings,
      this.log,
    );
    this.drawSettings();
    this.drawEmpty();
  }

  // ---- parameters

  setModels(models) {
    const chosen = this.model.value;
    this.model.replaceChildren(...models.map((model) => h("option", { value: model.id }, model.id)));
    if (models.some((model) => model.id === chosen)) this.model.value = chosen;
  }

  setMode(mode) {
    if (mode === this.mode) return;
    this.stop();
    this.mode = mode;
    this.drawSettings();
    this.clear();
  }

  toggleSettings() {
    const open = this.settings.hidden;
    this.settings.hidden = !open;
    this.toggle.setAttribute("aria-expanded", String(open));
  }

  drawSettings() {
    const groups = GROUPS.filter((group) => !group.only || group.only === this.mode);
    this.settings.replaceChildren(
      this.mode === "chat" ? this.control({ name: "system", label: "System prompt", kind: "long", hint: "none" }) : "",
      ...groups.map((group) =>
        h(
          "fieldset",
          {},
          h("legend", {}, group.title),
          h(
            "div",
            { class: "fields" },
            group.fields.filter((field) => !field.only || field.only === this.mode).map((field) => this.control(field)),
          ),
        ),
      ),
    );
    this.countSettings();
  }

  control(field) {
    const props = {
      name: field.name,
      placeholder: field.hint || "default",
      spellcheck: false,
      autocomplete: "off",
      oninput: (event) => {
        this.typed[field.name] = event.target.value;
        this.countSettings();
      },
    };
    let input;
    if (field.kind === "choice") {
      const options = ["", ...field.options].map((value) => h("option", { value }, value || "default"));
      input = h("select", props, options);
    } else if (["json", "lines", "long"].includes(field.kind)) {
      input = h("textarea", { ...props, rows: field.tall ? "4" : "2", class: field.kind === "json" ? "mono" : "" });
    } else {
      input = h("input", { ...props, type: "text", inputmode: field.kind === "number" ? "decimal" : "text" });
    }
    input.value = this.typed[field.name] ?? "";
    const wide = input.tagName === "TEXTAREA" ? "wide" : "";
    return h("label", { class: wide }, h("span", {}, field.label), input);
  }

  countSettings() {
    const names = this.settings.querySelectorAll("[name]");
    const number = [...names].filter((input) => input.value !== "").length;
    setText(this.toggle, number ? `Parameters · ${number}` : "Parameters");
  }

  body(messages) {
    const body = {
      model: this.model.value,
      ...(this.mode === "chat" ? { messages } : { prompt: messages.at(-1).content }),
      ...readFields(this.typed, this.mode),
      stream: true,
      stream_options: { include_usage: true },
    };
    const system = (this.typed.system ?? "").trim();
    if (this.mode === "chat" && system) body.messages = [{ role: "system", content: system }, ...messages];
    return body;
  }

  get path() {
    return this.mode === "chat" ? "/v1/chat/completions" : "/v1/completions";
  }

  // ---- the conversation

  // A turn is { messages, element, answer? }: what it adds to the messages, and how it looks.
  messagesBefore(turn) {
    const end = turn ? this.turns.indexOf(turn) : this.turns.length;
    return this.turns.slice(0, end).flatMap((one) => one.messages());
  }

  ask(text) {
    this.stop();
    this.addUserTurn(text);
    return this.generate();
  }

  addUserTurn(text) {
    if (!this.turns.length) this.log.replaceChildren();
    const turn = { messages: () => [{ role: "user", content: turn.text }], text };
    const shown = h("p", { class: "text" }, text);
    const edit = h("button", { type: "button", class: "small quiet", onclick: () => this.edit(turn) }, "Edit");
    turn.shown = shown;
    turn.element = h("article", { class: "turn user", "aria-label": "Prompt" }, shown, h("div", { class: "row actions" }, edit));
    this.push(turn);
  }

  edit(turn) {
    const area = h("textarea", { rows: "3", "aria-label": "Edit the prompt" });
    area.value = turn.text;
    const done = () => form.replaceWith(turn.shown);
    const form = h(
      "form",
      { class: "editor" },
      area,
      h(
        "div",
        { class: "row end" },
        h("button", { type: "button", class: "small", onclick: done }, "Cancel"),
        h("button", { type: "submit", class: "small primary" }, "Ask again"),
      ),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      turn.text = area.value;
      setText(turn.shown, area.value);
      done();
      this.cutAfter(turn);
      this.generate();
    });
    turn.shown.replaceWith(form);
    area.focus();
  }

  push(turn) {
    this.turns.push(turn);
    this.log.append(turn.element);
    this.scroll();
  }

  cutAfter(turn) {
    this.stop();
    for (const later of this.turns.splice(this.turns.indexOf(turn) + 1)) later.element.remove();
  }

  clear() {
    this.stop();
    this.turns = [];
    this.drawEmpty();
  }

  drawEmpty() {
    const text =
      this.mode === "chat"
        ? "Ask something below. Each pane answers with its own model and parameters."
        : "Begin a text below; the model continues it.";
    const examples = EXAMPLES[this.mode].map((example) =>
      h("button", { type: "button", class: "small", onclick: () => this.onExample(example) }, example),
    );
    this.log.replaceChildren(
      h("div", { class: "empty muted" }, h("p", {}, text), h("div", { class: "examples" }, examples)),
    );
  }

  scroll() {
    this.log.scrollTop = this.log.scrollHeight;
  }

  // ---- answers

  async generate() {
    const before = this.messagesBefore(null);
    let body;
    try {
      body = this.body(before);
    } catch (error) {
      this.refuse(error);
      return;
    }
    const turn = {};
    const answer = new Answer(this.path, body, {
      regenerate: () => this.regenerate(turn),
      results: () => this.answerTools(turn),
      curl: () => showCode("curl", asCurl(answer.path, answer.body)),
      python: () => showCode("Python", asPython(answer.path, answer.body)),
    });
    turn.messages = () => (answer.choices.length ? [answer.choices[0].message()] : []);
    turn.element = answer.element;
    turn.answer = answer;
    this.push(turn);
    await this.run(answer);
  }

  refuse(error) {
    const turn = { messages: () => [], element: h("p", { class: "error", role: "alert" }, sentence(error)) };
    this.push(turn);
  }

  async run(answer) {
    const abort = (this.running = new AbortController());
    this.onChange();
    try {
      const response = await request(answer.path, { body: answer.body, signal: abort.signal });
      for await (const event of events(response)) {
        const atEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
        answer.take(event);
        if (atEnd) this.scroll();
      }
      answer.end("");
      announce(`Pane ${this.number} has answered.`);
    } catch (error) {
      if (abort.signal.aborted) answer.end("", "stopped");
      else answer.end(sentence(error));
    } finally {
      if (this.running === abort) this.running = null;
      this.onChange();
      this.scroll();
    }
  }

  stop() {
    this.running?.abort();
    this.running = null;
  }

  regenerate(turn) {
    const index = this.turns.indexOf(turn);
    this.stop();
    for (const later of this.turns.splice(index)) later.element.remove();
    return this.generate();
  }

  answerTools(turn) {
    const results = turn.answer.choices[0].results();
    const added = {
      messages: () => results,
      element: h(
        "article",
        { class: "turn tool", "aria-label": "Tool results" },
        results.map((result) => h("p", { class: "text" }, result.content || "(nothing)")),
      ),
    };
    this.cutAfter(turn);
    this.push(added);
    return this.generate();
  }
}
