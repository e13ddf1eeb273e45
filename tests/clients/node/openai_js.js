// What OpenAI's own client of JavaScript finds at the server that is its argument: a line of JSON per check.
const OpenAI = require("openai");

const client = new OpenAI({ baseURL: `http://${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const tell = (name, found) => console.log(JSON.stringify({ name, found }));
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const call = JSON.stringify({ name: "weather", arguments: { city: "Oslo" } });
const script = "do: " + JSON.stringify({ text: `<think>Hm.</think>I look.\n<tool_call>\n${call}\n</tool_call>`, cut: 3 });

async function chat() {
  const messages = [{ role: "user", content: "one two three" }];
  const whole = await client.chat.completions.create({ model: "mock", messages });
  tell("chat", whole.choices[0].message.content);
  let text = "";
  const stream = await client.chat.completions.create({ model: "mock", messages, stream: true });
  for await (const chunk of stream) text += chunk.choices[0]?.delta.content ?? "";
  tell("stream", text);
  const asked = {
    model: "agent",
    messages: [{ role: "user", content: script }],
    tools: [{ type: "function", function: { name: "weather", parameters } }],
  };
  const ran = client.chat.completions.stream(asked);
  const { message, finish_reason } = (await ran.finalChatCompletion()).choices[0];
  const { name, arguments: given } = message.tool_calls[0].function;
  tell("tools", [message.content, name, given, finish_reason]);
  const weather = { type: "function", function: { name: "weather", parameters, parse: JSON.parse, function: ({ city }) => `12 in ${city}` } };
  const runner = client.chat.completions.runTools({ ...asked, tools: [weather] });
  tell("run", await runner.finalContent());
}

async function responses() {
  const tools = [{ type: "function", name: "weather", parameters, strict: false }];
  const kinds = [];
  const stream = client.responses.stream({ model: "agent", input: script, tools });
  stream.on("response.output_item.done", (event) => kinds.push(event.item.type));
  const { output } = await stream.finalResponse();
  tell("response", [kinds, output[2].arguments]);
  const whole = await client.responses.create({ model: "mock", input: "one two" });
  tell("follows", (await client.responses.create({ model: "mock", input: "x", previous_response_id: whole.id })).output_text);
}

async function others() {
  tell("completion", (await client.completions.create({ model: "mock", prompt: "one" })).choices[0].text);
  tell("embedding", (await client.embeddings.create({ model: "encoder", input: "one two" })).data[0].embedding.length);
  const models = [];
  for await (const model of client.models.list()) models.push(model.id);
  tell("models", models.includes("mock"));
  try {
    await client.chat.completions.create({ model: "absent", messages: [] });
  } catch (error) {
    tell("absent", [error.status, error.code, error instanceof OpenAI.NotFoundError]);
  }
  try {
    await client.files.create({ file: await OpenAI.toFile(Buffer.from("{}"), "a.jsonl"), purpose: "batch" });
  } catch (error) {
    tell("files", [error.status, error.message.includes("--batch-directory")]);
  }
}

chat().then(responses).then(others);
