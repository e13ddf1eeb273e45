// Shows openapi.json: routes by API, their documents, and a form that sends a request. Keys are kept in memory alone.

const MOST_SHOWN = 200;
// Sensible values of an example, by the names of members.
const SAMPLES = {role: "user", content: "Hello", prompt: "Hello", inputs: "Hello", input: "Hello", max_tokens: 16};
const USUALLY_GIVEN = new Set(["content", "prompt", "max_tokens", "stream", "messages"]);

const at = (id) => document.getElementById(id);
const secrets = new Map();
let description = {paths: {}, components: {}};

function make(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key in node) node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

function resolve(schema) {
  let found = schema ?? {};
  while (found.$ref) found = description.components.schemas?.[found.$ref.split("/").pop()] ?? {};
  return found;
}

function typeOf(schema) {
  if (schema === true || schema === undefined) return "any";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(" | ");
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(" | ");
  if (schema.allOf) return schema.allOf.map(typeOf).join(" & ");
  if (schema.prefixItems) return `[${schema.prefixItems.map(typeOf).join(", ")}]`;
  const kinds = [schema.type ?? "any"].flat().map((kind) => (kind === "array" ? `[${typeOf(schema.items)}]` : kind));
  return kinds.join(" | ") + boundsOf(schema);
}

function boundsOf(schema) {
  const low = schema.exclusiveMinimum ?? schema.minimum;
  if (low === undefined && schema.maximum === undefined) return "";
  return ` ${low ?? ""}${schema.exclusiveMinimum === undefined ? ".." : "<.."}${schema.maximum ?? ""}`;
}

// Members of an object, and whether each is needed, with those of all its parts.
function membersOf(schema) {
  const found = resolve(schema);
  const members = new Map();
  for (const part of found.allOf ?? []) for (const [name, member] of membersOf(part)) members.set(name, member);
  for (const [name, member] of Object.entries(found.properties ?? {})) {
    members.set(name, {schema: member, isNeeded: (found.required ?? []).includes(name)});
  }
  return members;
}

// The schemas within one whose members are worth showing.
function partsOf(schema) {
  const found = resolve(schema);
  if (membersOf(found).size) return [found];
  if (found.anyOf) return found.anyOf.flatMap(partsOf);
  return found.items ? partsOf(found.items) : [];
}

function showMembers(schema) {
  const list = make("ul", {className: "members"});
  for (const [name, {schema: member, isNeeded}] of membersOf(schema)) {
    const line = [
      make("code", {textContent: isNeeded ? name : `${name}?`}), " ",
      make("span", {className: "type", textContent: typeOf(member)}),
    ];
    const parts = partsOf(member);
    if (!parts.length) {
      list.append(make("li", {}, ...line));
      continue;
    }
    const inner = make("details", {}, make("summary", {}, ...line));
    inner.addEventListener("toggle", () => inner.append(...parts.map(showMembers)), {once: true});
    list.append(make("li", {}, inner));
  }
  return list;
}

function showSchema(title, schema) {
  return [
    make("h3", {}, `${title} `, make("span", {className: "type", textContent: typeOf(schema)})),
    ...partsOf(schema).map(showMembers),
  ];
}

function sample(schema, name = "", depth = 0) {
  const found = resolve(schema);
  if (depth > 8) return null;
  if ("const" in found) return found.const;
  if (found.enum) return found.enum[0];
  if (name in SAMPLES) return SAMPLES[name];
  const members = membersOf(found);
  if (members.size) {
    const wanted = [...members].filter(([key, {isNeeded}]) => isNeeded || USUALLY_GIVEN.has(key));
    return Object.fromEntries(wanted.map(([key, member]) => [key, sample(member.schema, key, depth + 1)]));
  }
  if (found.anyOf) return sample(found.anyOf[0], name, depth + 1);
  switch ([found.type].flat()[0]) {
    case "string": return "text";
    case "integer": case "number": return Math.max(found.minimum ?? 0, found.exclusiveMinimum === undefined ? 0 : 1);
    case "boolean": return false;
    case "array": return [sample(found.items, "", depth + 1)];
    default: return {};
  }
}

function secretsOf(operation) {
  const headers = {};
  for (const name of Object.keys(operation.security?.[0] ?? {})) {
    const scheme = description.components.securitySchemes[name];
    const secret = secrets.get(name);
    if (secret) headers[scheme.type === "http" ? "Authorization" : scheme.name] = scheme.type === "http" ? `Bearer ${secret}` : secret;
  }
  return headers;
}

