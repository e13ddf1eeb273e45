// Chat with a language model, or with two side by side: history, sampling, tools, token probabilities, speed.

import { address, ask, button, call, copyButton, empty, events, field, h, hasKey, ms, say, select, server, toast, watch } from "./core.js";
import { markdown } from "./markdown.js";
import { codeCard } from "./playground.js";

const percent = (logprob) => `${(Math.exp(logprob) * 100).toFixed(1)} %`;
const visible = (token) => token.replaceAll("\n", "⏎").replaceAll(" ", "·");

// ------------------------------------------------------------------------------------------------------------ settings

const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1 }], ["top_p", "Top p", { min: 0, max: 1, step: 0.05 }],
  ["max_tokens", "Longest answer", { min: 1, step: 1 }], ["seed", "Seed", { step: 1 }],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: 0.1 }], ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: 0.1 }],
];

// The fields beside the conversation. `read()` gives the part of a request that they make; it throws an Error for people.
function makeSettings(changed) {
  const system = h("textarea", { rows: 3, placeholder: "You are …", oninput: changed });
  const numbers = NUMBERS.map(([name, label, limits]) => [name, label, h("input", { type: "number", placeholder: "default", oninput: changed, ...limits })]);
  const stop = h("input", { placeholder: "none", oninput: changed });
  const tools = h("textarea", { class: "mono", rows: 4, spellcheck: "false", placeholder: '[{"type": "function", "function": {"name": …}}]', oninput: changed });
  const probabilities = h("input", { type: "checkbox", onchange: changed });
  function read() {
    const body = {};
    for (const [name, , input] of numbers) if (input.value !== "") body[name] = Number(input.value);
    if (stop.value) body.stop = [stop.value];
    if (tools.value.trim()) {
      try {
        body.tools = JSON.parse(tools.value);
      } catch (error) {
        throw new Error(`The tools are not JSON: ${error.message}`);
      }
      if (!Array.isArray(body.tools)) throw new Error("The tools must be a list.");
    }
    if (probabilities.checked) Object.assign(body, { logprobs: true, top_logprobs: 5 });
    return body;
  }
  const element = h("aside", { class: "card settings", "aria-label": "Settings" }, field("System prompt", system),
    h("label", { class: "check" }, probabilities, "Token probabilities"), h("div", { class: "pairs" }, numbers.map(([, label, input]) => field(label, input))),
    field("Stop at", stop), field("Tools (JSON)", tools));
  return { element, read, system: () => system.value };
}

// -------------------------------------------------------------------------------------------------------- one pane

// A conversation with one model. Messages are those of the API, with what the page shows beside them.
class Pane {
  constructor(settings, changed) {
    this.settings = settings;
    this.changed = changed;
    this.messages = [];
    this.controller = null;
    this.model = select([], { "aria-label": "Model", onchange: changed });
    this.list = h("div", { class: "messages", role: "log", "aria-label": "Conversation" });
    this.element = h("section", { class: "pane" }, h("div", { class: "row pane-head" }, this.model), this.list);
    this.clear();
  }

  get isBusy() { return this.controller !== null; }

  offer(names) {
    const chosen = this.model.value;
    this.model.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
    if (names.includes(chosen)) this.model.value = chosen;
  }

  clear() {
    this.stop();
    this.messages = [];
    this.list.replaceChildren(h("div", { class: "empty start" }, h("p", {}, "Ask something. Answers come as they are written.")));
  }

  stop() { this.controller?.abort(); }

  body() {
    const system = this.settings.system();
    // A message that could not be answered would fail again with each later one.
    const isFailed = (message, index) => message.error || (message.role === "user" && this.messages[index + 1]?.error);
    const messages = this.messages.filter((message, index) => !isFailed(message, index)).map(({ role, content, pictures, tool_calls: calls, tool_call_id: id }) => (
      { role, content: withPictures(content, pictures), ...(calls?.length ? { tool_calls: calls } : {}), ...(id ? { tool_call_id: id } : {}) }));
    return { model: this.model.value, messages: [...(system ? [{ role: "system", content: system }] : []), ...messages], ...this.settings.read() };
  }

  add(message) {
    if (!this.messages.length) this.list.replaceChildren();
    this.messages.push(message);
    message.element = h("article", { class: `message ${message.role}` });
    this.list.append(message.element);
    this.draw(message);
  }

  cut(index) {
    for (const message of this.messages.splice(index)) message.element.remove();
  }

  send(content, pictures = []) {
    this.add({ role: "user", content, pictures });
    return this.answer();
  }

