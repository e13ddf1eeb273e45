// Trying a model: a form made from its metadata, what it answers, and the same request as code.

import { address, button, call, copyButton, events, field, h, hasKey, ms, say, select } from "./core.js";
import {
  SCALINGS, drawPicture, infer, isFloat, nested, parseValues, pictureLayout, pictureType, pictureValues, size, tensorPicture,
} from "./tensors.js";

const NUM_SHOWN = 2000;
const shapeText = (shape) => `[${shape.map((dim) => (dim < 0 ? "?" : dim)).join(", ")}]`;

// One input of the form. `read()` gives {shape, values, literal}; `literal` says that code may show the values.
function tensorInput({ name, datatype, shape }, isOptional) {
  const place = pictureLayout(shape);
  const isBytes = datatype === "BYTES";
  const isPicture = !isBytes && place !== null;
  const fixed = shape.map((dim) => Math.max(1, dim)), total = size(fixed);
  const kinds = [["values", isBytes ? "Text" : "Values"], isPicture && ["picture", "Picture"], isBytes && ["file", "File"],
    !isBytes && ["zeros", "Zeros"], !isBytes && ["random", "Random"]].filter(Boolean);
  const sends = h("input", { type: "checkbox", checked: !isOptional, "aria-label": `Send ${name}`, onchange: show });
  const kind = select(kinds, { "aria-label": `Kind of ${name}`, onchange: show }, isPicture ? "picture" : total > 4096 && !isBytes ? "random" : "values");
  const start = isBytes || total > 4096 ? "" : JSON.stringify(nested(Array(total).fill(datatype === "BOOL" ? false : 0), fixed));
  const text = h("textarea", { class: "mono", rows: Math.min(8, Math.max(2, Math.ceil(start.length / 60))), spellcheck: "false", "aria-label": name, value: start });
  const file = h("input", { type: "file", "aria-label": `File for ${name}`, accept: isPicture ? "image/*" : null, onchange: draw });
  const scaling = select(Object.entries(SCALINGS).map(([id, [label]]) => [id, label]), { "aria-label": `Scaling of ${name}` },
    isFloat(datatype) ? "unit" : "bytes");
  const width = place && h("input", { type: "number", min: 1, value: place.width, "aria-label": `Width of ${name}`, onchange: draw });
  const height = place && h("input", { type: "number", min: 1, value: place.height, "aria-label": `Height of ${name}`, onchange: draw });
  const hasFreeSides = place && shape.slice(-place.layout.length).some((dim, index) => place.layout[index] !== "C" && dim < 0);
  const canvas = h("canvas", { class: "preview", role: "img", "aria-label": `What the model gets as ${name}`, hidden: true });
  const preview = h("img", { class: "preview", alt: "The chosen file", hidden: true });
  const body = h("div", { class: "field" });
  const problem = h("p", { class: "bad-text", role: "alert" });

  async function draw() {
    say(problem, "");
    const chosen = file.files[0];
    if (!chosen) return;
    try {
      if (isPicture) {
        place.width = Number(width.value);
        place.height = Number(height.value);
        await drawPicture(chosen, canvas, place);
        canvas.hidden = false;
      } else {
        preview.hidden = !chosen.type.startsWith("image/");
        if (!preview.hidden) preview.src = URL.createObjectURL(chosen);
      }
    } catch {
      say(problem, `${chosen.name} is not a picture that this browser can read.`);
    }
  }

  function show() {
    const parts = {
      values: [text],
      picture: place && [file, h("div", { class: "row" }, scaling, hasFreeSides && [width, "×", height],
        h("small", {}, `${place.layout === "CHW" ? "channels first" : place.layout === "HWC" ? "channels last" : "grey"}, ${place.width} × ${place.height}`)), canvas],
      file: [file, preview],
      zeros: [h("small", {}, `${total} zeros`)],
      random: [h("small", {}, `${total} random numbers`)],
    }[kind.value];
    body.replaceChildren(...parts.flat());
    body.hidden = kind.hidden = !sends.checked;
  }

  async function read() {
    say(problem, "");
    try {
      if (kind.value === "values") return { ...parseValues(text.value, datatype, shape), literal: true };
      if (kind.value === "file") {
        if (!file.files[0]) throw new Error("choose a file");
        return { shape: fixed, values: [new Uint8Array(await file.files[0].arrayBuffer())], file: file.files[0].name };
      }
      if (kind.value === "picture") {
        if (canvas.hidden) throw new Error("choose a picture");
        const dims = [...place.layout].map((letter) => ({ C: place.channels, H: place.height, W: place.width })[letter]);
        return { shape: [...Array(shape.length - dims.length).fill(1), ...dims], values: pictureValues(canvas, place, scaling.value) };
      }
      const one = kind.value === "zeros" ? () => 0 : datatype === "BOOL" ? () => Math.random() < 0.5
        : isFloat(datatype) ? () => Math.random() : () => Math.floor(Math.random() * 100);
      return { shape: fixed, values: Array.from({ length: total }, one) };
    } catch (error) {
      say(problem, `${name}: ${error.message}.`);
      throw error;
    }
  }

  const element = h("fieldset", { class: "tensor" },
    h("legend", {}, isOptional && sends, h("b", {}, name), h("small", { class: "mono" }, `${datatype} ${shapeText(shape)}`)), kind, body, problem);
  show();
  return { name, datatype, element, read, isSent: () => sends.checked };
}

