// What the server does: its log as it is written, and the timelines of traced requests.

import { call, copyButton, empty, get, h, button, lines, ms, say, select, server, toast } from "./core.js";

const MAX_LINES = 2000;
const LEVELS = { ERROR: 3, CRITICAL: 3, FATAL: 3, WARNING: 2, WARN: 2, INFO: 1 };
const LINE = /^(\S+ \S+)\s+(DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+([\w.]+): ?(.*)$/s;

function logLine(text) {
  const match = LINE.exec(text);
  const rank = LEVELS[match?.[2]] ?? (match ? 0 : 1);
  const element = match
    ? h("div", { class: `line level-${rank}` }, h("time", {}, match[1].split(" ")[1] ?? match[1]), h("b", {}, match[2]), h("span", { class: "muted" }, match[3]), h("span", {}, match[4]))
    : h("div", { class: `line level-${rank}` }, h("span", {}, text));
  return { text, rank, element };
}

export function logsPage({ root, atEnd }) {
  const search = h("input", { type: "search", placeholder: "Filter", "aria-label": "Filter lines", oninput: filter });
  const level = select([["0", "All levels"], ["1", "Info and worse"], ["2", "Warnings and worse"], ["3", "Errors"]], { "aria-label": "Level", onchange: filter });
  const follows = h("input", { type: "checkbox", checked: true });
  const verbose = h("input", { type: "checkbox", onchange: setVerbose });
  const list = h("div", { class: "log", role: "log", "aria-label": "Log", tabindex: 0, "aria-live": "off" });
  const note = h("p", { class: "muted" }, "Connecting…");
  root.append(h("div", { class: "head" }, h("h1", {}, "Logs"), note, search), h("div", { class: "row" }, level, h("label", { class: "check" }, follows, "Follow"),
    h("label", { class: "check", title: "log_verbose_level" }, verbose, "Log requests, too"), h("span", { class: "push" }), copyButton(() => all.filter(isShown).map((line) => line.text).join("\n"), "Copy lines")), list);
  let all = [];
  const isShown = (line) => line.rank >= Number(level.value) && line.text.toLowerCase().includes(search.value.toLowerCase());

  function filter() {
    for (const line of all) line.element.hidden = !isShown(line);
    bottom();
  }
  const bottom = () => { if (follows.checked) list.scrollTop = list.scrollHeight; };

  async function setVerbose() {
    try {
      await get("v2/logging", { json: { log_verbose_level: verbose.checked ? 1 : 0 } });
    } catch (error) {
      verbose.checked = !verbose.checked;
      toast(error.message, "bad");
    }
  }

  const controller = new AbortController();
  atEnd(() => controller.abort());
  async function follow() {
    try {
      const response = await call("v2/logging/lines?lines=1000&follow=true", { signal: controller.signal });
      all = [];
      list.replaceChildren();
      say(note, "");
      get("v2/logging", { quiet: true }).then((settings) => { verbose.checked = settings.log_verbose_level > 0; }).catch(() => {});
      for await (const text of lines(response)) {
        const line = logLine(text);
        line.element.hidden = !isShown(line);
        all.push(line);
        list.append(line.element);
        if (all.length > MAX_LINES) all.shift().element.remove();
        bottom();
      }
      say(note, "The server ended the log.");
    } catch (error) {
      if (error.name === "AbortError") return;
      say(note, error.message);
      if (error.status === 403 || error.status === 401) return;
    }
    const timer = setTimeout(follow, 3000);
    atEnd(() => clearTimeout(timer));
  }
  follow();
}

// -------------------------------------------------------------------------------------------------------------- traces

// The phases of a request that lie between two of its times.
const SPANS = [
  ["queue", "QUEUE_START", "COMPUTE_START", 0], ["input", "COMPUTE_START", "COMPUTE_INPUT_END", 1], ["compute", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", 2],
  ["output", "COMPUTE_OUTPUT_START", "COMPUTE_END", 3],
];

function timesOf(trace) {
  const found = new Map();
  for (const { name, ns } of trace.timestamps) if (!found.has(name)) found.set(name, ns / 1e6);
  return found;
}

const range = (trace) => {
  const all = trace.timestamps.map(({ ns }) => ns / 1e6);
  return [Math.min(...all), Math.max(...all)];
};

function bar(kind, start, end, from, whole, text) {
  const part = h("span", { class: `span ${kind}`, title: text });
  part.style.left = `${((start - from) / whole) * 100}%`;
  part.style.width = `${Math.max(0.3, ((end - start) / whole) * 100)}%`;
  return part;
}

// The rows of a request and of those made for it, each a bar on one scale.
function waterfall(trace, from, whole, depth = 0) {
  const times = timesOf(trace), [first, last] = range(trace);
  const rows = [h("div", { class: "fall" }, h("span", { class: "fall-name" }, `${"\u2003".repeat(depth)}${trace.model_name}`), h("span", { class: "lane" }, bar("whole", first, last, from, whole, `${ms(last - first)} in all`)), h("span", { class: "number" }, ms(last - first)))];
  const spans = SPANS.filter(([, start, end]) => times.has(start) && times.has(end)).map(([name, start, end, kind]) => [name, times.get(start), times.get(end), `phase-${kind}`]);
  // Backends report times of their own, such as the first token of a language model.
  const known = new Set([...SPANS.flatMap(([, start, end]) => [start, end]), "REQUEST_START", "REQUEST_END", "INFER_RESPONSE_COMPLETE", "HTTP_RECV_START", "HTTP_RECV_END", "GRPC_WAITREAD_START", "GRPC_WAITREAD_END"]);
  for (const [name, time] of times) if (!known.has(name) && !name.includes("SEND")) spans.push([name.toLowerCase().replaceAll("_", " "), time, time, "tick"]);
  for (const [name, start, end, kind] of spans) {
    rows.push(h("div", { class: "fall" }, h("span", { class: "fall-name muted" }, `${"\u2003".repeat(depth + 1)}${name}`), h("span", { class: "lane" }, bar(kind, start, end, from, whole, `${name}: ${ms(end - start)}`)),
      h("span", { class: "number" }, kind === "tick" ? `at ${ms(start - from)}` : ms(end - start))));
  }
  return [...rows, ...trace.children.flatMap((child) => waterfall(child, from, whole, depth + 1))];
}

function details(trace) {
  const [from, to] = range(trace);
  return h("section", { class: "card", "aria-label": "Timeline" }, h("div", { class: "row" }, h("h2", {}, trace.model_name), h("span", { class: "muted" }, `version ${trace.model_version} · ${ms(to - from)}${trace.request_id ? ` · request ${trace.request_id}` : ""}`)),
    h("div", { class: "falls" }, waterfall(trace, from, Math.max(to - from, 1e-6))),
    h("details", {}, h("summary", {}, "All times"), h("pre", {}, trace.timestamps.map(({ name, ns }) => `${ms(ns / 1e6 - from).padStart(10)}  ${name}`).join("\n"))));
}

export function tracesPage({ root, atEnd }) {
  const toggle = button("Start tracing", change, { class: "primary" });
  const rate = select([["1", "every request"], ["10", "each 10th request"], ["100", "each 100th request"], ["1000", "each 1000th request"]], { "aria-label": "How many requests" });
  const note = h("p", { class: "muted" });
  const list = h("div", { class: "trace-list", role: "listbox", "aria-label": "Traced requests" }), place = h("div", { class: "stack" });
  root.append(h("div", { class: "head" }, h("h1", {}, "Traces"), note, h("span", { class: "row push" }, rate, toggle)), h("div", { class: "columns traces-columns" }, list, place));
  let isOn = false, traces = [], chosen = null;

  function showSettings(settings) {
    isOn = settings.trace_level.some((level) => level !== "OFF");
    if (isOn && [...rate.options].some((option) => option.value === settings.trace_rate)) rate.value = settings.trace_rate;
    rate.disabled = isOn;
    say(toggle, isOn ? "Stop tracing" : "Start tracing");
    say(note, isOn ? `Tracing one request of ${settings.trace_rate}.` : "Off.");
  }

  async function change() {
    try {
      showSettings(await get("v2/trace/setting", { json: isOn ? { trace_level: ["OFF"] } : { trace_level: ["TIMESTAMPS"], trace_rate: rate.value, trace_count: "-1" } }));
    } catch (error) {
      toast(error.message, "bad");
    }
  }

  function show(trace) {
    chosen = trace?.id;
    for (const item of list.children) item.setAttribute("aria-selected", String(Number(item.dataset.id) === chosen));
    place.replaceChildren(trace ? details(trace) : empty("No request traced yet", isOn ? "Send one: its timeline appears here." : "Start tracing, then send a request."));
  }

  function draw() {
    list.hidden = traces.length === 0;
    const focused = document.activeElement?.dataset?.id;
    list.replaceChildren(...traces.map((trace) => {
      const [from, to] = range(trace);
      return button("", () => show(trace), { role: "option", "data-id": trace.id, "aria-selected": String(trace.id === chosen) });
    }));
    traces.forEach((trace, index) => {
      const [from, to] = range(trace);
      list.children[index].append(h("b", {}, trace.model_name), h("span", {}, ms(to - from)), h("small", {}, new Date(trace.ended_ms).toLocaleTimeString()));
    });
    if (focused) list.querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
  }

  async function refresh() {
    try {
      const found = (await get("v2/trace/recent")).traces.filter((trace) => trace.timestamps.length);
      if (found.map((trace) => trace.id).join() === traces.map((trace) => trace.id).join() && place.firstChild) return;
      traces = found;
      draw();
      if (chosen == null || !traces.some((trace) => trace.id === chosen)) show(traces[0]);
    } catch (error) {
      if (error.status) place.replaceChildren(empty("Traces are not available", error.message));
    }
  }
  get("v2/trace/setting").then(showSettings).then(refresh, (error) => { say(note, error.message); refresh(); });
  const timer = setInterval(() => { if (!document.hidden && !server.isLocked) refresh(); }, 2000);
  atEnd(() => clearInterval(timer));
}
