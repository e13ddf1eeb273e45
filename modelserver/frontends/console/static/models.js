// The models of the repository, and the page of one of them.

import { button, bytes, call, confirm, copyButton, count, empty, field, get, h, ms, rate, say, server, toast, watch } from "./core.js";
import { playground } from "./playground.js";

const link = (name, rest = "") => `#/models/${encodeURIComponent(name)}${rest}`;
// Reasons that are no failure: the model is not there because nobody wanted it.
const isIdle = (row) => row.state === "UNAVAILABLE" && (!row.reason || /^(unloaded|not in memory)/.test(row.reason));

export function statePill(row) {
  const word = isIdle(row) ? (row.reason.startsWith("not in") ? "On demand" : "Unloaded") : row.state ? row.state[0] + row.state.slice(1).toLowerCase() : "–";
  return h("span", { class: `pill ${isIdle(row) ? "idle" : row.state.toLowerCase()}` }, word);
}

const reasonsOf = (rows) => [...new Set(rows.filter((row) => row.reason && !isIdle(row)).map((row) => row.reason))].map((reason) => h("p", { class: "reason-box" }, reason));

// Models that are being loaded or unloaded from this page, and how.
const busy = new Map();

async function control(name, verb, label) {
  busy.set(name, label);
  try {
    await call(`v2/repository/models/${encodeURIComponent(name)}/${verb}`, { json: {} });
    toast(`${name} is ${verb}ed.`, "good");
  } catch (error) {
    toast(error.message, "bad");
  }
  busy.delete(name);
}

const load = (name) => control(name, "load", "Loading…");
async function unload(name) {
  if (await confirm(`Unload ${name}?`, "Requests in progress are finished. Later ones fail until the model is loaded again.", "Unload")) {
    await control(name, "unload", "Unloading…");
  }
}

function actions(name, rows) {
  if (busy.has(name)) return [h("span", { class: "muted", "aria-live": "polite" }, busy.get(name))];
  const isReady = rows.some((row) => row.state === "READY");
  const named = (verb) => ({ "aria-label": `${verb} ${name}` });
  return [
    isReady && h("a", { class: "button", href: server.chats.includes(name) ? `#/chat?model=${encodeURIComponent(name)}` : link(name), ...named(server.chats.includes(name) ? "Chat with" : "Try") }, server.chats.includes(name) ? "Chat" : "Try"),
    button(isReady ? "Reload" : "Load", () => load(name), named(isReady ? "Reload" : "Load")),
    isReady && button("Unload", () => unload(name), named("Unload")),
  ];
}

export function byName(models) {
  const found = new Map();
  for (const row of models) found.set(row.name, [...(found.get(row.name) ?? []), row]);
  return found;
}

// Requests per second of the last seconds, of all versions of a model.
function requestRate(rows) {
  const samples = server.samples, before = samples.at(-6) ?? samples[0];
  const parts = rows.map((row) => rate(samples.at(-1), before, `${row.name} ${row.version}`, (each) => each.success + each.fail));
  return parts.some((part) => part != null && !Number.isNaN(part)) ? parts.reduce((sum, part) => sum + (part || 0), 0) : null;
}

const COLUMNS = ["Model", "State", "Backend", "Requests", "Per second", "p50", "p99", "Queue", "Instances", ""];

