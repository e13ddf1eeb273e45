// What every page uses: elements, figures as text, calls of the server with the user's key, and what the server reports.

// The server's own path, which a proxy may have put below a prefix.
export const root = new URL("../", import.meta.url).pathname;
export const address = new URL(root, location.href).href.replace(/\/$/, "");

// ---------------------------------------------------------------------------------------------------------- elements

const SVG = new Set(["svg", "path", "line", "text", "g", "rect", "circle", "polyline"]);

// An element. Attributes that are false or null are left out; those that begin with "on" are listeners. Children are text
// or elements: text is never read as HTML, so names and logs may contain anything.
export function h(tag, attributes, ...children) {
  const element = SVG.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value == null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return element;
}

// Gives an element the text, unless it has it: what is selected or read aloud stays.
export function say(element, text) {
  if (element.textContent !== String(text)) element.textContent = text;
}

export const button = (text, onclick, attributes = {}) => h("button", { type: "button", onclick, ...attributes }, text);

export function field(label, input, hint) {
  return h("label", { class: "field" }, h("span", { class: "label" }, label), input, hint && h("small", {}, hint));
}

export function select(options, attributes = {}, chosen) {
  return h("select", attributes, options.map(([value, text]) => h("option", { value, selected: value === chosen }, text ?? value)));
}

export function empty(title, text, ...more) {
  return h("div", { class: "empty" }, h("h2", {}, title), h("p", {}, text), more);
}

export function toast(text, kind = "") {
  const item = h("div", { class: `toast ${kind}` }, h("span", {}, text));
  item.append(button("×", () => item.remove(), { class: "quiet", "aria-label": "Dismiss" }));
  document.getElementById("toasts").append(item);
  setTimeout(() => item.remove(), kind === "bad" ? 20000 : 5000);
}

export function copyButton(text, label = "Copy") {
  return button(label, async (event) => {
    const node = event.currentTarget;
    try {
      await navigator.clipboard.writeText(typeof text === "function" ? text() : text);
      node.textContent = "Copied";
    } catch {
      node.textContent = "Not allowed";
    }
    setTimeout(() => (node.textContent = label), 1500);
  }, { class: "quiet" });
}

// A dialog; returns a promise of what `done` is called with, or of null when it is closed otherwise.
export function ask(title, make) {
  return new Promise((resolve) => {
    const dialog = h("dialog", { "aria-label": title });
    const done = (value) => { resolve(value); dialog.close(); };
    dialog.append(h("h2", {}, title), ...[make(done)].flat());
    dialog.addEventListener("close", () => { resolve(null); dialog.remove(); });
    document.body.append(dialog);
    dialog.showModal();
  });
}

export const confirm = (title, text, verb) => ask(title, (done) => [
  h("p", {}, text),
  h("div", { class: "row end" }, button("Cancel", () => done(null)), button(verb, () => done(true), { class: "primary", autofocus: true })),
]);

// ----------------------------------------------------------------------------------------------------- figures as text

export function count(value) {
  if (value == null || Number.isNaN(value)) return "–";
  if (value >= 1e9) return `${(value / 1e9).toFixed(1)} G`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return value % 1 ? value.toFixed(value < 10 ? 2 : 1) : String(value);
}

export function bytes(value) {
  if (value == null) return "–";
  const power = Math.min(4, Math.floor(Math.log2(Math.max(1, value)) / 10));
  return `${(value / 1024 ** power).toFixed(power && value / 1024 ** power < 100 ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

export function ms(value) {
  if (value == null || Number.isNaN(value)) return "–";
  if (value === 0) return "0 ms";
  if (value < 1) return `${(value * 1000).toFixed(0)} µs`;
  if (value < 10) return `${Number(value.toFixed(2))} ms`;
  return value < 1000 ? `${Number(value.toFixed(value < 100 ? 1 : 0))} ms` : `${Number((value / 1000).toFixed(2))} s`;
}

export function span(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${Math.round(seconds / 86400)} days`;
}

// ----------------------------------------------------------------------------------------------------------- the calls

// The key is in this variable alone: not in storage, not in an address, and gone with the page.
let key = "";
let asking = null;
export const hasKey = () => key !== "";

export class CallError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Asks for the key; calls that want it meanwhile share the question. False if the user closes the dialog.
export function askForKey(reason = "") {
  asking ??= ask("API key", (done) => {
    const input = h("input", { type: "password", autocomplete: "off", spellcheck: "false", autofocus: true, required: true, "aria-label": "API key" });
    return h("form", { onsubmit: (event) => { event.preventDefault(); done(input.value.trim()); } },
      h("p", {}, "This server wants a key. It stays in this page's memory, and is forgotten when you close or reload the page."),
      reason && h("p", { class: "bad-text", role: "alert" }, reason),
      input,
      h("div", { class: "row end" }, button("Cancel", () => done(null)), h("button", { class: "primary" }, "Use the key")));
  }).then((value) => {
    asking = null;
    if (value) { key = value; server.isLocked = false; poll(); }
    return Boolean(value);
  });
  return asking;
}

