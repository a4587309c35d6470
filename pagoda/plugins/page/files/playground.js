// SPDX-License-Identifier: Apache-2.0
// The Playground view: panes side by side, and one prompt for all of them.

import { request } from "./api.js";
import { $ } from "./dom.js";
import { Pane } from "./pane.js";

// A browser opens six connections to a server, and the Live view has one of them.
const MAX_PANES = 4;

export function startPlayground() {
  const panes = [];
  let models = [];

  function change() {
    const busy = panes.some((pane) => pane.running);
    $("stop").disabled = !busy;
    $("add-pane").disabled = panes.length >= MAX_PANES;
    for (const pane of panes) pane.closeButton.hidden = panes.length === 1;
  }

  function add() {
    const pane = new Pane({ onClose: close, onChange: change, onExample: ask });
    const last = panes.at(-1);
    if (last) {
      pane.typed = { ...last.typed };
      pane.mode = last.mode;
      pane.drawSettings();
      pane.drawEmpty();
    }
    pane.setModels(models);
    panes.push(pane);
    $("panes").append(pane.element);
    change();
  }

  function close(pane) {
    pane.stop();
    panes.splice(panes.indexOf(pane), 1);
    pane.element.remove();
    change();
    $("add-pane").focus();
  }

  function send() {
    const text = $("prompt").value;
    if (text.trim()) ask(text);
    $("prompt").focus();
  }

  function ask(text) {
    $("prompt").value = "";
    for (const pane of panes) pane.ask(text);
  }

  async function reload() {
    try {
      models = (await (await request("/v1/models")).json()).data;
    } catch {
      return; // the Live view says why, and asks again
    }
    for (const pane of panes) pane.setModels(models);
    $("model").textContent = models.map((model) => model.id).join(", ");
  }

  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  $("stop").addEventListener("click", () => {
    for (const pane of panes) pane.stop();
    change();
    $("prompt").focus();
  });
  $("add-pane").addEventListener("click", add);
  $("mode").addEventListener("change", (event) => {
    for (const pane of panes) pane.setMode(event.target.value);
  });
  add();
  return { reload };
}
