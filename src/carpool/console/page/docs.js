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
      el("tr", {}, ...row.map((cell, index) => el("td", { "data-title": titles[index] }, ...[cell].flat())))))));

const code = (text) => el("code", {}, String(text));

/** What a value may be. */
export function values(schema) {
  const without = "default" in schema ? `; \`${JSON.stringify(schema.default)}\` without it` : "";
  if (schema.enum) return schema.enum.map((value) => `\`${value}\``).join(", ") + without;
  const range = "minimum" in schema ? ` from ${schema.minimum} to ${schema.maximum}` : "";
  return schema.type + range + without;
}

/** The options of a route that go into its query, as fields to try them with. */
const fields = (parameters) =>
  parameters.filter((one) => one.in === "query" && one.name !== "overlay").map(({ name, description, schema }) => {
    const title = String(description ?? "").replaceAll("`", "");
    return el("label", { title }, el("span", {}, name), field(name, schema));
  });

function field(name, schema) {
  const given = "default" in schema ? String(schema.default) : "";
  const kinds = schema.enum ?? (schema.type === "boolean" ? ["true", "false"] : null);
  if (kinds) {
    const choices = ["", ...kinds].map((value) => el("option", { value }, value === "" ? given || "–" : String(value)));
    return el("select", { name }, ...choices);
  }
  const isNumber = ["integer", "number"].includes(schema.type);
  const limits = isNumber ? { min: schema.minimum, max: schema.maximum, step: schema.type === "integer" ? 1 : "any" } : {};
  const known = Object.fromEntries(Object.entries(limits).filter(([, value]) => value !== undefined));
  return el("input", { type: isNumber ? "number" : "text", name, placeholder: given, ...known });
}

function form(path, parameters) {
  const answer = el("div", { "aria-live": "polite" });
  const drawn = parameters.some((one) => one.name === "overlay");
  const draw = el("label", {}, el("input", { type: "checkbox", name: "overlay", value: "1" }), " draw the answer");
  const file = el("input", { type: "file", required: true });
  const node = el("form", {}, el("label", { class: "file" }, "Image ", file), ...fields(parameters), drawn ? draw : null, el("button", {}, "Send"));
  node.addEventListener("submit", async (event) => {
    event.preventDefault();
    const asked = [...new FormData(node)].filter(([, value]) => value !== "");
    const body = new FormData();
    body.append("file", file.files[0]);
    const query = asked.length ? `?${new URLSearchParams(asked)}` : "";
    answer.replaceChildren(await sent(`${path}${query}`, body).catch((error) => el("p", {}, String(error))));
  });
  return [node, answer];
}

async function sent(path, body) {
  const response = await fetch(path, { method: "POST", body, headers: keyed() });
  if (response.headers.get("content-type").startsWith("image/")) {
    return el("img", { src: URL.createObjectURL(await response.blob()), alt: "The image with its response" });
  }
  const text = await response.text();
  const isJson = response.headers.get("content-type").startsWith("application/json");
  return el("pre", {}, isJson ? JSON.stringify(JSON.parse(text), null, 2) : text);
}

function section(path, verb, operation) {
  const answers = operation.responses["200"].content;
  const parameters = operation.parameters ?? [];
  const takesPicture = "multipart/form-data" in (operation.requestBody?.content ?? {});
  const options = parameters.map((one) =>
    [code(one.name), one.in, words(values(one.schema)), words(one.description)]);
  const pictures = Object.keys(answers).filter((kind) => kind.startsWith("image/"));
  const tries = path.includes("{") || !takesPicture ? [] : form(path, parameters);
  const call = takesPicture && !path.includes("{") ? el("pre", {}, `curl -s -F file=@image.jpg ${location.origin}${path}`) : null;
  return el("section", {},
    el("h2", { id: operation.operationId }, el("span", { class: "verb" }, verb.toUpperCase()), " ", code(path)),
    el("p", {}, ...words(`${operation.summary}. ${operation.description ?? ""}`)),
    ...tries,
    call,
    options.length ? el("details", {}, el("summary", {}, "Options"), table(["option", "where", "value", ""], options)) : null,
    ...Object.entries(answers["application/json"]?.examples ?? {}).map(([kind, example]) =>
      el("details", {}, el("summary", {}, `Response: ${kind}`),
        el("pre", {}, JSON.stringify(example.value, null, 2)))),
    pictures.length
      ? el("p", {}, ...words(`Or the image with the result drawn in, by \`overlay=1\` or Accept: ${pictures.join(", ")}.`))
      : null);
}

const line = ([path, verb, operation]) =>
  el("li", {}, el("a", { href: `#${operation.operationId}` }, `${verb.toUpperCase()} ${path}`), ` ${operation.summary}`);

/** What is here, and below it what only a model of another task would answer. */
function contents(routes, idle) {
  const nav = el("nav", { "aria-label": "Contents" }, el("h2", {}, "Contents"), el("ul", {}, ...routes.map(line)));
  if (idle.length) nav.append(el("p", {}, el("a", { href: "#idle" }, `${idle.length} routes of tasks that no model here has`)));
  nav.append(el("p", {}, el("a", { href: "#errors" }, "Errors")));
  return nav;
}

function folded(idle) {
  if (!idle.length) return null;
  const node = el("details", { id: "idle" },
    el("summary", {}, el("h2", {}, `${idle.length} routes of tasks that no model here has`)),
    ...idle.map((route) => section(...route)));
  const unfold = () => {
    if (location.hash === "#idle" || node.querySelector(`[id="${CSS.escape(location.hash.slice(1))}"]`)) node.open = true;
  };
  addEventListener("hashchange", unfold);
  unfold();
  return node;
}

function models(served) {
  if (!served.length) return [el("p", {}, "No model takes images now.")];
  const rows = served.map((model) => [code(model.name), model.version, model.task]);
  return [el("h2", {}, "Models"), table(["model", "version", "task"], rows)];
}

function errors({ responses, schemas }) {
  const fields = Object.entries(schemas.Error.properties).map(([name, field]) => [code(name), words(field.description)]);
  const statuses = Object.entries(responses).map(([name, answer]) => [name.slice(1), words(answer.description)]);
  return el("section", {}, el("h2", { id: "errors" }, "Errors"), el("p", {}, "Every error has the same form."),
    table(["field", ""], fields), table(["status", ""], statuses));
}

async function show(page) {
  const response = await fetch("/openapi.json", { headers: keyed() });
  const described = await response.json();
  if (!response.ok) throw new Error(described.error);
  const all = Object.entries(described.paths).flatMap(([path, item]) =>
    Object.entries(item).map(([verb, operation]) => [path, verb, operation]));
  const isIdle = ([, , operation]) => operation["x-carpool-models"]?.length === 0;
  const routes = all.filter((route) => !isIdle(route));
  const idle = all.filter(isIdle);
  page.append(
    el("p", {}, ...words(described.info.description)),
    ...models(described["x-carpool-models"]),
    contents(routes, idle),
    ...routes.map((route) => section(...route)),
    folded(idle) ?? "",
    errors(described.components));
  if (location.hash) find(location.hash.slice(1))?.scrollIntoView();
}

const page = find("docs");
if (page) show(page).catch((error) => page.append(el("p", { role: "alert" }, error.message)));