// -------------------------------------------------------------------------------------------------------------- answers

function bars(rows) {
  const highest = Math.max(...rows.map(([, value]) => Math.abs(value)), 1e-9);
  return h("div", { class: "bars" }, rows.map(([label, value]) => {
    const fill = h("span", { class: "fill" });
    fill.style.width = `${(Math.abs(value) / Math.max(highest, 1)) * 100}%`;
    return [h("span", { class: "name" }, label), h("span", { class: "track" }, fill), h("span", { class: "number" }, value.toFixed(4))];
  }));
}

function asText(values, shape) {
  const shown = values.length > NUM_SHOWN ? values.slice(0, NUM_SHOWN) : nested(Array.from(values), shape);
  const text = JSON.stringify(shown, null, 0).replace(/],\[/g, "],\n[");
  return h("pre", { tabindex: 0 }, values.length > NUM_SHOWN ? `${text}\n… ${values.length - NUM_SHOWN} more` : text);
}

function bytesView(data) {
  const type = pictureType(data);
  if (type) return h("img", { class: "answer-picture", alt: "A picture that the model answered", src: URL.createObjectURL(new Blob([data], { type })) });
  try {
    return h("pre", { tabindex: 0 }, new TextDecoder("utf-8", { fatal: true }).decode(data));
  } catch {
    return h("p", { class: "muted" }, `${data.length} bytes that are no text`);
  }
}

function outputView({ name, datatype, shape, values }, classes) {
  const head = h("h3", {}, name, " ", h("small", { class: "mono" }, `${datatype} ${shapeText(shape)}`));
  if (classes) {
    const rows = values.map((value) => new TextDecoder().decode(value).split(":"));
    return [head, bars(rows.map(([score, index, label]) => [label ?? `class ${index}`, Number(score)]))];
  }
  if (datatype === "BYTES") return [head, values.map((value) => (typeof value === "string" ? h("pre", {}, value) : bytesView(value)))];
  const picture = tensorPicture(values, shape);
  if (picture) picture.className = "answer-picture";
  const isVector = !picture && isFloat(datatype) && values.length >= 2 && values.length <= 100000 && shape.at(-1) === values.length;
  // Scores of classes: probabilities, or as many numbers as no one reads.
  const isScores = isVector && (values.length >= 10 || (values.every((value) => value >= 0) && Math.abs(values.reduce((sum, value) => sum + value, 0) - 1) < 0.01));
  const best = isScores && Array.from(values, (value, index) => [`class ${index}`, value]).sort((one, other) => other[1] - one[1]).slice(0, 5);
  const text = asText(values, shape);
  return [head, picture, best && bars(best), best || picture ? h("details", {}, h("summary", {}, "All elements"), text) : text];
}

// ----------------------------------------------------------------------------------------------------------------- code

const NUMPY = { BOOL: "bool", FP16: "float16", FP32: "float32", FP64: "float64", BYTES: "object" };
const numpyType = (datatype) => NUMPY[datatype] ?? datatype.toLowerCase();
const isShort = (tensor) => tensor.literal && tensor.values.length <= 64;
const literal = (tensor) => JSON.stringify(Array.from(tensor.values));
const python = (text) => text.replaceAll("true", "True").replaceAll("false", "False");

function documentOf(tensors) {
  return { inputs: tensors.map(({ name, datatype, shape, ...tensor }) => ({ name, datatype, shape, data: isShort(tensor) ? tensor.values : "…" })) };
}

