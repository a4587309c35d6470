// SPDX-License-Identifier: Apache-2.0
// A request as something to paste: `curl`, or Python with the `openai` package.

import { key } from "./api.js";

const OPENAI = new Set(
  (
    "model messages prompt stream stream_options temperature top_p n seed stop max_tokens max_completion_tokens " +
    "presence_penalty frequency_penalty logit_bias logprobs top_logprobs tools tool_choice parallel_tool_calls " +
    "response_format user metadata echo prompt_cache_key"
  ).split(" "),
);

export function asCurl(path, body) {
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const parts = [`curl ${body.stream ? "-N " : ""}${location.origin}${path}`, "-H 'Content-Type: application/json'"];
  if (key.get()) parts.push('-H "Authorization: Bearer $PAGODA_API_KEY"');
  parts.push(`-d '${quoted}'`);
  return parts.join(" \\\n  ");
}

export function asPython(path, body) {
  const known = Object.entries(body).filter(([name]) => OPENAI.has(name));
  const others = Object.fromEntries(Object.entries(body).filter(([name]) => !OPENAI.has(name)));
  const fields = known.map(([name, value]) => `    ${name}=${python(value, 1)},`);
  if (Object.keys(others).length) fields.push(`    extra_body=${python(others, 1)},`);
  const isChat = path.includes("chat");
  const apiKey = key.get() ? 'os.environ["PAGODA_API_KEY"]' : '"none"';
  const text = isChat ? "event.choices[0].delta.content" : "event.choices[0].text";
  return [
    ...(key.get() ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${location.origin}/v1", api_key=${apiKey})`,
    `stream = client.${isChat ? "chat.completions" : "completions"}.create(`,
    ...fields,
    ")",
    "for event in stream:",
    "    if event.choices:",
    `        print(${text} or "", end="", flush=True)`,
    "print()",
    "",
  ].join("\n");
}

function python(value, depth) {
  const pad = "    ".repeat(depth);
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const isList = Array.isArray(value);
  const items = isList
    ? value.map((item) => python(item, depth + 1))
    : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${python(item, depth + 1)}`);
  const [open, close] = isList ? "[]" : "{}";
  const short = open + items.join(", ") + close;
  if (short.length < 70 && !short.includes("\n")) return short;
  return `${open}\n${items.map((item) => `${pad}    ${item},\n`).join("")}${pad}${close}`;
}
