// Tensors of the infer protocol: values that people type, pictures and files become inputs; outputs become arrays and pictures.

import { call } from "./core.js";

const ARRAYS = {
  BOOL: Uint8Array, INT8: Int8Array, UINT8: Uint8Array, INT16: Int16Array, UINT16: Uint16Array, INT32: Int32Array, UINT32: Uint32Array,
  INT64: BigInt64Array, UINT64: BigUint64Array, FP16: Uint16Array, BF16: Uint16Array, FP32: Float32Array, FP64: Float64Array,
};
export const isFloat = (datatype) => /^(FP|BF)/.test(datatype);
export const size = (shape) => shape.reduce((product, dim) => product * dim, 1);

const float32 = new Float32Array(1), bits32 = new Uint32Array(float32.buffer);

function toBf16(value) {
  float32[0] = value;
  const bits = bits32[0];
  return Number.isNaN(value) ? 0x7fc0 : (bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16;
}

function toFp16(value) {
  float32[0] = value;
  const bits = bits32[0], sign = (bits >>> 16) & 0x8000, exponent = (bits >>> 23) & 0xff;
  if (exponent === 0xff) return sign | 0x7c00 | (bits & 0x7fffff ? 0x200 : 0);
  const magnitude = Math.abs(float32[0]);
  if (magnitude >= 65520) return sign | 0x7c00;
  if (magnitude < 2 ** -14) return sign | roundEven(magnitude * 2 ** 24);
  const scale = exponent - 127;
  return sign | (((scale + 14) << 10) + roundEven((magnitude / 2 ** scale) * 1024)); // the leading 1 adds the last to the exponent
}

function roundEven(value) {
  const low = Math.floor(value), rest = value - low;
  return rest > 0.5 || (rest === 0.5 && low % 2) ? low + 1 : low;
}

function fromFp16(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24);
}

function fromBf16(bits) {
  bits32[0] = bits << 16;
  return float32[0];
}

function encode(datatype, values) {
  if (datatype === "BYTES") {
    const parts = values.map((value) => (typeof value === "string" ? new TextEncoder().encode(value) : value));
    const data = new Uint8Array(parts.reduce((sum, part) => sum + 4 + part.length, 0)), view = new DataView(data.buffer);
    let offset = 0;
    for (const part of parts) {
      view.setUint32(offset, part.length, true);
      data.set(part, offset + 4);
      offset += 4 + part.length;
    }
    return data;
  }
  const array = new ARRAYS[datatype](values.length);
  const convert = { FP16: toFp16, BF16: toBf16, INT64: BigInt, UINT64: BigInt, BOOL: (value) => (value ? 1 : 0) }[datatype] ?? Number;
  for (let index = 0; index < values.length; index++) array[index] = convert(values[index]);
  return new Uint8Array(array.buffer);
}

// The elements of an output: numbers, big integers as text where they need it, booleans, or the bytes of each string.
function decode(datatype, data) {
  if (datatype === "BYTES") {
    const view = new DataView(data.buffer, data.byteOffset, data.byteLength), found = [];
    for (let offset = 0; offset < data.length;) {
      const length = view.getUint32(offset, true);
      found.push(data.slice(offset + 4, offset + 4 + length));
      offset += 4 + length;
    }
    return found;
  }
  const array = new ARRAYS[datatype](data.slice().buffer);
  const convert = {
    FP16: fromFp16, BF16: fromBf16, BOOL: Boolean,
    INT64: (value) => (Number.isSafeInteger(Number(value)) ? Number(value) : String(value)),
  };
  convert.UINT64 = convert.INT64;
  return convert[datatype] ? Array.from(array, convert[datatype]) : Array.from(array);
}