function modelRow(name, rows) {
  const served = rows.filter((row) => row.latency);
  const sum = (figure) => served.reduce((total, row) => total + figure(row), 0);
  const failed = sum((row) => row.fail);
  const slowest = (quantile) => (sum((row) => row.success) ? ms(Math.max(...served.map((row) => row.latency[quantile]))) : "–");
  const figures = served.length
    ? [h("span", {}, count(sum((row) => row.success)), failed ? h("span", { class: "bad-text" }, ` ${count(failed)} failed`) : null),
       count(requestRate(rows) ?? 0), slowest("p50_ms"), slowest("p99_ms"), String(sum((row) => row.queue_depth)),
       String(sum((row) => row.instances.length))]
    : ["", "", "", "", "", ""];
  const states = rows.map((row) => h("span", { class: "state" }, row.version && rows.length > 1 && h("span", { class: "muted" }, `v${row.version}`), statePill(row)));
  const cells = [h("a", { href: link(name), title: name }, name), states, served[0]?.backend ?? "", ...figures];
  const reasons = reasonsOf(rows);
  return [
    h("tr", { "data-model": name }, cells.map((cell, index) => h("td", { "data-label": COLUMNS[index], class: index > 2 ? "number" : "" }, cell)),
      h("td", { class: "actions" }, actions(name, rows))),
    reasons.length > 0 && h("tr", { class: "reason" }, h("td", { colspan: COLUMNS.length }, reasons)),
  ];
}

export function modelsPage({ root, atEnd }) {
  const search = h("input", { type: "search", placeholder: "Filter", "aria-label": "Filter models", oninput: () => draw() });
  const summary = h("p", { class: "muted" });
  const body = h("tbody");
  const table = h("table", { class: "models cards" }, h("thead", {}, h("tr", {}, COLUMNS.map((text, index) => h("th", { scope: "col", class: index > 2 ? "number" : "" }, text)))), body);
  const place = h("div", { class: "scroll" });
  root.append(h("div", { class: "head" }, h("h1", {}, "Models"), summary, search), place);
  let drawn = "";
  function draw() {
    const models = server.overview?.models;
    if (!models) {
      place.replaceChildren(server.error ? empty("No models to show", server.error) : h("p", { class: "muted" }, "Loading…"));
      return;
    }
    const found = [...byName(models)].filter(([name]) => name.toLowerCase().includes(search.value.toLowerCase()));
    const ready = [...byName(models).values()].filter((rows) => rows.some((row) => row.state === "READY")).length;
    say(summary, server.overview.isPartial ? "This key may not read figures." : `${ready} of ${byName(models).size} ready`);
    if (place.firstChild !== table) place.replaceChildren(table);
    const rows = found.map(([name, versions]) => modelRow(name, versions)).flat().filter(Boolean);
    const text = rows.map((row) => row.textContent).join("\n");
    if (text === drawn) return; // what has the focus keeps it
    drawn = text;
    const focused = document.activeElement?.getAttribute("aria-label");
    body.replaceChildren(...rows);
    if (!rows.length) body.append(h("tr", {}, h("td", { colspan: COLUMNS.length }, "No model has such a name.")));
    if (focused && document.activeElement === document.body) body.querySelector(`[aria-label="${CSS.escape(focused)}"]`)?.focus();
  }
  atEnd(watch(draw));
}

// ------------------------------------------------------------------------------------------------------ one model's page