async function send(request, form, output) {
  const {method, path, operation} = request;
  let url = path;
  const query = new URLSearchParams();
  for (const {name, in: place} of operation.parameters ?? []) {
    const value = form.elements[`p-${name}`].value;
    if (place === "path") url = url.replace(`{${name}}`, encodeURIComponent(value));
    else if (value) query.set(name, value);
  }
  const options = {method: method.toUpperCase(), headers: secretsOf(operation), signal: request.stop.signal};
  if (form.elements.body?.value.trim()) {
    options.body = form.elements.body.value;
    options.headers["Content-Type"] = "application/json";
  }
  const began = performance.now();
  const text = query.toString();
  const answer = await fetch(url.replace(/^\//, "") + (text ? `?${text}` : ""), options);
  output.head.textContent = `${answer.status} ${answer.headers.get("content-type") ?? ""}`;
  const isJson = (answer.headers.get("content-type") ?? "").includes("application/json");
  let body = "";
  const reader = answer.body?.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader?.read(); part && !part.done; part = await reader.read()) {
    body += part.value;
    if (!isJson) output.body.textContent = body;
  }
  output.body.textContent = isJson ? pretty(body) : body;
  output.head.textContent += ` · ${Math.round(performance.now() - began)} ms`;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function showForm(request) {
  const {operation} = request;
  const form = make("form");
  const fields = (operation.parameters ?? []).map(({name, required}) =>
    make("label", {}, name, make("input", {name: `p-${name}`, required, spellcheck: false})));
  const media = operation.requestBody?.content?.["application/json"];
  if (fields.length) form.append(...fields);
  if (media) {
    const value = JSON.stringify(media.example ?? sample(media.schema), null, 2);
    form.append(make("textarea", {name: "body", value, spellcheck: false, "aria-label": "Body of the request"}));
  }
  const stop = make("button", {type: "button", textContent: "Stop", hidden: true});
  const button = make("button", {className: "send", textContent: "Send"});
  const output = {head: make("span", {role: "status"}), body: make("pre", {hidden: true, tabIndex: 0})};
  form.append(make("div", {className: "actions"}, button, stop, output.head));
  stop.addEventListener("click", () => request.stop.abort());
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    request.stop = new AbortController();
    [button.disabled, stop.hidden, output.body.hidden, output.body.textContent] = [true, false, false, ""];
    try {
      await send(request, form, output);
    } catch (error) {
      output.head.textContent = error.name === "AbortError" ? "stopped" : `no answer: ${error.message}`;
    } finally {
      [button.disabled, stop.hidden] = [false, true];
    }
  });
  return [form, output.body];
}

function showRoute(request) {
  const {method, path, operation} = request;
  const route = make("details", {className: "route", id: operation.operationId}, make("summary", {},
    make("span", {className: "method", textContent: method.toUpperCase()}),
    make("span", {className: "path", textContent: path}),
    make("span", {className: "about", textContent: operation.summary ?? ""})));
  route.addEventListener("toggle", () => {
    const inner = make("div");
    const body = operation.requestBody?.content?.["application/json"];
    const needs = Object.values(operation.security?.[0] ?? {}).flat();
    if (needs.length) inner.append(make("p", {textContent: `Needs an API key with the scope ${needs.join(", ")}`}));
    inner.append(...showForm(request));
    if (body) inner.append(...showSchema("Body", body.schema));
    for (const [type, media] of Object.entries(operation.responses["200"]?.content ?? {})) {
      inner.append(...showSchema(media["x-event"] ? `Each document of ${type}` : `Answer, ${type}`, media["x-event"] ?? media.schema));
    }
    route.append(inner);
  }, {once: true});
  return route;
}

function matches({method, path, operation}, words) {
  const text = `${method} ${path} ${operation.summary} ${operation.tags}`.toLowerCase();
  return words.every((word) => text.includes(word));
}

function show() {
  const words = at("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const groups = new Map((description.tags ?? []).map(({name}) => [name, []]));
  for (const [path, item] of Object.entries(description.paths)) {
    for (const [method, operation] of Object.entries(item)) {
      const request = {method, path, operation, stop: new AbortController()};
      if (matches(request, words)) groups.get(operation.tags[0])?.push(request);
    }
  }
  const nodes = [];
  for (const [name, requests] of groups) {
    if (!requests.length) continue;
    const group = make("details", {className: "group"}, make("summary", {}, `${name} `, make("span", {textContent: requests.length})));
    group.addEventListener("toggle", () => {
      group.append(...requests.slice(0, MOST_SHOWN).map(showRoute));
      if (requests.length > MOST_SHOWN) {
        group.append(make("p", {textContent: `${requests.length - MOST_SHOWN} more: say what to find above`}));
      }
    }, {once: true});
    group.open = words.length > 0;
    nodes.push(group);
  }
  at("groups").replaceChildren(...nodes);
  at("groups").setAttribute("aria-busy", "false");
}

function askSecrets() {
  const asked = [];
  for (const [name, scheme] of Object.entries(description.components.securitySchemes ?? {})) {
    if (name === "key" || name === "x-api-key") {
      at("key-label").hidden = false;
      continue;
    }
    const input = make("input", {type: "password", autocomplete: "off"});
    input.addEventListener("change", () => secrets.set(name, input.value));
    asked.push(make("label", {title: scheme.description ?? ""}, scheme.name, input));
  }
  at("secrets").replaceChildren(...asked);
}

async function load() {
  const key = secrets.get("key");
  const answer = await fetch("openapi.json", {headers: key ? {Authorization: `Bearer ${key}`} : {}});
  const problem = at("problem");
  problem.hidden = answer.ok;
  if (!answer.ok) {
    at("key-label").hidden = false;
    problem.textContent = answer.status === 401 ? "This server needs an API key." : `openapi.json: ${answer.status}`;
    return;
  }
  description = await answer.json();
  document.title = `${description.info.title} API`;
  at("title").textContent = `${description.info.title} ${description.info.version}`;
  at("about").textContent = description.info.description;
  askSecrets();
  show();
}

at("filter").addEventListener("input", show);
at("settings").addEventListener("submit", (event) => event.preventDefault());
at("key").addEventListener("change", () => {
  secrets.set("key", at("key").value);
  secrets.set("x-api-key", at("key").value);
  load();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !["INPUT", "TEXTAREA"].includes(event.target.tagName)) {
    event.preventDefault();
    at("filter").focus();
  }
});
load().catch((error) => {
  at("problem").hidden = false;
  at("problem").textContent = `openapi.json cannot be read: ${error.message}`;
});