  async answer() {
    let body;
    try {
      body = this.body();
    } catch (error) {
      toast(error.message, "bad");
      return;
    }
    const message = { role: "assistant", content: "", reasoning: "", tokens: [], tool_calls: [], isOpen: true, started: performance.now() };
    this.add(message);
    this.controller = new AbortController();
    this.changed();
    try {
      const response = await call("v1/chat/completions", { json: { ...body, stream: true, stream_options: { include_usage: true } }, signal: this.controller.signal });
      for await (const data of events(response)) {
        if (data && data !== "[DONE]") this.take(message, JSON.parse(data));
      }
    } catch (error) {
      if (error.name === "AbortError") message.finish = "stopped";
      else message.error = error.message;
    }
    message.isOpen = false;
    this.controller = null;
    this.draw(message);
    this.changed();
  }

  take(message, chunk) {
    if (chunk.error) throw new Error(chunk.error.message ?? JSON.stringify(chunk.error));
    if (chunk.usage) message.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { delta } = choice;
    const reasoning = delta.reasoning_content ?? delta.reasoning;
    if (delta.content || reasoning || delta.tool_calls) {
      message.last = performance.now();
      message.first ??= message.last;
      message.chunks = (message.chunks ?? 0) + 1;
    }
    message.content += delta.content ?? "";
    message.reasoning += reasoning ?? "";
    message.tokens.push(...(choice.logprobs?.content ?? []));
    for (const part of delta.tool_calls ?? []) {
      const known = (message.tool_calls[part.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
      if (part.id) known.id = part.id;
      known.function.name += part.function?.name ?? "";
      known.function.arguments += part.function?.arguments ?? "";
    }
    if (choice.finish_reason) message.finish = choice.finish_reason;
    message.frame ??= requestAnimationFrame(() => { message.frame = null; this.draw(message); });
  }

  draw(message) {
    const isNear = this.list.scrollHeight - this.list.scrollTop - this.list.clientHeight < 80;
    const isUser = message.role === "user";
    const said = isUser || message.role === "tool" ? h("p", { class: "plain" }, message.content)
      : message.tokens.length ? probabilityView(message.tokens) : markdown(message.content);
    message.element.replaceChildren(...[
      h("h3", { class: "who" }, { user: "You", tool: "Tool" }[message.role] ?? this.model.value),
      message.reasoning && h("details", { class: "reasoning", open: message.isOpen && !message.content }, h("summary", {}, "Reasoning"), h("p", { class: "plain" }, message.reasoning)),
      message.pictures?.length && h("div", { class: "row" }, message.pictures.map((url) => h("img", { class: "attached", src: url, alt: "Picture" }))),
      h("div", { class: "said" }, said, message.isOpen && h("span", { class: "cursor", "aria-hidden": "true" })),
      message.tool_calls?.map((each) => this.toolCall(message, each)),
      message.error && h("p", { class: "reason-box", role: "alert" }, message.error),
      h("div", { class: "row foot" }, h("small", { class: "speed" }, speed(message)), !message.isOpen && this.tools(message)),
    ].flat().filter(Boolean));
    if (isNear) this.list.scrollTop = this.list.scrollHeight;
  }

  tools(message) {
    const index = this.messages.indexOf(message);
    return h("span", { class: "row push" }, copyButton(() => message.content),
      message.role === "user" && button("Edit", () => this.edit(message, index), { class: "quiet" }),
      message.role === "assistant" && button("Regenerate", () => { if (!this.isBusy) { this.cut(index); this.answer(); } }, { class: "quiet" }));
  }

  async edit(message, index) {
    const text = await ask("Edit the message", (done) => {
      const input = h("textarea", { rows: 5, "aria-label": "Message", autofocus: true, value: message.content });
      return [input, h("div", { class: "row end" }, button("Cancel", () => done(null)), button("Send again", () => done(input.value), { class: "primary" }))];
    });
    if (text === null || this.isBusy) return;
    this.cut(index);
    this.send(text, message.pictures);
  }

  toolCall(message, each) {
    const isAnswered = this.messages.some((other) => other.tool_call_id === each.id);
    const input = h("textarea", { rows: 2, class: "mono", "aria-label": `Answer of ${each.function.name}`, placeholder: "What the tool answers" });
    const isLast = () => message.tool_calls.every((one) => this.messages.some((other) => other.tool_call_id === one.id));
    return h("div", { class: "tool-call" }, h("small", {}, "calls"), h("pre", {}, `${each.function.name}(${each.function.arguments})`),
      !message.isOpen && !isAnswered && each.id && [input, button("Answer", () => {
        this.add({ role: "tool", content: input.value, tool_call_id: each.id });
        this.draw(message);
        if (isLast()) this.answer();
      })]);
  }
}

function speed(message) {
  if (message.role !== "assistant") return "";
  if (!message.first) return message.isOpen ? "waiting…" : "";
  const tokens = message.usage?.completion_tokens ?? message.chunks, writing = (message.last - message.first) / 1000;
  // An answer that came at once is timed as a whole.
  const perSecond = writing > 0.05 ? (tokens - 1) / writing : tokens / ((message.last - message.started) / 1000);
  return [`first token ${ms(message.first - message.started)}`, `${tokens} tokens`, `${perSecond.toFixed(perSecond < 10 ? 1 : 0)} tokens/s`,
    message.usage && `prompt ${message.usage.prompt_tokens}`, message.finish].filter(Boolean).join(" · ");
}

// The answer token by token: the less probable, the stronger its colour. Pointer and arrow keys show what else was likely.
function probabilityView(tokens) {
  const box = h("div", { class: "token-box", role: "status", hidden: true });
  const spans = tokens.map((token, index) => {
    const span = h("span", { class: /^<\|.*\|>$/.test(token.token) ? "token special" : "token", "data-index": index }, token.token);
    span.style.setProperty("--doubt", `${Math.round((1 - Math.exp(token.logprob)) * 70)}%`);
    return span;
  });
  let current = -1;
  function show(index) {
    spans[current]?.classList.remove("current");
    current = Math.min(spans.length - 1, Math.max(0, index));
    const span = spans[current], { token, logprob, top_logprobs: others } = tokens[current];
    span.classList.add("current");
    box.hidden = false;
    box.replaceChildren(h("b", {}, `“${visible(token)}” ${percent(logprob)}`), ...others.filter((other) => other.token !== token).map((other) => h("span", {}, `“${visible(other.token)}” ${percent(other.logprob)}`)));
    box.style.left = `${Math.min(span.offsetLeft, Math.max(0, view.clientWidth - 190))}px`;
    box.style.top = `${span.offsetTop + span.offsetHeight + 4}px`;
    box.scrollIntoView({ block: "nearest" });
  }
  const hide = () => { box.hidden = true; spans[current]?.classList.remove("current"); };
  const view = h("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": "Tokens with probabilities; arrow keys move",
    onmouseover: (event) => { if (event.target.dataset.index) show(Number(event.target.dataset.index)); }, onmouseleave: hide, onblur: hide,
    onkeydown: (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (step) { event.preventDefault(); show(current + step); }
    } }, spans, box);
  return view;
}

// ----------------------------------------------------------------------------------------------------------------- page

function chatSnippets(body) {
  const json = JSON.stringify(body, null, 2), key = hasKey() ? 'os.environ["MODELSERVER_API_KEY"]' : '"none"';
  const python = json.replaceAll(/\btrue\b/g, "True").replaceAll(/\bfalse\b/g, "False").replaceAll(/\bnull\b/g, "None");
  return {
    curl: `curl -sN ${address}/v1/chat/completions${hasKey() ? ' \\\n  -H "Authorization: Bearer $MODELSERVER_API_KEY"' : ""} \\\n  --json '${JSON.stringify({ ...body, stream: true }).replaceAll("'", "'\\''")}'`,
    "Python (openai)": `${hasKey() ? "import os\n\n" : ""}from openai import OpenAI\n\nclient = OpenAI(base_url="${address}/v1", api_key=${key})\nanswer = client.chat.completions.create(**${python})\nprint(answer.choices[0].message.content)`,
    "Python (requests)": `${hasKey() ? "import os\n" : ""}import requests\n\nanswer = requests.post("${address}/v1/chat/completions", json=${python}${hasKey() ? `,\n    headers={"Authorization": f"Bearer {${key}}"}` : ""})\nanswer.raise_for_status()\nprint(answer.json()["choices"][0]["message"]["content"])`,
    JavaScript: `const response = await fetch("${address}/v1/chat/completions", {\n  method: "POST",\n  headers: { "Content-Type": "application/json"${hasKey() ? ", Authorization: `Bearer ${key}`" : ""} },\n  body: JSON.stringify(${json}),\n});\nconsole.log((await response.json()).choices[0].message.content);`,
  };
}

const withPictures = (content, pictures) => (pictures?.length
  ? [...pictures.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text: content }] : content);