// The request as code. Long tensors are random numbers there, files are read from the disk.
export function snippets(model, version, tensors) {
  const path = `v2/models/${encodeURIComponent(model)}${version ? `/versions/${version}` : ""}`;
  const url = `${address}/${path}/infer`;
  const key = hasKey();
  const json = JSON.stringify(documentOf(tensors)).replaceAll('"…"', "[…]");
  const array = (tensor) => (tensor.file
    ? `np.array([Path(${JSON.stringify(tensor.file)}).read_bytes()], dtype=object).reshape(${JSON.stringify(tensor.shape)})`
    : isShort(tensor) ? `np.array(${python(literal(tensor))}, dtype=np.${numpyType(tensor.datatype)}${tensor.datatype === "BYTES" ? "_" : ""}).reshape(${JSON.stringify(tensor.shape)})`
    : `np.random.rand(${tensor.shape.join(", ")}).astype(np.${numpyType(tensor.datatype)})  # your data`).replace("np.object_", "object").replace("np.bool)", "bool)");
  return {
    curl: `curl -s ${url}${key ? ' \\\n  -H "Authorization: Bearer $MODELSERVER_API_KEY"' : ""} \\\n  --json '${json.replaceAll("'", "'\\''")}'`,
    "Python (tritonclient)": [
      tensors.some((tensor) => tensor.file) && "from pathlib import Path\n", key && "import os\n", "import numpy as np", "import tritonclient.http as httpclient", "",
      `client = httpclient.InferenceServerClient("${new URL(address).host}"${address.startsWith("https") ? ", ssl=True" : ""})`,
      ...tensors.flatMap((tensor, index) => [
        `tensor${index} = httpclient.InferInput(${JSON.stringify(tensor.name)}, ${JSON.stringify(tensor.shape)}, "${tensor.datatype}")`,
        `tensor${index}.set_data_from_numpy(${array(tensor)})`,
      ]),
      `answer = client.infer(${JSON.stringify(model)}, [${tensors.map((_, index) => `tensor${index}`).join(", ")}]${version ? `, model_version="${version}"` : ""}${key ? ', headers={"Authorization": f"Bearer {os.environ[\'MODELSERVER_API_KEY\']}"}' : ""})`,
      "for output in answer.get_response()[\"outputs\"]:", "    print(output[\"name\"], answer.as_numpy(output[\"name\"]))",
    ].filter((line) => line !== false && line !== undefined).join("\n"),
    "Python (requests)": [
      key && "import os\n", "import requests", "", "answer = requests.post(", `    "${url}",`, `    json=${python(json)},`,
      key && '    headers={"Authorization": f"Bearer {os.environ[\'MODELSERVER_API_KEY\']}"},', ")", "answer.raise_for_status()", "print(answer.json()[\"outputs\"])",
    ].filter(Boolean).join("\n"),
    JavaScript: [
      `const response = await fetch("${url}", {`, '  method: "POST",',
      `  headers: { "Content-Type": "application/json"${key ? ", Authorization: `Bearer ${key}`" : ""} },`, `  body: JSON.stringify(${json}),`, "});",
      "console.log((await response.json()).outputs);",
    ].join("\n"),
  };
}

// Code in several languages, one of which is shown.
export function codeCard(makeCode) {
  const pre = h("pre", { class: "code", tabindex: 0 });
  const names = Object.keys(makeCode());
  let chosen = names[0];
  const tabs = names.map((name) => button(name, () => { chosen = name; update(); }, { class: "quiet tab" }));
  function update() {
    say(pre, makeCode()[chosen]);
    tabs.forEach((tab, index) => tab.setAttribute("aria-pressed", names[index] === chosen));
  }
  update();
  return { element: h("section", { class: "card", "aria-label": "The request as code" }, h("div", { class: "row" }, tabs, h("span", { class: "push" }), copyButton(() => pre.textContent)), pre), update };
}

// ----------------------------------------------------------------------------------------------------------------- page

