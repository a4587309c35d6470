// SPDX-License-Identifier: Apache-2.0
// Shows a request as code, and puts it on the clipboard where the browser allows that.

import { $, setText } from "./dom.js";

async function copy() {
  try {
    await navigator.clipboard.writeText($("code").textContent);
    setText($("code-note"), "Copied to the clipboard.");
  } catch {
    getSelection().selectAllChildren($("code"));
    setText($("code-note"), "Selected; copy it with Ctrl+C.");
  }
}

export function showCode(kind, text) {
  setText($("code-title"), `Request as ${kind}`);
  setText($("code"), text);
  setText($("code-note"), "");
  $("code-dialog").showModal();
  copy();
}

$("code-copy").addEventListener("click", copy);
$("code-close").addEventListener("click", () => $("code-dialog").close());