export function modelPage({ root, parameters, atEnd }, name) {
  const states = h("span", { class: "row" }), tools = h("span", { class: "row push" }), reason = h("div");
  const tabs = h("div", { class: "tabs", role: "tablist", "aria-label": "Views of the model" }), panel = h("div", { role: "tabpanel", id: "panel" });
  root.append(h("div", { class: "head" }, h("h1", {}, name), states, tools), reason, tabs, panel);
  const VIEWS = [["try", "Try it", tryView], ["figures", "Figures", figuresView], ["config", "Configuration", configView]];
  let chosen = parameters.get("view") ?? "try", ends = [], shown = "", drawn = "";

  function show(id) {
    chosen = id;
    ends.forEach((end) => end());
    ends = [];
    tabs.replaceChildren(...VIEWS.map(([view, text]) => button(text, () => show(view), {
      role: "tab", "aria-selected": String(view === id), "aria-controls": "panel", tabindex: view === id ? 0 : -1,
    })));
    panel.replaceChildren(h("p", { class: "muted" }, "Loading…"));
    const isCurrent = () => chosen === id && panel.isConnected;
    VIEWS.find(([view]) => view === id)[2](name, (end) => ends.push(end)).then(
      (...elements) => isCurrent() && panel.replaceChildren(...elements.flat()),
      (error) => isCurrent() && panel.replaceChildren(empty("Not available", error.message)),
    );
  }
  tabs.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    show(VIEWS[(VIEWS.findIndex(([view]) => view === chosen) + step + VIEWS.length) % VIEWS.length][0]);
    tabs.querySelector('[aria-selected="true"]').focus();
  });

  function draw() {
    const rows = byName(server.overview?.models ?? []).get(name);
    if (!rows) {
      if (server.overview) reason.replaceChildren(h("p", { class: "reason-box" }, "The repository has no model of this name."));
      return;
    }
    const text = JSON.stringify([rows.map((row) => [row.version, row.state, row.reason]), busy.get(name)]);
    if (text !== drawn) {
      drawn = text;
      states.replaceChildren(...rows.map((row) => h("span", { class: "state" }, row.version && h("span", { class: "muted" }, `v${row.version}`), statePill(row))));
      tools.replaceChildren(...actions(name, rows).filter(Boolean).filter((item) => !item.hash?.startsWith("#/models")));
      reason.replaceChildren(...reasonsOf(rows));
    }
    const ready = rows.map((row) => `${row.version} ${row.state}`).join();
    if (ready !== shown) { // a load or unload changes what can be asked
      shown = ready;
      show(chosen);
    }
  }
  atEnd(watch(draw));
  atEnd(() => ends.forEach((end) => end()));
}

async function tryView(name, atEnd) {
  const path = `v2/models/${encodeURIComponent(name)}`;
  const [metadata, config] = await Promise.all([get(path), get(`${path}/config`)]);
  return playground(name, metadata, config, metadata.versions, atEnd);
}

async function configView(name) {
  const text = JSON.stringify(await get(`v2/models/${encodeURIComponent(name)}/config`), null, 2);
  return h("section", { class: "card", "aria-label": "Configuration" },
    h("div", { class: "row" }, h("p", { class: "muted" }, "As the server completed it, with all defaults."), h("span", { class: "push" }), copyButton(text)),
    h("pre", { class: "code", tabindex: 0 }, highlighted(text)));
}

// JSON with the kinds of its values told apart.
function highlighted(text) {
  const parts = text.split(/("(?:[^"\\]|\\.)*"(?:\s*:)?|\btrue\b|\bfalse\b|\bnull\b|-?\d[\d.eE+-]*)/);
  return parts.map((part, index) => (index % 2 ? h("span", { class: part.endsWith(":") ? "json-name" : part.startsWith('"') ? "json-text" : "json-number" }, part) : part));
}

const PHASES = [["queue_ms", "queue"], ["compute_input_ms", "input"], ["compute_infer_ms", "compute"], ["compute_output_ms", "output"]];

function phasesBar(phases) {
  const total = PHASES.reduce((sum, [id]) => sum + phases[id], 0);
  if (!total) return h("p", { class: "muted" }, "No requests yet.");
  const bar = h("div", { class: "phases", role: "img", "aria-label": PHASES.map(([id, text]) => `${text} ${ms(phases[id])}`).join(", ") },
    PHASES.map(([id], index) => {
      const part = h("span", { class: `phase-${index}` });
      part.style.flexGrow = phases[id];
      return part;
    }));
  return [bar, h("p", { class: "legend" }, PHASES.map(([id, text], index) => h("span", {}, h("i", { class: `phase-${index}` }), `${text} ${ms(phases[id])}`)))];
}

