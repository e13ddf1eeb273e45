// The frame of the console: which page is shown, the theme, and the key.

import { logsPage, tracesPage } from "./activity.js";
import { chartsPage } from "./charts.js";
import { chatPage } from "./chat.js";
import { askForKey, button, empty, forgetKey, h, hasKey, say, server, span, startPolling, watch } from "./core.js";
import { modelPage, modelsPage } from "./models.js";

const PAGES = [
  ["models", "Models", modelsPage],
  ["chat", "Chat", chatPage],
  ["charts", "Charts", chartsPage],
  ["logs", "Logs", logsPage],
  ["traces", "Traces", tracesPage],
];
const DETAILS = { models: modelPage };

const main = document.getElementById("main");
let leave = () => {};

// Addresses are #/PAGE or #/PAGE/NAME, with `?` and parameters behind.
function show() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/").map(decodeURIComponent);
  const page = PAGES.find(([id]) => id === name) ?? PAGES[0];
  for (const link of document.querySelectorAll("#pages a")) {
    if (link.dataset.page === page[0]) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  leave();
  const root = h("div", { class: `page ${page[0]}` });
  const cleanups = [];
  const parameters = new URLSearchParams(query);
  main.replaceChildren(root);
  leave = () => cleanups.forEach((end) => end());
  const render = rest[0] && DETAILS[page[0]] ? (scope) => DETAILS[page[0]](scope, rest[0]) : page[2];
  document.title = `${rest[0] ?? page[1]} · modelserver`;
  try {
    render({ root, parameters, atEnd: (end) => cleanups.push(end) });
  } catch (error) {
    root.replaceChildren(empty("This page failed", error.message));
    throw error;
  }
  if (document.activeElement === document.body) main.focus({ preventScroll: true });
}

document.getElementById("pages").append(...PAGES.map(([id, text]) => h("a", { href: `#/${id}`, "data-page": id }, text)));
document.getElementById("skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });

const THEMES = ["", "light", "dark"];
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("theme", theme);
}
setTheme(localStorage.getItem("theme") ?? "");

const status = h("span", { class: "status", role: "status" });
const keyButton = button("Key", () => (hasKey() ? forgetKey() : askForKey()), { class: "quiet" });
const themeButton = button("◐", () => {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  setTheme(next);
  themeButton.title = `Theme: ${next || "as the system"}`;
}, { class: "quiet", "aria-label": "Change theme", title: "Theme" });
document.getElementById("tools").append(status, keyButton, themeButton);

watch(() => {
  say(keyButton, hasKey() ? "Forget key" : "Key");
  const overview = server.overview;
  status.className = `status ${server.error ? "bad" : overview ? "good" : ""}`;
  say(status, server.error ? (server.isLocked ? "Key needed" : "No answer") : overview?.server ? `Up ${span(overview.server.uptime_s)}` : "");
  status.title = server.error;
});

addEventListener("hashchange", show);
startPolling();
show();
