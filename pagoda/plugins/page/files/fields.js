// SPDX-License-Identifier: Apache-2.0
// The fields of a request that a pane can set, and the conversion of typed text to their values.

const number = (name, label, hint = "") => ({ name, label, hint, kind: "number" });
const text = (name, label, hint = "") => ({ name, label, hint, kind: "text" });
const choice = (name, label, options) => ({ name, label, kind: "choice", options });
const json = (name, label, hint = "") => ({ name, label, hint, kind: "json" });
const lines = (name, label, hint = "") => ({ name, label, hint, kind: "lines" });
const YES_NO = ["true", "false"];

export const GROUPS = [
  {
    title: "Sampling",
    fields: [
      number("temperature", "temperature", "0 takes the likeliest"),
      number("top_p", "top_p", "0 to 1"),
      number("top_k", "top_k", "0 means all"),
      number("min_p", "min_p", "0 to 1"),
      number("typical_p", "typical_p", "0 to 1"),
      number("seed", "seed", "same seed, same answer"),
      number("presence_penalty", "presence_penalty", "−2 to 2"),
      number("frequency_penalty", "frequency_penalty", "−2 to 2"),
      number("repetition_penalty", "repetition_penalty", "1 changes nothing"),
      json("logit_bias", "logit_bias", '{"17": -5}'),
      json("allowed_token_ids", "allowed_token_ids", "[1, 2, 3]"),
    ],
  },
  {
    title: "Length and end",
    fields: [
      number("max_tokens", "max_tokens"),
      number("min_tokens", "min_tokens"),
      lines("stop", "stop", "one string a line"),
      json("stop_token_ids", "stop_token_ids", "[7]"),
      choice("include_stop_str_in_output", "include_stop_str_in_output", YES_NO),
      choice("ignore_eos", "ignore_eos", YES_NO),
    ],
  },
  {
    title: "Answer",
    fields: [
      number("n", "n", "answers to one prompt"),
      number("top", "probabilities", "alternatives per token, 0 to 20"),
      choice("skip_special_tokens", "skip_special_tokens", YES_NO),
      { ...choice("include_reasoning", "include_reasoning", YES_NO), only: "chat" },
      { ...choice("echo", "echo", YES_NO), only: "completion" },
    ],
  },
  {
    title: "Tools and format",
    only: "chat",
    fields: [
      { ...json("tools", "tools", '[{"type": "function", "function": {"name": …}}]'), tall: true },
      choice("tool_choice", "tool_choice", ["auto", "none", "required"]),
      choice("parallel_tool_calls", "parallel_tool_calls", YES_NO),
      { ...json("schema", "JSON schema", '{"type": "object", "properties": {…}}'), tall: true },
      json("chat_template_kwargs", "chat_template_kwargs", '{"enable_thinking": true}'),
      choice("continue_final_message", "continue_final_message", YES_NO),
      choice("add_generation_prompt", "add_generation_prompt", YES_NO),
    ],
  },
  {
    title: "Scheduling and more",
    fields: [
      number("priority", "priority", "lower comes first"),
      text("cache_salt", "cache_salt"),
      choice("add_special_tokens", "add_special_tokens", YES_NO),
      text("prompt_cache_key", "prompt_cache_key", "keeps a session together"),
      text("user", "user"),
      json("more", "other fields", '{"kv_transfer_params": {…}}'),
    ],
  },
];

const ALL = GROUPS.flatMap((group) => group.fields.map((field) => ({ only: group.only, ...field })));

// The fields of a body, from typed text. Throws Error with a sentence that names the field.
export function readFields(typed, mode) {
  const body = {};
  for (const field of ALL) {
    const text = typed[field.name] ?? "";
    const value = field.kind === "lines" ? text : text.trim(); // a blank may be what ends an answer
    if (value === "" || (field.only && field.only !== mode)) continue;
    put(body, field, valueOf(field, value), mode);
  }
  return body;
}

function valueOf(field, value) {
  if (field.kind === "number") {
    if (Number.isNaN(Number(value))) throw new Error(`${field.label} must be a number, got ${value}.`);
    return exact(Number(value), field, value);
  }
  if (field.kind === "lines") return value.split("\n").filter((line) => line !== "");
  if (field.kind === "json") {
    let parsed;
    try {
      parsed = JSON.parse(value);
    } catch (error) {
      throw new Error(`${field.label} is not valid JSON: ${error.message}.`);
    }
    checkNumbers(parsed, field);
    return parsed;
  }
  return field.options === YES_NO ? value === "true" : value;
}

// JavaScript would send a number that it cannot hold as another number, or as null.
function exact(number, field, text) {
  if (Number.isFinite(number) && (!Number.isInteger(number) || Number.isSafeInteger(number))) return number;
  throw new Error(`${field.label} must be at most ${Number.MAX_SAFE_INTEGER} here, got ${text}.`);
}

function checkNumbers(value, field) {
  if (typeof value === "number") exact(value, field, value);
  else if (value !== null && typeof value === "object") Object.values(value).forEach((one) => checkNumbers(one, field));
}

function put(body, field, value, mode) {
  if (field.name === "more") Object.assign(body, value);
  else if (field.name === "schema") {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: value } };
  } else if (field.name !== "top") body[field.name] = value;
  else if (mode === "completion") body.logprobs = value;
  else Object.assign(body, { logprobs: true, top_logprobs: value });
}
