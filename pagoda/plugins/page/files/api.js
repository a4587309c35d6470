// SPDX-License-Identifier: Apache-2.0
// Requests to the server: the API key, errors as sentences, events as they come.

import { Stored } from "./storage.js";

export const key = new Stored("sessionStorage", "pagoda-api-key");

export class ApiFailure extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const keyListeners = [];

// `listener` is called when the server refuses the key, or wants one.
export const onKeyNeeded = (listener) => keyListeners.push(listener);

function headers(extra) {
  return key.get() ? { ...extra, Authorization: `Bearer ${key.get()}` } : extra;
}

// A successful response. Throws ApiFailure, and the errors of `fetch`.
export async function request(path, { body, method = body ? "POST" : "GET", signal } = {}) {
  const options = { method, signal, cache: "no-store", headers: headers({}) };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers["Content-Type"] = "application/json";
  }
  const response = await fetch(path, options);
  if (response.ok) return response;
  const failure = new ApiFailure(response.status, await messageOf(response));
  if (response.status === 401) keyListeners.forEach((listener) => listener());
  throw failure;
}

async function messageOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

// The data of each event of a stream. An `error` event is thrown.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      buffer += value;
      const parts = buffer.split("\n\n");
      buffer = parts.pop();
      for (const part of parts) {
        const found = parse(part);
        if (found.data === "[DONE]") return;
        if (!found.data) continue;
        const data = JSON.parse(found.data);
        if (found.event === "error") throw new ApiFailure(500, data.error.message);
        yield data;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(part) {
  const found = { event: "message", data: "" };
  for (const line of part.split("\n")) {
    if (line.startsWith("data: ")) found.data += line.slice(6);
    else if (line.startsWith("event: ")) found.event = line.slice(7);
  }
  return found;
}

// An error as a sentence.
export function sentence(error) {
  if (error instanceof ApiFailure) return error.message;
  if (error instanceof TypeError) return "The server cannot be reached.";
  return error.message || String(error);
}
