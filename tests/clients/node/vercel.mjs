// Vercel's AI SDK: text, streams and objects, over chat completions and over responses.
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText } from "ai";
import { z } from "zod";

const [baseURL, model] = process.argv.slice(2);
const compatible = createOpenAICompatible({
  name: "pagoda", baseURL, apiKey: "none", supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL, apiKey: "none" });
const prompt = "What is 17 + 25?";

for (const each of [compatible(model), openai.chat(model), openai(model)]) {
  const { text } = await generateText({ model: each, prompt, temperature: 0 });
  assert.match(text, /42/);
  let streamed = "";
  for await (const piece of streamText({ model: each, prompt, temperature: 0 }).textStream) {
    streamed += piece;
  }
  assert.match(streamed, /42/);
  const schema = z.object({ name: z.string().max(20), size: z.number().int() });
  const { object } = await generateObject({ model: each, prompt, schema, maxOutputTokens: 300 });
  schema.parse(object);
}
