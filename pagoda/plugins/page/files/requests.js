// SPDX-License-Identifier: Apache-2.0
// The table of running answers, each with a button that cancels it.

import { request, sentence } from "./api.js";
import { announce, h, setText } from "./dom.js";
import { count, seconds } from "./format.js";

const COLUMNS = ["Request", "Key", "State", "Prompt", "Answer", "Age", ""];

export class RequestTable {
  constructor(root, more) {
    this.more = more;
    this.rows = new Map();
    this.body = h("tbody");
    this.table = h(
      "table",
      { class: "requests" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          COLUMNS.map((name) =>
            name ? h("th", { scope: "col" }, name) : h("td", {}, h("span", { class: "hidden" }, "Cancel")),
          ),
        ),
      ),
      this.body,
    );
    this.empty = h("p", { class: "empty muted" });
    root.append(this.empty, this.table);
    this.table.hidden = true;
  }

  // `numRunning` includes requests that routers have sent, which only the routers can list.
  show(answers, total, numRunning) {
    setText(
      this.empty,
      numRunning > 0
        ? "A router sent the requests that run here; the router's page lists them."
        : "Nothing is running. Ask something in the Playground.",
    );
    const ids = new Set(answers.map((answer) => answer.id));
    for (const [id, row] of this.rows) {
      if (!ids.has(id)) {
        this.keepFocus(row);
        row.element.remove();
        this.rows.delete(id);
      }
    }
    for (const answer of answers) {
      let row = this.rows.get(answer.id);
      if (!row) {
        row = makeRow(answer);
        this.rows.set(answer.id, row);
        this.body.append(row.element);
      }
      fill(row, answer);
    }
    const keys = answers.some((answer) => answer.key);
    this.table.classList.toggle("keyless", !keys);
    this.empty.hidden = answers.length > 0;
    this.table.hidden = answers.length === 0;
    const hidden = total - answers.length;
    setText(this.more, hidden > 0 ? `the oldest ${answers.length} of ${total}` : total ? String(total) : "");
  }

  // When an answer ends whose button has the focus, the next button gets it.
  keepFocus(row) {
    if (!row.element.contains(document.activeElement)) return;
    const next = row.element.nextElementSibling ?? row.element.previousElementSibling;
    next?.querySelector("button")?.focus();
  }
}

function makeRow(answer) {
  const cell = () => h("td");
  const bar = h("progress", { max: String(answer.max_tokens), value: "0", "aria-label": `Tokens of ${answer.id}` });
  const tokens = h("span", { class: "number" });
  const row = {
    key: cell(),
    state: h("span", { class: "badge" }),
    prompt: cell(),
    age: cell(),
    bar,
    tokens,
    button: h("button", { type: "button", class: "small", "aria-label": `Cancel ${answer.id}` }, "Cancel"),
  };
  row.prompt.className = row.age.className = "number";
  row.key.className = "keycol";
  row.button.addEventListener("click", () => cancel(answer.id, row.button));
  row.element = h(
    "tr",
    { "data-id": answer.id },
    h("th", { scope: "row", title: answer.id }, answer.id),
    row.key,
    h("td", {}, row.state),
    row.prompt,
    h("td", { class: "progress" }, bar, tokens),
    row.age,
    h("td", { class: "end" }, row.button),
  );
  return row;
}

function fill(row, answer) {
  setText(row.key, answer.key);
  setText(row.state, answer.state);
  row.state.dataset.state = answer.state;
  const cached = answer.cached_tokens ? ` (${count(answer.cached_tokens)} cached)` : "";
  setText(row.prompt, count(answer.prompt_tokens) + cached);
  row.bar.setAttribute("value", String(answer.output_tokens));
  setText(row.tokens, `${count(answer.output_tokens)} / ${count(answer.max_tokens)}`);
  setText(row.age, seconds(answer.age_s));
}

async function cancel(id, button) {
  button.disabled = true;
  setText(button, "Ending");
  try {
    await request(`/v1/requests/${encodeURIComponent(id)}`, { method: "DELETE" });
    announce(`Request ${id} was cancelled.`);
  } catch (error) {
    announce(sentence(error));
    if (error.status !== 404) {
      button.disabled = false;
      setText(button, "Cancel");
    }
  }
}
