// The OpenAPI document of this server, as a page with a form for each request.

function element(tag, attributes = {}, ...children) {
  const made = Object.assign(document.createElement(tag), attributes);
  made.append(...children);
  return made;
}

const pretty = (value) => JSON.stringify(value, null, 2);
const brief = (value) => (pretty(value).length < 2000 ? pretty(value) : JSON.stringify(value));

/** A form that sends a request and shows the answer. Its path is below this page's: the server may be mounted. */
function form(path, method, example) {
  const body = example === undefined ? null : element("textarea", { value: brief(example), spellcheck: false });
  const answer = element("pre", { hidden: true });
  const send = element("button", { type: "button", textContent: "Send" });
  send.onclick = async () => {
    answer.hidden = false;
    try {
      const reply = await fetch(`.${path}`, { method, body: body?.value });
      const text = await reply.text();
      let shown = text;
      try { shown = pretty(JSON.parse(text)); } catch { /* not JSON: as it is */ }
      answer.textContent = `${reply.status} ${reply.statusText}\n${shown}`;
    } catch (error) {
      answer.textContent = String(error);
    }
  };
  return element("div", {}, ...(body ? [body] : []), send, answer);
}

function schemas(operation, api) {
  const content = [operation.requestBody?.content, operation.responses?.["200"]?.content];
  const names = content.map((c) => c?.["application/json"]?.schema?.$ref?.split("/").at(-1));
  return [["request", names[0]], ["answer", names[1]]]
    .filter(([, name]) => name)
    .map(([role, name]) =>
      element("details", {}, element("summary", { textContent: `${role}: ${name}` }), element("pre", { textContent: pretty(api.components.schemas[name]) })),
    );
}

function section(path, method, operation, api) {
  const example = operation.requestBody?.content?.["application/json"]?.example;
  const filled = (operation.parameters ?? []).reduce(
    (all, { name, schema }) => all.replace(`{${name}}`, encodeURIComponent(schema.examples?.[0] ?? name)), path);
  const errors = Object.entries(operation.responses ?? {}).filter(([status]) => status !== "200");
  return element(
    "section", {},
    element("h2", {}, element("span", { className: "method", textContent: method.toUpperCase() }), element("code", { textContent: path })),
    element("p", { textContent: operation.description ?? operation.summary ?? "" }),
    ...schemas(operation, api),
    element("table", {}, ...errors.map(([status, { description }]) => element("tr", {}, element("td", { textContent: status }), element("td", { textContent: description })))),
    form(filled, method.toUpperCase(), example),
  );
}

try {
  const reply = await fetch("openapi.json");
  if (!reply.ok) throw new Error(`/openapi.json: ${reply.status}`);
  const described = await reply.json();
  document.getElementById("about").textContent = described.info.description;
  for (const [path, operations] of Object.entries(described.paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      document.getElementById("paths").append(section(path, method, operation, described));
    }
  }
} catch (error) {
  document.getElementById("state").textContent = `the document can't be read: ${error.message}`;
}
