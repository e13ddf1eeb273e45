// Live charts, drawn by hand: lines over the last minutes, with the values under the pointer.

import { bytes, call, count, h, ms, say, select, server, watch } from "./core.js";

const COLOURS = ["--one", "--two", "--three", "--four", "--five", "--six"];
const HEIGHT = 150, LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 18;

// Round steps of an axis from 0 to at least `highest`, in thousands or in powers of two.
function ticks(highest, base) {
  const unit = base === 1024 && highest > 0 ? 1024 ** Math.floor(Math.log(highest) / Math.log(1024)) : 1;
  return roundSteps(highest / unit).map((step) => step * unit);
}

function roundSteps(highest) {
  const rough = (highest || 1) / 3, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
  return [0, 1, 2, 3].map((number) => number * step).filter((value, index) => index === 0 || value - step < highest || index === 1);
}

// A chart: `update(times, series)` draws it; series are {name, values}, with null where nothing is known.
export function chart(title, format, hint = "", base = 1000) {
  const svg = h("svg", { role: "img", "aria-label": title, height: HEIGHT });
  const legend = h("p", { class: "legend" });
  const element = h("figure", { class: "card chart" }, h("figcaption", {}, h("h3", {}, title), hint && h("small", {}, hint)), svg, legend);
  let times = [], series = [], pointed = null;

  function tell() {
    const at = pointed ?? times.length - 1;
    const values = series.map(({ name, values: all }) => [name, all[at]]);
    legend.replaceChildren(...values.map(([name, value], index) => {
      const mark = h("i");
      mark.style.background = `var(${COLOURS[index % COLOURS.length]})`;
      return h("span", {}, mark, `${name} `, h("b", {}, value == null ? "–" : format(value)));
    }), pointed === null ? "" : h("span", {}, `${Math.round(times.at(-1) - times[pointed])} s ago`));
    if (pointed === null) svg.setAttribute("aria-label", `${title}: ${values.map(([name, value]) => `${name} ${value == null ? "none" : format(value)}`).join(", ")}`);
  }

  function draw() {
    const width = svg.clientWidth || 320, span = Math.max(60, times.at(-1) - times[0] || 0), end = times.at(-1) ?? 0;
    const steps = ticks(Math.max(...series.flatMap(({ values }) => values.filter((value) => value != null)), 0), base);
    const x = (time) => width - RIGHT - ((end - time) / span) * (width - LEFT - RIGHT);
    const y = (value) => HEIGHT - BOTTOM - (value / steps.at(-1)) * (HEIGHT - TOP - BOTTOM);
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    svg.replaceChildren(
      ...steps.flatMap((value) => [h("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
        h("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, format(value))]),
      h("text", { x: LEFT, y: HEIGHT - 3 }, `${Math.round(span)} s ago`), h("text", { x: width - RIGHT, y: HEIGHT - 3, "text-anchor": "end" }, "now"),
      ...series.map(({ values }, index) => {
        let path = "", isDown = false;
        values.forEach((value, place) => {
          if (value != null) path += `${isDown ? "L" : "M"}${x(times[place]).toFixed(1)} ${y(value).toFixed(1)}`;
          isDown = value != null;
        });
        const line = h("path", { d: path || "M0 0", class: "curve" });
        line.style.stroke = `var(${COLOURS[index % COLOURS.length]})`;
        return line;
      }),
      pointed !== null && h("line", { class: "pointer", x1: x(times[pointed]), x2: x(times[pointed]), y1: TOP, y2: HEIGHT - BOTTOM }) || h("g"),
    );
    tell();
  }

  svg.addEventListener("pointermove", (event) => {
    const width = svg.clientWidth, span = Math.max(60, times.at(-1) - times[0] || 0);
    const time = times.at(-1) - ((width - RIGHT - event.offsetX) / (width - LEFT - RIGHT)) * span;
    pointed = times.reduce((best, each, index) => (Math.abs(each - time) < Math.abs(times[best] - time) ? index : best), 0);
    draw();
  });
  svg.addEventListener("pointerleave", () => { pointed = null; draw(); });
  return { element, update(newTimes, newSeries) { [times, series] = [newTimes, newSeries]; if (pointed >= times.length) pointed = null; draw(); } };
}

// ------------------------------------------------------------------------------------------------- figures of samples

// What a figure of the chosen models grew between two samples.
function growth(now, before, names, figure) {
  let total = 0, isKnown = false;
  for (const name of names) {
    const one = now.models.get(name), other = before.models.get(name);
    if (!one || !other) continue;
    isKnown = true;
    total += Math.max(0, figure(one) - figure(other));
  }
  return isKnown ? total : null;
}

function quantile(counts, bounds, share) {
  const total = counts.reduce((sum, each) => sum + each, 0);
  if (!total) return null;
  let seen = 0;
  const index = counts.findIndex((each) => (seen += each) >= share * total);
  return bounds[Math.min(index, bounds.length - 1)];
}

function latencies(now, before, names, bounds) {
  const counts = Array(bounds.length + 1).fill(0);
  for (const name of names) {
    const one = now.models.get(name)?.latency.counts, other = before.models.get(name)?.latency.counts;
    if (one && other) one.forEach((value, index) => { counts[index] += Math.max(0, value - other[index]); });
  }
  return [0.5, 0.9, 0.99].map((share) => quantile(counts, bounds, share));
}

// ------------------------------------------------------------------------------------------------------- /metrics

// Families that the server reports nowhere else; sums over their labels, or each of `by`.
const FAMILIES = {
  "vllm:generation_tokens_total": "tokens", "vllm:prompt_tokens_total": "prompt", "vllm:kv_cache_usage_perc": "kv",
  "vllm:num_requests_running": "running", "vllm:num_requests_waiting": "waiting",
  nv_gpu_utilization: "gpu", nv_gpu_memory_used_bytes: "gpuMemory",
};
const scraped = [];

async function scrape() {
  const text = await (await call("metrics", { quiet: true })).text();
  const sample = { time: performance.now() / 1000 };
  for (const line of text.split("\n")) {
    const name = line.slice(0, line.search(/[{ ]/)), short = FAMILIES[name];
    if (!short || (short === "gpu" && line.includes("process"))) continue;
    const label = short.startsWith("gpu") ? (/gpu_uuid="([^"]*)"/.exec(line)?.[1] ?? "").slice(0, 12) : /model(?:_name)?="([^"]*)"/.exec(line)?.[1];
    (sample[short] ??= new Map()).set(label, (sample[short].get(label) ?? 0) + Number(line.slice(line.lastIndexOf(" "))));
  }
  scraped.push(sample);
  if (scraped.length > 450) scraped.shift();
}

// A series for each label of a family; with `perSecond` its growth.
function family(short, perSecond, suffix = "") {
  const labels = [...new Set(scraped.flatMap((sample) => [...(sample[short]?.keys() ?? [])]))].slice(0, COLOURS.length);
  return labels.map((label) => ({
    name: `${label}${suffix}`,
    values: scraped.map((sample, index) => {
      const value = sample[short]?.get(label);
      if (!perSecond) return value ?? null;
      const before = scraped[index - 1]?.[short]?.get(label);
      return value == null || before == null ? null : Math.max(0, value - before) / (sample.time - scraped[index - 1].time);
    }),
  }));
}

// ---------------------------------------------------------------------------------------------------------------- page

export function chartsPage({ root, atEnd }) {
  const chosen = select([["", "All models"]], { "aria-label": "Model", onchange: draw });
  const note = h("p", { class: "muted" });
  const requests = chart("Requests per second", count), latency = chart("Latency", ms, "of each ten seconds"), batches = chart("Mean batch", count);
  const queue = chart("Waiting and in progress", count), failures = chart("Failures per second", count), memory = chart("Memory", bytes, "", 1024);
  const cpu = chart("CPU of the machine", (value) => `${Math.round(value * 100)} %`);
  const tokens = chart("Tokens per second", count, "of language models"), cache = chart("KV cache in use", (value) => `${Number((value * 100).toFixed(2))} %`);
  const gpu = chart("GPU in use", (value) => `${Math.round(value * 100)} %`), gpuMemory = chart("GPU memory", bytes, "", 1024);
  const hidden = [tokens, cache, gpu, gpuMemory];
  hidden.forEach((each) => { each.element.hidden = true; });
  root.append(h("div", { class: "head" }, h("h1", {}, "Charts"), note, h("span", { class: "push" }, chosen)),
    h("div", { class: "chart-grid" }, [requests, latency, queue, batches, tokens, cache, failures, memory, cpu, gpu, gpuMemory].map((each) => each.element)));
  let known = "";

  function draw() {
    const { samples, overview } = server;
    if (!samples.length) {
      say(note, overview?.isPartial ? "This key may not read figures." : "Waiting for the first figures…");
      return;
    }
    say(note, "");
    const all = [...new Set(samples.flatMap((sample) => [...sample.models.keys()]))];
    const models = [...new Set(all.map((name) => name.split(" ")[0]))].sort();
    if (known !== models.join()) {
      known = models.join();
      const before = chosen.value;
      chosen.replaceChildren(h("option", { value: "" }, "All models"), ...models.map((name) => h("option", { value: name }, name)));
      chosen.value = models.includes(before) ? before : "";
    }
    const names = chosen.value ? all.filter((name) => name.split(" ")[0] === chosen.value) : all;
    const times = samples.map((sample) => sample.time), bounds = overview.latency_bounds_ms ?? [];
    const each = (make, distance = 1) => samples.map((sample, index) => (index >= distance || index > 0 ? make(sample, samples[Math.max(0, index - distance)]) : null));
    const perSecond = (of, figure) => each((now, before) => { const grown = growth(now, before, of, figure); return grown == null ? null : grown / (now.time - before.time); });
    const busiest = names.map((name) => [name, growth(samples.at(-1), samples[0], [name], (row) => row.success) ?? 0]).filter(([, grown]) => grown > 0)
      .sort((one, other) => other[1] - one[1]).slice(0, 5).map(([name]) => name);
    requests.update(times, [{ name: "all", values: perSecond(names, (row) => row.success + row.fail) },
      ...(busiest.length > 1 ? busiest.map((name) => ({ name: name.replace(" ", " v"), values: perSecond([name], (row) => row.success + row.fail) })) : [])]);
    failures.update(times, [{ name: "failed", values: perSecond(names, (row) => row.fail) }]);
    const quantiles = each((now, before) => latencies(now, before, names, bounds), 5);
    latency.update(times, ["p50", "p90", "p99"].map((name, index) => ({ name, values: quantiles.map((row) => row?.[index] ?? null) })));
    batches.update(times, [{ name: "rows", values: each((now, before) => growth(now, before, names, (row) => row.inference_count) / growth(now, before, names, (row) => row.execution_count) || null, 2) }]);
    const sum = (figure) => samples.map((sample) => names.reduce((total, name) => total + (sample.models.get(name) ? figure(sample.models.get(name)) : 0), 0));
    queue.update(times, [{ name: "waiting", values: sum((row) => row.queue_depth) }, { name: "in progress", values: sum((row) => row.inflight) }]);
    memory.update(times, [{ name: "server", values: samples.map((sample) => sample.memory) }, { name: "machine", values: samples.map((sample) => sample.host.memory_used_bytes) }]);
    cpu.update(times, [{ name: "used", values: samples.map((sample) => sample.host.cpu_utilization) }]);
    drawScraped();
  }

  function drawScraped() {
    const times = scraped.map((sample) => sample.time);
    const parts = [[tokens, [...family("tokens", true), ...family("prompt", true, " prompts")]], [cache, family("kv")], [gpu, family("gpu")], [gpuMemory, family("gpuMemory")]];
    for (const [each, series] of parts) {
      each.element.hidden = series.length === 0;
      if (series.length) each.update(times, series.slice(0, COLOURS.length));
    }
  }

  const refresh = () => scrape().then(drawScraped).catch(() => {}); // without metrics there are fewer charts
  refresh();
  const timer = setInterval(() => { if (!document.hidden) refresh(); }, 2000);
  atEnd(() => clearInterval(timer));
  atEnd(watch(draw));
  const observer = new ResizeObserver(draw);
  observer.observe(root);
  atEnd(() => observer.disconnect());
}
