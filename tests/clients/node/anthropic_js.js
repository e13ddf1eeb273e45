// What Anthropic's own client of JavaScript finds at the server that is its argument: a line of JSON per check.
const Anthropic = require("@anthropic-ai/sdk");

const client = new Anthropic({ baseURL: `http://${process.argv[2]}`, apiKey: "none", maxRetries: 0 });
const tell = (name, found) => console.log(JSON.stringify({ name, found }));
const input_schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const call = JSON.stringify({ name: "weather", arguments: { city: "Oslo" } });
const script = "do: " + JSON.stringify({ text: `<think>Hm.</think>I look.\n<tool_call>\n${call}\n</tool_call>`, cut: 3 });

async function main() {
  const asked = { model: "mock", max_tokens: 100, messages: [{ role: "user", content: "one two three" }] };
  const whole = await client.messages.create(asked);
  tell("message", [whole.content[0].text, whole.stop_reason]);
  let text = "";
  for await (const event of client.messages.stream(asked)) text += event.delta?.text ?? "";
  tell("stream", text);
  const question = { role: "user", content: script };
  const tools = [{ name: "weather", input_schema }];
  const thinking = { type: "enabled", budget_tokens: 1024 };
  const agent = { model: "agent", max_tokens: 2000, tools, thinking };
  const first = await client.messages.stream({ ...agent, messages: [question] }).finalMessage();
  const use = first.content[2];
  tell("tools", [first.content.map((block) => block.type), use.name, use.input, first.stop_reason]);
  const result = { role: "user", content: [{ type: "tool_result", tool_use_id: use.id, content: "12 degrees" }] };
  const messages = [question, { role: "assistant", content: first.content }, result];
  tell("result", (await client.messages.create({ ...agent, messages })).content[0].text);
  tell("count", (await client.messages.countTokens({ model: "mock", messages: asked.messages })).input_tokens);
  try {
    await client.messages.create({ ...asked, model: "absent" });
  } catch (error) {
    tell("absent", [error.status, error.error.error.type]);
  }
}

main();