function versionFigures(row) {
  const failures = Object.entries(row.failures);
  const figures = [["Requests", count(row.success)], ["Failed", count(row.fail)], ["Mean", ms(row.latency.mean_ms)], ["p50", ms(row.latency.p50_ms)],
    ["p90", ms(row.latency.p90_ms)], ["p99", ms(row.latency.p99_ms)], ["Mean batch", count(row.mean_batch)], ["Waiting", row.queue_depth],
    ["In progress", row.inflight], ["Cache hits", count(row.cache_hits)], ["Load took", `${row.load_duration_s.toFixed(2)} s`]];
  return h("section", { class: "card", "aria-label": `Version ${row.version}` }, h("h2", {}, `Version ${row.version}`),
    h("dl", { class: "figures" }, figures.map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, String(value))))),
    failures.length > 0 && h("p", { class: "bad-text" }, "Failures: ", failures.map(([why, num]) => `${num} ${why}`).join(", ")),
    h("h3", {}, "Where a request spends its time"), phasesBar(row.phases),
    row.instances.length > 0 && h("table", { class: "instances" }, h("thead", {}, h("tr", {}, ["Instance", "Place", "Executions", "State"].map((text) => h("th", { scope: "col" }, text)))),
      h("tbody", {}, row.instances.map((each) => h("tr", {}, h("td", {}, each.name), h("td", {}, `${each.kind.replace("KIND_", "")} ${each.device}`),
        h("td", {}, count(each.execution_count)), h("td", {}, each.is_busy ? "busy" : "idle", each.pid ? ` · process ${each.pid}, ${bytes(each.memory_bytes)}` : ""))))));
}

async function figuresView(name, atEnd) {
  const place = h("div", { class: "stack" }), traffic = h("div");
  let drawn = "";
  atEnd(watch(() => {
    const rows = (server.overview?.models ?? []).filter((row) => row.name === name && row.latency);
    const text = JSON.stringify(rows);
    if (text === drawn) return;
    drawn = text;
    place.replaceChildren(...(rows.length ? rows.map(versionFigures) : [empty("No figures", "No version of this model is loaded.")]));
  }));
  const versions = (server.overview?.models ?? []).filter((row) => row.name === name && row.state === "READY").map((row) => row.version);
  if (versions.length > 1) traffic.append(await trafficCard(name, versions));
  return h("div", { class: "stack" }, traffic, place);
}

async function trafficCard(name, versions) {
  const path = `v2/repository/models/${encodeURIComponent(name)}/traffic`;
  const inputs = new Map(versions.map((version) => [version, h("input", { type: "number", min: 0, step: "any", "aria-label": `Weight of version ${version}` })]));
  const now = h("p", { class: "muted" });
  const highest = versions.reduce((one, other) => (Number(other) > Number(one) ? other : one));
  function show(document) {
    for (const [version, input] of inputs) input.value = document.weights ? (document.weights[version] ?? 0) : version === highest ? 100 : 0;
    say(now, document.shares ? `Now: ${Object.entries(document.shares).map(([version, share]) => `version ${version} answers ${(share * 100).toFixed(0)} %`).join(", ")}.`
      : `The highest version, ${highest}, answers requests that name none.`);
  }
  async function change(options, text) {
    try {
      show(await get(path, options));
      toast(text, "good");
    } catch (error) {
      toast(error.message, "bad");
    }
  }
  try {
    show(await get(path, { quiet: true }));
  } catch (error) {
    return h("p", { class: "muted" }, `Traffic: ${error.message}`);
  }
  const weights = () => Object.fromEntries([...inputs].filter(([, input]) => Number(input.value) > 0).map(([version, input]) => [version, Number(input.value)]));
  return h("form", { class: "card", "aria-label": "Traffic", onsubmit: (event) => { event.preventDefault(); change({ json: { weights: weights() } }, "The versions share the requests now."); } },
    h("h2", {}, "Traffic"), now, h("div", { class: "row" }, [...inputs].map(([version, input]) => field(`Version ${version}`, input))),
    h("div", { class: "row" }, h("button", { class: "primary" }, "Set weights"), button("Back to the highest version", () => change({ method: "DELETE" }, "The highest version answers again."))));
}
