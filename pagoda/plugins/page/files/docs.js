// SPDX-License-Identifier: Apache-2.0
// The page of routes: shows /openapi.json, searches it, and writes a curl line for each route.

const MAX_DEPTH = 3;
const APIS = ["OpenAI", "Anthropic", "Ollama", "Server"];

function element(name, options = {}, ...children) {
  const { text, ...rest } = options;
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(rest)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function resolved(schema, spec) {
  const name = schema?.$ref?.split("/").pop();
  return name ? spec.components.schemas[name] : schema ?? {};
}

function typeName(schema, spec, depth = 0) {
  if (schema.$ref) return schema.$ref.split("/").pop().split(".").pop();
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.anyOf) {
    return depth > MAX_DEPTH ? "…" : schema.anyOf.map((one) => typeName(one, spec, depth + 1)).join(" | ");
  }
  if (schema.type === "array") return `array of ${typeName(schema.items ?? {}, spec, depth + 1)}`;
  return schema.type ?? "any";
}

// A value of the type that the server would take for a required field.
function example(schema, spec, depth = 0) {
  const known = resolved(schema, spec);
  if (depth > MAX_DEPTH) return null;
  if (known.enum) return known.enum.find((value) => value !== null) ?? null;
  if (known.anyOf) return example(known.anyOf.find((one) => one.type !== "null") ?? {}, spec, depth + 1);
  if (known.type === "object") {
    const fields = {};
    for (const name of known.required ?? []) {
      fields[name] = example(known.properties[name], spec, depth + 1);
    }
    return "role" in fields ? { role: "user", content: "hello" } : fields;
  }
  if (known.type === "array") return [example(known.items ?? {}, spec, depth + 1)];
  return { string: "hello", integer: 1, number: 1, boolean: true }[known.type] ?? null;
}

function bodyOf(operation) {
  return operation.requestBody?.content["application/json"].schema;
}

function curlOf(method, path, operation, spec) {
  const lines = [`curl ${location.origin}${path}`];
  if (method !== "get" && method !== "post") lines.push(`-X ${method.toUpperCase()}`);
  if (operation.security) lines.push("-H \"Authorization: Bearer $API_KEY\"");
  const schema = bodyOf(operation);
  if (schema) {
    const body = JSON.stringify(example(schema, spec)).replaceAll("'", "'\\''");
    lines.push("-H 'Content-Type: application/json'", `-d '${body}'`);
  } else if (method === "post") {
    lines.push("-X POST");
  }
  return lines.join(" \\\n  ");
}

function table(heads, rows) {
  const head = element("tr", {}, ...heads.map((text) => element("th", { text, scope: "col" })));
  const body = rows.map((cells) => element("tr", {}, ...cells.map((text) => element("td", { text }))));
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
}

function fieldsOf(schema, spec) {
  const known = resolved(schema, spec);
  const required = new Set(known.required ?? []);
  return Object.entries(known.properties ?? {}).map(([name, field]) => [
    required.has(name) ? `${name} (required)` : name,
    typeName(field, spec),
    field.description ?? "",
  ]);
}

function copyButton(text) {
  const button = element("button", { type: "button", class: "quiet", text: "Copy" });
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed";
    }
  });
  return button;
}

function fill(details, method, path, operation, spec) {
  const curl = curlOf(method, path, operation, spec);
  details.append(element("pre", { tabindex: "0", "aria-label": "curl" }, element("code", { text: curl })));
  details.append(copyButton(curl));
  const schema = bodyOf(operation);
  const fields = schema ? fieldsOf(schema, spec) : [];
  if (fields.length) details.append(element("h3", { text: "Body" }), table(["Field", "Type", ""], fields));
  const statuses = Object.entries(operation.responses).map(([status, one]) => [status, one.description]);
  details.append(element("h3", { text: "Statuses" }), table(["Status", ""], statuses));
}

function routeOf(method, path, operation, spec) {
  const details = element("details", { class: "route" });
  details.append(element("summary", {},
    element("span", { class: "method", text: method.toUpperCase() }),
    element("span", { class: "path", text: path }),
    element("span", { class: "muted", text: operation.summary })));
  let isFilled = false;
  details.addEventListener("toggle", () => {
    if (!isFilled) fill(details, method, path, operation, spec);
    isFilled = true;
  });
  return details;
}

function searchable(method, path, operation, spec) {
  const schema = bodyOf(operation);
  const names = schema ? Object.keys(resolved(schema, spec).properties ?? {}) : [];
  return [method, path, operation.summary, ...names].join(" ").toLowerCase();
}

async function main() {
  const response = await fetch("/openapi.json");
  const spec = await response.json();
  document.getElementById("version").textContent = spec.info.version;
  const shown = [];
  const sections = APIS.map((name) => element("section", {}, element("h2", { text: name })));
  document.getElementById("routes").append(...sections);
  for (const [path, methods] of Object.entries(spec.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const details = routeOf(method, path, operation, spec);
      shown.push({ details, words: searchable(method, path, operation, spec) });
      sections[APIS.indexOf(operation.tags[0])].append(details);
    }
  }
  const search = document.getElementById("search");
  const update = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const { details, words: text } of shown) {
      details.hidden = !words.every((word) => text.includes(word));
      count += !details.hidden;
    }
    for (const section of sections) {
      section.hidden = [...section.querySelectorAll("details")].every((details) => details.hidden);
    }
    document.getElementById("count").textContent = `${count} of ${shown.length} routes`;
  };
  search.addEventListener("input", update);
  update();
}

main();
