// The routes for pictures and text to read and to try: openapi.json as a page.

import { el, find } from "./dom.js";
import { keyed } from "./key.js";

/** Text in which what stands between backquotes is code. */
const words = (text) =>
  String(text).split("`").map((part, at) => (at % 2 ? el("code", {}, part) : part));

const table = (titles, rows) =>
  el("div", { class: "wide" }, el("table", {},
    el("thead", {}, el("tr", {}, ...titles.map((title) => el("th", { scope: "col" }, title)))),
    el("tbody", {}, ...rows.map((row) =>
      el("tr", {}, ...row.map((cell) => el("td", {}, ...[cell].flat())))))));

const code = (text) => el("code", {}, String(text));

/** What a value may be. */
export function values(schema) {
  const without = "default" in schema ? `; \`${JSON.stringify(schema.default)}\` without it` : "";
  if (schema.enum) return schema.enum.map((value) => `\`${value}\``).join(", ") + without;
  const range = "minimum" in schema ? ` from ${schema.minimum} to ${schema.maximum}` : "";
  return schema.type + range + without;
}

function form(path, drawn) {
  const answer = el("div", { "aria-live": "polite" });
  const draw = el("label", {}, el("input", { type: "checkbox", name: "overlay", value: "1" }), " draw the answer");
  const file = el("label", {}, "Picture ", el("input", { type: "file", name: "file", required: true }));
  const node = el("form", {}, file, drawn ? draw : null, el("button", {}, "Send"));
  node.addEventListener("submit", async (event) => {
    event.preventDefault();
    answer.replaceChildren(await sent(path, new FormData(node)).catch((error) => el("p", {}, String(error))));
  });
  return [node, answer];
}

async function sent(path, body) {
  const response = await fetch(path, { method: "POST", body, headers: keyed() });
  if (response.headers.get("content-type").startsWith("image/")) {
    return el("img", { src: URL.createObjectURL(await response.blob()), alt: "The picture with its answer" });
  }
  return el("pre", {}, JSON.stringify(await response.json(), null, 2));
}

function section(path, verb, operation) {
  const answers = operation.responses["200"].content;
  const parameters = operation.parameters ?? [];
  const takesPicture = "multipart/form-data" in (operation.requestBody?.content ?? {});
  const options = parameters.map((one) =>
    [code(one.name), one.in, words(values(one.schema)), words(one.description)]);
  const pictures = Object.keys(answers).filter((kind) => kind.startsWith("image/"));
  const tries = path.includes("{") || !takesPicture ? [] : [
    ...form(path, parameters.some((one) => one.name === "overlay")),
    el("pre", {}, `curl -s -F file=@picture.jpg ${location.origin}${path}`),
  ];
  return el("section", {},
    el("h2", { id: operation.operationId }, el("span", { class: "verb" }, verb.toUpperCase()), " ", code(path)),
    el("p", {}, ...words(`${operation.summary}. ${operation.description ?? ""}`)),
    options.length ? table(["option", "where", "value", ""], options) : null,
    ...tries,
    ...Object.entries(answers["application/json"]?.examples ?? {}).map(([kind, example]) =>
      el("details", {}, el("summary", {}, `What comes back: ${kind}`),
        el("pre", {}, JSON.stringify(example.value, null, 2)))),
    pictures.length
      ? el("p", {}, ...words(`Or the picture with the answer drawn in, by \`overlay=1\` or Accept: ${pictures.join(", ")}.`))
      : null);
}

function models(served) {
  if (!served.length) return [el("p", {}, "No model here takes pictures now.")];
  const rows = served.map((model) => [code(model.name), model.version, model.task]);
  return [el("h2", {}, "Models"), table(["model", "version", "task"], rows)];
}

function errors({ responses, schemas }) {
  const fields = Object.entries(schemas.Error.properties).map(([name, field]) => [code(name), words(field.description)]);
  const statuses = Object.entries(responses).map(([name, answer]) => [name.slice(1), words(answer.description)]);
  return el("section", {}, el("h2", {}, "Errors"), el("p", {}, "Every error has the same form."),
    table(["field", ""], fields), table(["status", ""], statuses));
}

async function show(page) {
  const response = await fetch("/openapi.json", { headers: keyed() });
  const described = await response.json();
  if (!response.ok) throw new Error(described.error);
  page.append(
    el("p", {}, ...words(described.info.description)),
    ...models(described["x-carpool-models"]),
    ...Object.entries(described.paths).flatMap(([path, item]) =>
      Object.entries(item).map(([verb, operation]) => section(path, verb, operation))),
    errors(described.components));
}

const page = find("docs");
if (page) show(page).catch((error) => page.append(el("p", { role: "alert" }, error.message)));