// Runs one inference. `inputs` are {name, datatype, shape, values}; `outputs` are {name, classes}, with 0 for the tensor itself.
// Tensors travel as bytes, because JSON has neither pictures nor NaN.
export async function infer(path, inputs, outputs, signal) {
  const blobs = inputs.map((input) => encode(input.datatype, input.values));
  const header = new TextEncoder().encode(JSON.stringify({
    inputs: inputs.map(({ name, datatype, shape }, index) => ({ name, datatype, shape, parameters: { binary_data_size: blobs[index].length } })),
    outputs: outputs.map(({ name, classes }) => ({ name, parameters: { binary_data: true, ...(classes ? { classification: classes } : {}) } })),
  }));
  const started = performance.now();
  const response = await call(`${path}/infer`, {
    body: new Blob([header, ...blobs]), signal, headers: { "Inference-Header-Content-Length": String(header.length) },
  });
  const body = new Uint8Array(await response.arrayBuffer());
  const length = Number(response.headers.get("Inference-Header-Content-Length") ?? body.length);
  const document = JSON.parse(new TextDecoder().decode(body.subarray(0, length)));
  let offset = length;
  const found = (document.outputs ?? []).map(({ name, datatype, shape, parameters, data }) => {
    if (data) return { name, datatype, shape, values: data };
    const end = offset + parameters.binary_data_size;
    const values = decode(datatype, body.subarray(offset, end));
    offset = end;
    return { name, datatype, shape, values };
  });
  return { outputs: found, milliseconds: performance.now() - started, version: document.model_version };
}

// Nested lists of a flat array, as JSON shows a tensor.
export function nested(values, shape) {
  if (shape.length <= 1) return values;
  const step = size(shape.slice(1));
  return Array.from({ length: shape[0] }, (_, index) => nested(values.slice(index * step, (index + 1) * step), shape.slice(1)));
}

// What someone typed, as {shape, values}. Nested lists tell the shape; a plain list has the declared one, whose one free
// dimension takes what there is. Throws an Error with a sentence for people.
export function parseValues(text, datatype, declared) {
  if (datatype === "BYTES") {
    const values = text.trim().startsWith("[") ? flat(JSON.parse(text)).map(String) : declared.length && size(declared.map(Math.abs)) > 1 ? text.split("\n") : [text];
    return { shape: fit(declared, values.length), values };
  }
  let document;
  try {
    document = JSON.parse(text.trim().startsWith("[") ? text : `[${text.trim().split(/[\s,]+/).join(",")}]`);
  } catch {
    throw new Error("expected numbers, or a list of numbers in JSON");
  }
  const values = flat(document);
  const wrong = values.find((value) => typeof value !== "number" && typeof value !== "boolean");
  if (wrong !== undefined) throw new Error(`expected numbers, got ${JSON.stringify(wrong)}`);
  if (!isFloat(datatype) && values.some((value) => !Number.isInteger(Number(value)))) throw new Error(`${datatype} has whole numbers only`);
  const given = depth(document);
  return { shape: given.length === declared.length ? given : fit(declared, values.length), values };
}

const flat = (document) => (Array.isArray(document) ? document.flat(Infinity) : [document]);
const depth = (document) => (Array.isArray(document) ? [document.length, ...depth(document[0])] : []);

function fit(declared, total) {
  const free = declared.filter((dim) => dim < 0).length;
  if (!free) {
    if (size(declared) !== total) throw new Error(`expected ${size(declared)} elements (${declared.join(" × ")}), got ${total}`);
    return declared;
  }
  const fixed = size(declared.filter((dim) => dim >= 0)) || 1;
  if (total % fixed) throw new Error(`expected a multiple of ${fixed} elements (${declared.join(" × ")}), got ${total}`);
  let rest = total / fixed; // the last free dimension takes it all if nothing else is fixed, so that a batch stays one
  const index = declared.length > 1 && declared[0] < 0 && free > 1 ? declared.lastIndexOf(-1) : declared.indexOf(-1);
  return declared.map((dim, place) => (dim >= 0 ? dim : place === index ? rest : 1));
}

// ------------------------------------------------------------------------------------------------------------ pictures