export function playground(name, metadata, config, versions, atEnd) {
  const optional = new Set((config.input ?? []).filter((input) => input.optional).map((input) => input.name));
  const labelled = new Set((config.output ?? []).filter((output) => output.label_filename).map((output) => output.name));
  const inputs = metadata.inputs.map((input) => tensorInput(input, optional.has(input.name)));
  const isStream = config.model_transaction_policy?.decoupled;
  const outputs = metadata.outputs.map((output) => ({
    ...output,
    wanted: h("input", { type: "checkbox", checked: true, "aria-label": `Ask for ${output.name}` }),
    classes: h("input", { type: "number", min: 0, max: 1000, value: labelled.has(output.name) ? 5 : 0, "aria-label": `Top classes of ${output.name}` }),
  }));
  const version = select([["", "Default version"], ...versions.map((each) => [each, `Version ${each}`])], { "aria-label": "Version", onchange: () => code.update() });
  const answers = h("div", { class: "answers", "aria-live": "polite" }, h("p", { class: "muted" }, "Nothing asked yet."));
  const took = h("span", { class: "muted" });
  const run = button("Run", () => ask(), { class: "primary", title: "Ctrl+Enter" });
  const stop = button("Stop", () => controller?.abort(), { hidden: true });
  let controller = null, last = [];
  const path = () => `v2/models/${encodeURIComponent(name)}${version.value ? `/versions/${version.value}` : ""}`;

  async function readTensors() {
    const tensors = [];
    for (const input of inputs) if (input.isSent()) tensors.push({ name: input.name, datatype: input.datatype, ...(await input.read()) });
    return tensors;
  }

  async function ask() {
    let tensors;
    try {
      tensors = await readTensors();
    } catch {
      return; // the input says what is wrong
    }
    last = tensors;
    code.update();
    controller = new AbortController();
    run.disabled = true;
    stop.hidden = false;
    say(took, "");
    try {
      await (isStream ? stream(tensors) : once(tensors));
    } catch (error) {
      answers.replaceChildren(error.name === "AbortError" ? h("p", { class: "muted" }, "Stopped.") : h("p", { class: "reason-box", role: "alert" }, error.message));
    }
    run.disabled = false;
    stop.hidden = true;
  }

  async function once(tensors) {
    const asked = outputs.filter((output) => output.wanted.checked).map((output) => ({ name: output.name, classes: Number(output.classes.value) }));
    const answer = await infer(path(), tensors, asked, controller.signal);
    say(took, `${ms(answer.milliseconds)} · version ${answer.version}`);
    const classesOf = new Map(asked.map((output) => [output.name, output.classes]));
    answers.replaceChildren(...answer.outputs.map((output) => h("div", { class: "output" }, outputView(output, classesOf.get(output.name)))));
  }

  async function stream(tensors) {
    const started = performance.now();
    const body = Object.fromEntries(tensors.map(({ name: input, values, shape }) => [input, values.length === 1 ? values[0] : nested(Array.from(values), shape)]));
    const response = await call(`${path()}/generate_stream`, { json: body, signal: controller.signal });
    answers.replaceChildren();
    let num = 0;
    for await (const data of events(response)) {
      if (!data) continue;
      answers.append(h("div", { class: "output" }, h("h3", {}, `Answer ${++num} `, h("small", {}, ms(performance.now() - started))), h("pre", { tabindex: 0 }, JSON.stringify(JSON.parse(data), null, 1))));
    }
    say(took, `${num} answers in ${ms(performance.now() - started)}`);
  }

  const code = codeCard(() => snippets(name, version.value, last.length ? last : metadata.inputs.filter((input) => !optional.has(input.name)).map((input) => {
    const shape = input.shape.map((dim) => Math.max(1, dim));
    return { ...input, shape, values: Array(Math.min(65, size(shape))).fill(input.datatype === "BYTES" ? "text" : 0), literal: true };
  })));
  const form = h("form", { class: "card", "aria-label": "Inputs", onsubmit: (event) => { event.preventDefault(); ask(); },
    onkeydown: (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); ask(); } } },
    h("div", { class: "row" }, h("h2", {}, "Inputs"), h("span", { class: "push" }), versions.length > 1 && version), inputs.map((input) => input.element),
    h("div", { class: "row" }, run, stop,
      h("details", { class: "push" }, h("summary", {}, "Outputs"), outputs.map((output) => h("div", { class: "row" }, h("label", { class: "check" }, output.wanted, output.name),
        isFloat(output.datatype) && field("Top classes", output.classes))))));
  atEnd(() => controller?.abort());
  return h("div", { class: "columns" }, form, h("section", { class: "card", "aria-label": "Answer" }, h("div", { class: "row" }, h("h2", {}, "Answer"), took), answers), h("div", { class: "wide" }, code.element));
}
