// Providers of the AI SDK, each by the API of its own vendor: text, streams, tools, embeddings.
import assert from "node:assert";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createMistral } from "@ai-sdk/mistral";
import { createOpenAI } from "@ai-sdk/openai";
import { embedMany, generateText, streamText, tool } from "ai";
import { createOllama } from "ollama-ai-provider-v2";
import { z } from "zod";

const [baseURL, model] = process.argv.slice(2);
const settings = { baseURL, apiKey: "none" };
const ollama = createOllama({ baseURL: baseURL.replace(/v1$/, "api") });
const [mistral, openai] = [createMistral(settings), createOpenAI(settings)];
const tools = {
  calculator: tool({
    description: "Calculates.",
    inputSchema: z.object({ expression: z.string() }),
    execute: async () => "42",
  }),
};

for (const provider of [createAnthropic(settings), mistral, openai, ollama]) {
  const asked = { model: provider(model), prompt: "What is 17 + 25?", temperature: 0, seed: 5, maxRetries: 0 };
  assert.match((await generateText({ ...asked, maxOutputTokens: 50 })).text, /42/);
  let text = "";
  for await (const part of streamText({ ...asked, maxOutputTokens: 50 }).fullStream) {
    if (part.type === "error") throw part.error;
    if (part.type === "text-delta") text += part.text;
  }
  assert.match(text, /42/);
  if (provider === ollama) continue; // it has no choice of tools
  const called = await generateText({ ...asked, tools, toolChoice: "required", maxOutputTokens: 300 });
  assert.equal(called.toolCalls[0].toolName, "calculator");
}
for (const embedder of [mistral, openai, ollama]) {
  const { embeddings } = await embedMany({ model: embedder.textEmbeddingModel(model), values: ["a", "b"] });
  assert.equal(embeddings.length, 2);
}