// How a shape holds a picture: {layout, channels, height, width}, or null. A leading batch dimension does not count.
export function pictureLayout(shape) {
  const dims = shape.length === 4 || (shape.length === 3 && shape[0] < 0) ? shape.slice(1) : shape;
  const isSide = (dim) => dim < 0 || dim >= 4;
  const side = (dim) => (dim < 0 ? 224 : dim);
  if (dims.length === 2 && dims.every((dim) => dim >= 4)) return { layout: "HW", channels: 1, height: dims[0], width: dims[1] };
  if (dims.length !== 3) return null;
  const isChannels = (dim) => dim === 1 || dim === 3;
  if (isChannels(dims[0]) && isSide(dims[1]) && isSide(dims[2])) return { layout: "CHW", channels: dims[0], height: side(dims[1]), width: side(dims[2]) };
  if (isChannels(dims[2]) && isSide(dims[0]) && isSide(dims[1])) return { layout: "HWC", channels: dims[2], height: side(dims[0]), width: side(dims[1]) };
  return null;
}

const MEAN = [0.485, 0.456, 0.406], DEVIATION = [0.229, 0.224, 0.225];
// What becomes of a channel's value from 0 to 255.
export const SCALINGS = {
  unit: ["0 to 1", (value) => value / 255],
  inverted: ["1 to 0 (ink is 1, paper 0)", (value) => 1 - value / 255],
  signed: ["−1 to 1", (value) => value / 127.5 - 1],
  imagenet: ["ImageNet's mean and deviation", (value, channel) => (value / 255 - MEAN[channel]) / DEVIATION[channel]],
  bytes: ["0 to 255", (value) => value],
};

// Draws a picture onto a canvas of the size that the model wants.
export async function drawPicture(file, canvas, place) {
  const picture = await createImageBitmap(file);
  canvas.width = place.width;
  canvas.height = place.height;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "#fff";
  context.fillRect(0, 0, place.width, place.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(picture, 0, 0, place.width, place.height);
  picture.close();
}

// The canvas's pixels as elements in the layout, scaled.
export function pictureValues(canvas, place, scaling) {
  const { data } = canvas.getContext("2d", { willReadFrequently: true }).getImageData(0, 0, place.width, place.height);
  const values = new Float32Array(place.channels * place.width * place.height);
  const scale = SCALINGS[scaling][1], area = place.width * place.height;
  for (let pixel = 0; pixel < area; pixel++) {
    for (let channel = 0; channel < place.channels; channel++) {
      const at = pixel * 4;
      const value = place.channels === 1 ? 0.299 * data[at] + 0.587 * data[at + 1] + 0.114 * data[at + 2] : data[at + channel];
      values[place.layout === "CHW" ? channel * area + pixel : pixel * place.channels + channel] = scale(value, channel);
    }
  }
  return values;
}

// A tensor that looks like a picture, on a canvas; its least value is black and its greatest white.
export function tensorPicture(values, shape) {
  const place = shape.every((dim) => dim > 0) ? pictureLayout(shape) : null;
  if (!place || place.width < 8 || place.height < 8 || values.length !== place.channels * place.width * place.height) return null;
  const canvas = document.createElement("canvas");
  canvas.width = place.width;
  canvas.height = place.height;
  const context = canvas.getContext("2d"), picture = context.createImageData(place.width, place.height);
  let low = Infinity, high = -Infinity;
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  const area = place.width * place.height;
  for (let pixel = 0; pixel < area; pixel++) {
    for (let channel = 0; channel < 3; channel++) {
      const own = place.channels === 1 ? 0 : channel;
      const value = values[place.layout === "CHW" ? own * area + pixel : pixel * place.channels + own];
      picture.data[pixel * 4 + channel] = ((value - low) / (high - low || 1)) * 255;
    }
    picture.data[pixel * 4 + 3] = 255;
  }
  context.putImageData(picture, 0, 0);
  return canvas;
}

// The type of a picture file by its first bytes; null for other bytes.
export function pictureType(data) {
  const begins = (...codes) => codes.every((code, index) => data[index] === code);
  if (begins(0x89, 0x50, 0x4e, 0x47)) return "image/png";
  if (begins(0xff, 0xd8, 0xff)) return "image/jpeg";
  if (begins(0x47, 0x49, 0x46, 0x38)) return "image/gif";
  return begins(0x52, 0x49, 0x46, 0x46) && data[8] === 0x57 ? "image/webp" : null;
}