export function forgetKey() {
  key = "";
  server.overview = null;
  poll();
}

async function readError(response) {
  const text = await response.text();
  try {
    const document = JSON.parse(text);
    const error = document.error ?? document.message ?? text;
    return typeof error === "string" ? error : error.message ?? JSON.stringify(error);
  } catch {
    return text || `${response.status} ${response.statusText}`;
  }
}

// A response whose status is good. Asks for a key when the server wants one, and then tries again.
export async function call(path, { json, body, headers = {}, signal, method, quiet = false } = {}) {
  const used = key;
  const options = { method: method ?? (json !== undefined || body !== undefined ? "POST" : "GET"), signal, headers: { ...headers }, cache: "no-store", credentials: "omit" };
  if (used) options.headers.Authorization = `Bearer ${used}`;
  if (json !== undefined) {
    options.body = JSON.stringify(json);
    options.headers["Content-Type"] = "application/json";
  } else if (body !== undefined) {
    options.body = body;
    options.headers["Content-Type"] ??= "application/octet-stream";
  }
  let response;
  try {
    response = await fetch(root + path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new CallError(0, "The server does not answer.");
  }
  if (response.ok) return response;
  const message = await readError(response);
  if (response.status === 401 && !quiet) {
    if (key !== used || await askForKey(used ? `The server refused the key: ${message}` : "")) {
      return call(path, { json, body, headers, signal, method, quiet });
    }
  }
  throw new CallError(response.status, message);
}

export const get = async (path, options) => (await call(path, options)).json();

// The data of server-sent events, one after the other.
export async function* events(response) {
  for await (const line of lines(response)) if (line.startsWith("data:")) yield line.slice(5).trim();
}

export async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const parts = (rest + value).split(/\r?\n/);
    rest = parts.pop();
    yield* parts;
  }
  if (rest) yield rest;
}

// ------------------------------------------------------------------------------------------- what the server reports

const INTERVAL_MS = 2000;
const NUM_SAMPLES = 450; // a quarter of an hour

// `overview` is the newest document, `samples` are those of the last minutes. `chats` are the names of language models.
export const server = { overview: null, samples: [], chats: [], error: "", isLocked: false };
const watchers = new Set();

// Calls `listener` now and at each report; returns the function that ends it.
export function watch(listener) {
  watchers.add(listener);
  listener(server);
  return () => watchers.delete(listener);
}

const tell = () => watchers.forEach((listener) => listener(server));

async function read() {
  try {
    return await get("v2/overview");
  } catch (error) {
    if (error.status !== 403) throw error;
    // A key for inference alone: the names of its models, and no figures.
    const { models } = await get("v2/models");
    return { isPartial: true, models: models.map((name) => ({ name, version: "", state: "", reason: "" })) };
  }
}

let isPolling = false;
export async function poll() {
  if (isPolling || server.isLocked) return;
  isPolling = true;
  try {
    const overview = await read();
    const ready = (models) => models.filter((row) => row.state === "READY" || row.state === "").map((row) => row.name).join();
    const isNews = !server.overview || ready(server.overview.models) !== ready(overview.models);
    server.overview = overview;
    server.error = "";
    if (isNews) server.chats = (await get("v1/models").catch(() => ({ data: [] }))).data.map((model) => model.id);
    keep(overview);
  } catch (error) {
    server.error = error.message;
    server.isLocked = error.status === 401;
  }
  isPolling = false;
  tell();
}

function keep(overview) {
  if (overview.isPartial) return;
  const models = new Map();
  for (const row of overview.models) if (row.latency) models.set(`${row.name} ${row.version}`, row);
  server.samples.push({ time: performance.now() / 1000, models, memory: overview.server.memory_bytes, host: overview.host });
  if (server.samples.length > NUM_SAMPLES) server.samples.shift();
}

// Growth per second of a figure between two samples; a restarted server or a reloaded model begins again at zero.
export function rate(sample, before, name, figure) {
  const now = sample?.models.get(name), then = before?.models.get(name);
  if (!now || !then) return null;
  return Math.max(0, figure(now) - figure(then)) / (sample.time - before.time);
}

export function startPolling() {
  poll();
  setInterval(() => { if (!document.hidden) poll(); }, INTERVAL_MS);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
}
