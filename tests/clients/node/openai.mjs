// The official client of OpenAI for Node: chat, streams, tools, errors.
import assert from "node:assert";
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is 17 + 25?" }];

const answer = await client.chat.completions.create({ model, messages, temperature: 0 });
assert.match(answer.choices[0].message.content, /42/);

let text = "";
for await (const event of await client.chat.completions.create({
  model, messages, temperature: 0, stream: true, stream_options: { include_usage: true },
})) {
  text += event.choices[0]?.delta.content ?? "";
}
assert.match(text, /42/);

const completion = await client.completions.create({ model, prompt: "a", max_tokens: 4 });
assert.equal(completion.object, "text_completion");

await assert.rejects(
  client.chat.completions.create({ model: "other", messages }),
  (error) => error instanceof OpenAI.NotFoundError,
);

const tools = [{
  type: "function",
  function: {
    name: "calculator",
    parameters: { type: "object", properties: { expression: { type: "string" } }, required: ["expression"] },
  },
}];
const called = await client.chat.completions.create({
  model, messages, tools, tool_choice: "required", max_tokens: 300,
});
assert.ok("expression" in JSON.parse(called.choices[0].message.tool_calls[0].function.arguments));

const response = await client.responses.create({ model, input: "What is 17 + 25?", temperature: 0 });
assert.match(response.output_text, /42/);
