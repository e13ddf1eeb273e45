// What Ollama's own client of JavaScript finds at the server that is its argument: a line of JSON per check.
const { Ollama } = require("ollama");

const client = new Ollama({ host: `http://${process.argv[2]}` });
const tell = (name, found) => console.log(JSON.stringify({ name, found }));

async function main() {
  const messages = [{ role: "user", content: "one two three" }];
  const whole = await client.chat({ model: "mock", messages });
  tell("chat", whole.message.content);
  let text = "";
  for await (const part of await client.chat({ model: "mock", messages, stream: true })) text += part.message.content;
  tell("stream", text);
  const generated = await client.generate({ model: "mock", prompt: "one two", options: { num_predict: 1 } });
  tell("generate", [generated.done, generated.done_reason, generated.eval_count]);
  tell("list", (await client.list()).models.map((model) => model.name).includes("mock:latest"));
  tell("show", (await client.show({ model: "mock" })).capabilities);
  tell("embed", (await client.embed({ model: "encoder", input: ["a", "b"] })).embeddings.length);
  tell("ps", (await client.ps()).models.length > 0);
  try {
    await client.chat({ model: "absent", messages });
  } catch (error) {
    tell("absent", [error.status_code, error.message.includes("not found")]);
  }
  try {
    await client.pull({ model: "mock" });
  } catch (error) {
    tell("pull", [error.status_code, error.message.includes("--store")]);
  }
}

main();
