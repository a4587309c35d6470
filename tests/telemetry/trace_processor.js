// SPDX-License-Identifier: Apache-2.0
// Serves Perfetto's trace processor, as WebAssembly, over the HTTP that the `perfetto` package of Python speaks.
//
//   node trace_processor.js DIRECTORY
//
// DIRECTORY holds `engine_bundle.js` and `trace_processor.wasm` as Perfetto's web page has them. The bundle is meant for
// a web worker that gets a MessagePort; it is given what it looks for. The first line of standard output is the port.
// The process ends when its standard input does.
'use strict';

const fs = require('node:fs');
const http = require('node:http');
const path = require('node:path');
const vm = require('node:vm');

const directory = process.argv[2];

// ---- the engine, in a world of its own that looks like a web worker

class LocalRequest {
  // The one use of XMLHttpRequest in the bundle: to read the WebAssembly file at once.
  open(_method, url) { this.url = url; }
  send() { this.response = readFile(this.url); }
}

function readFile(url) {
  const bytes = fs.readFileSync(path.join(directory, path.basename(url)));
  return bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength);
}

function startEngine() {
  const world = {
    TextDecoder, TextEncoder, URL, performance, setTimeout, clearTimeout, setInterval, clearInterval,
    crypto: globalThis.crypto,
    console: { log() {}, warn() {}, error() {}, info() {} },
    XMLHttpRequest: LocalRequest,
    fetch: async (url) => ({ ok: true, arrayBuffer: async () => readFile(url) }),
    WorkerGlobalScope: class {},
    importScripts() {},
    location: { href: 'http://localhost/engine_bundle.js' },
  };
  world.self = world;
  vm.createContext(world);
  vm.runInContext(fs.readFileSync(path.join(directory, 'engine_bundle.js'), 'utf8'), world);
  // The bundle asks whether a message is a Uint8Array: one of its own world.
  const adopt = vm.runInContext('(buffer) => new Uint8Array(buffer)', world);
  const port = { postMessage: (bytes) => port.received.push(Buffer.from(bytes)), received: [] };
  world.onmessage({ data: port });
  return {
    // What the engine answers; it does so before the call returns.
    exchange(bytes) {
      port.received = [];
      const copy = new Uint8Array(bytes);
      port.onmessage({ data: adopt(copy.buffer) });
      return Buffer.concat(port.received);
    },
  };
}

// ---- protocol buffers, as little of them as it takes to wrap and unwrap `TraceProcessorRpc`

function varint(number) {
  const bytes = [];
  for (; number > 127; number = Math.floor(number / 128)) bytes.push((number % 128) | 128);
  return Buffer.from([...bytes, number]);
}

function field(number, bytes) {
  return Buffer.concat([varint(number * 8 + 2), varint(bytes.length), bytes]);
}

function* fieldsOf(bytes) {
  let at = 0;
  const next = () => {
    let value = 0;
    for (let scale = 1; ; scale *= 128) {
      const byte = bytes[at++];
      value += (byte & 127) * scale;
      if (byte < 128) return value;
    }
  };
  while (at < bytes.length) {
    const tag = next();
    const [number, kind] = [Math.floor(tag / 8), tag % 8];
    if (kind === 0) {
      yield [number, next()];
    } else if (kind === 2) {
      const length = next();
      yield [number, bytes.subarray(at, at + length)];
      at += length;
    } else {
      throw new Error(`a field of kind ${kind} in an answer`);
    }
  }
}

const STREAM_MESSAGE = 1;
const SEQUENCE = 1;
const REQUEST = 2;
const FATAL_ERROR = 5;
// For each path: the number of the method, the field of what is sent, the field of what comes back.
const METHODS = {
  '/parse': [1, 101, 201],
  '/notify_eof': [2, null, 212],
  '/query': [3, 103, 203],
  '/status': [10, null, 210],
};

let sequence = 0;

function call(engine, [method, sent, returned], body) {
  const parts = [
    Buffer.concat([varint(SEQUENCE * 8), varint(++sequence)]),
    Buffer.concat([varint(REQUEST * 8), varint(method)]),
  ];
  if (sent !== null) parts.push(field(sent, body));
  const answer = engine.exchange(field(STREAM_MESSAGE, Buffer.concat(parts)));
  const results = [];
  for (const [, message] of fieldsOf(answer)) {
    for (const [number, value] of fieldsOf(message)) {
      if (number === FATAL_ERROR) throw new Error(value.toString());
      // The batches of a long result: messages that follow each other are merged by whoever parses them.
      if (number === returned) results.push(value);
    }
  }
  return Buffer.concat(results);
}

// ---- over HTTP

function bodyOf(request) {
  return new Promise((resolve, reject) => {
    const chunks = [];
    request.on('data', (chunk) => chunks.push(chunk));
    request.on('end', () => resolve(Buffer.concat(chunks)));
    request.on('error', reject);
  });
}

const engine = startEngine();
const server = http.createServer(async (request, response) => {
  const method = METHODS[request.url];
  const body = await bodyOf(request);
  if (method === undefined) {
    response.writeHead(404).end();
    return;
  }
  try {
    response.end(call(engine, method, body));
  } catch (error) {
    response.writeHead(500).end(String(error));
  }
});
process.stdin.on('end', () => process.exit(0)).resume();
setImmediate(() => server.listen(0, '127.0.0.1', () => console.log(server.address().port)));