const readAsUrl = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});

export function chatPage({ root, parameters, atEnd }) {
  const panes = [];
  const settings = makeSettings(() => update());
  const place = h("div", { class: "panes" });
  const input = h("textarea", { rows: 2, placeholder: "Message", "aria-label": "Message", onkeydown: (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  } });
  const sendButton = h("button", { class: "primary" }, "Send");
  const stopButton = button("Stop", () => panes.forEach((pane) => pane.stop()), { hidden: true });
  const compare = button("Compare", () => (panes.length > 1 ? remove() : add()), { "aria-pressed": "false" });
  let pictures = [];
  const attached = h("div", { class: "row", hidden: true });
  const files = h("input", { type: "file", accept: "image/*", multiple: true, hidden: true, onchange: async () => {
    const chosen = [...files.files];
    files.value = "";
    try {
      attach([...pictures, ...await Promise.all(chosen.map(readAsUrl))]);
    } catch (error) {
      toast(error.message, "bad");
    }
  } });
  const attachButton = button("Picture", () => files.click(), { title: "Send a picture with the message" });
  const composer = h("form", { class: "composer", onsubmit: (event) => { event.preventDefault(); send(); } }, files, attachButton, input, sendButton, stopButton);
  const code = codeCard(() => chatSnippets(codeBody()));
  const snippet = h("details", {}, h("summary", {}, "This request as code"), code.element);
  const head = h("div", { class: "head" }, h("h1", {}, "Chat"), h("span", { class: "row push" }, compare, button("New chat", () => { panes.forEach((pane) => pane.clear()); input.focus(); })));
  const nothing = empty("No language model is ready", "Load one on the page of models.", h("p", {}, h("a", { class: "button", href: "#/models" }, "Models")));
  const body = h("div", { class: "chat-columns" }, h("div", { class: "talk" }, place, attached, composer), h("div", { class: "stack" }, h("details", { class: "settings-fold", open: matchMedia("(min-width: 821px)").matches }, h("summary", {}, "Settings"), settings.element), snippet));
  root.append(head, nothing, body);

  function attach(urls) {
    pictures = urls;
    attached.hidden = !urls.length;
    attached.replaceChildren(...urls.map((url, index) => h("span", { class: "row" }, h("img", { class: "attached", src: url, alt: `Picture ${index + 1}` }),
      button("Remove", () => attach(urls.filter((_, other) => other !== index)), { class: "quiet" }))));
  }

  function codeBody() {
    try {
      // Pictures are longer than anybody reads.
      return JSON.parse(JSON.stringify(panes[0]?.body() ?? {}, (name, value) => (name === "url" ? `${value.slice(0, 40)}…` : value)));
    } catch {
      return {};
    }
  }

  function update() {
    const isBusy = panes.some((pane) => pane.isBusy);
    stopButton.hidden = !isBusy;
    sendButton.hidden = isBusy;
    code.update();
  }

  function add() {
    const pane = new Pane(settings, update);
    panes.push(pane);
    place.append(pane.element);
    pane.offer(server.chats);
    if (panes.length === 1) pane.model.value = parameters.get("model") ?? pane.model.value;
    else pane.model.value = server.chats.find((name) => name !== panes[0].model.value) ?? pane.model.value;
    place.classList.toggle("two", panes.length > 1);
    say(compare, panes.length > 1 ? "One model" : "Compare");
    compare.setAttribute("aria-pressed", String(panes.length > 1));
  }

  function remove() {
    const pane = panes.pop();
    pane.stop();
    pane.element.remove();
    place.classList.remove("two");
    say(compare, "Compare");
    compare.setAttribute("aria-pressed", "false");
    update();
  }

  async function send() {
    const text = input.value.trim();
    if (!text || panes.some((pane) => pane.isBusy)) return;
    input.value = "";
    const sent = pictures;
    attach([]);
    await Promise.all(panes.map((pane) => pane.send(text, sent)));
    input.focus();
  }

  let known = "";
  atEnd(watch(() => {
    nothing.hidden = server.chats.length > 0 || !server.overview;
    body.hidden = server.chats.length === 0;
    const names = server.chats.join();
    if (names === known) return;
    known = names;
    if (!panes.length) { add(); if (parameters.has("compare")) add(); }
    panes.forEach((pane) => pane.offer(server.chats));
    if (parameters.get("model") && !panes[0].messages.length && server.chats.includes(parameters.get("model"))) panes[0].model.value = parameters.get("model");
    code.update();
  }));
  atEnd(() => panes.forEach((pane) => pane.stop()));
  if (matchMedia("(min-width: 821px)").matches) input.focus();
}
