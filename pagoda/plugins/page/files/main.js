// SPDX-License-Identifier: Apache-2.0
// The frame around the two views: tabs, theme, API key.

import { key, onKeyNeeded } from "./api.js";
import { $ } from "./dom.js";
import { startLive } from "./live.js";
import { startPlayground } from "./playground.js";
import { Stored } from "./storage.js";

const VIEWS = ["live", "playground"];

function show(view, focus = false) {
  for (const name of VIEWS) {
    const tab = $(`tab-${name}`);
    const chosen = name === view;
    $(name).hidden = !chosen;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    if (chosen && focus) tab.focus();
  }
  document.title = `Pagoda · ${view === "live" ? "Live" : "Playground"}`;
  document.body.dataset.view = view;
}

const viewOf = (hash) => VIEWS.find((name) => hash === `#/${name}`) ?? "live";

function startTabs(onShow) {
  const change = (focus = false) => {
    show(viewOf(location.hash), focus);
    onShow();
  };
  for (const name of VIEWS) {
    $(`tab-${name}`).addEventListener("click", () => (location.hash = `#/${name}`));
  }
  $("tabs").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -9, End: 9 }[event.key];
    if (!step) return;
    event.preventDefault();
    const index = VIEWS.indexOf(viewOf(location.hash));
    const next = Math.abs(step) > 1 ? (step < 0 ? 0 : VIEWS.length - 1) : (index + step + VIEWS.length) % VIEWS.length;
    history.replaceState(null, "", `#/${VIEWS[next]}`);
    change(true);
  });
  addEventListener("hashchange", () => change());
  $("skip").addEventListener("click", (event) => {
    event.preventDefault();
    $("main").focus();
  });
  change();
}

const THEMES = { auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" };

function startTheme() {
  const apply = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    $("theme-button").textContent = { auto: "◐", light: "☀", dark: "☾" }[theme];
    $("theme-button").setAttribute("aria-label", THEMES[theme]);
    $("theme-button").title = THEMES[theme];
  };
  const chosen = new Stored("localStorage", "pagoda-theme");
  let theme = chosen.get();
  if (!(theme in THEMES)) theme = "auto";
  apply(theme);
  $("theme-button").addEventListener("click", () => {
    const names = Object.keys(THEMES);
    theme = names[(names.indexOf(theme) + 1) % names.length];
    chosen.set(theme);
    apply(theme);
  });
}

function startKey(onChange) {
  const dialog = $("key-dialog");
  let refused = false;
  const open = () => {
    if (dialog.open) return;
    $("key").value = key.get();
    $("key-reason").textContent =
      refused && key.get()
        ? "The server does not accept this key."
        : "This server needs an API key. The key is kept until this tab is closed.";
    dialog.showModal();
  };
  $("key-button").hidden = !key.get();
  $("key-button").addEventListener("click", () => {
    refused = false;
    open();
  });
  onKeyNeeded(() => {
    refused = true;
    $("key-button").hidden = false;
    open();
  });
  $("key-cancel").addEventListener("click", () => dialog.close());
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    key.set($("key").value.trim());
    dialog.close();
    onChange();
  });
}

startTheme();
const live = startLive();
startTabs(live.draw);
const playground = startPlayground();
startKey(() => {
  live.retry();
  playground.reload();
});
live.onServer(() => playground.reload());
