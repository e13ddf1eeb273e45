// What Hugging Face's client of inference of JavaScript finds at the endpoint that is its argument: a line of JSON per
// check.
const { InferenceClient } = require("@huggingface/inference");

const hub = new InferenceClient("none");
const client = hub.endpoint(process.argv[2]);
const tell = (name, found) => console.log(JSON.stringify({ name, found }));
const messages = [{ role: "user", content: "one two three" }];

async function main() {
  const whole = await client.textGeneration({ inputs: "one two three", parameters: { max_new_tokens: 2 } });
  tell("text", whole.generated_text);
  // Its stream of texts is OpenAI's, whatever the types of the client say.
  let text = "";
  const asked = { inputs: "one two three", parameters: { max_new_tokens: 2 } };
  for await (const event of client.textGenerationStream(asked)) text += event.choices[0]?.text ?? "";
  tell("text stream", text);
  tell("chat", (await client.chatCompletion({ messages })).choices[0].message.content);
  text = "";
  for await (const chunk of client.chatCompletionStream({ messages })) text += chunk.choices[0]?.delta?.content ?? "";
  tell("chat stream", text);
  tell("named", (await client.chatCompletion({ model: "mock", messages })).choices[0].message.content);
  try {
    await client.chatCompletion({ messages, max_tokens: -1 });
  } catch (error) {
    tell("refused", [error.httpResponse.status, error.httpResponse.body.error.param]);
  }
}

main();
