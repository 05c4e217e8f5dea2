// One text through the network, exit by exit. All of it is asked of /v1/predict, as any client could.

const TURNS = 5;
const byId = (id) => document.getElementById(id);
const percent = (share) => (share === null ? "no number" : `${(100 * share).toFixed(1)}%`);

async function json(path, options) {
  const reply = await fetch(path, { cache: "no-store", ...options });
  const body = await reply.json().catch(() => ({}));
  if (!reply.ok) throw new Error(body.error ?? `${path}: ${reply.status}`);
  return body;
}

/** The answer to one text, and the milliseconds until it was here. */
async function predict(text, point, exit) {
  const asked = { instances: [text], operating_point: point };
  if (exit !== undefined) asked.max_exit = exit;
  const started = performance.now();
  const { predictions } = await json("v1/predict", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(asked),
  });
  return { ...predictions[0], took: performance.now() - started };
}

const median = (values) => values.sort((a, b) => a - b)[Math.floor(values.length / 2)];
const name = (answer) => (answer.class ?? "no number").replaceAll("_", " ");

function line(exit, fill, said, kind) {
  const item = document.createElement("li");
  item.className = kind;
  item.innerHTML = '<span class="name"></span><div class="track"><div class="fill"></div></div><span class="share"></span>';
  item.querySelector(".name").textContent = exit;
  item.querySelector(".fill").style.width = `${100 * fill}%`;
  item.querySelector(".share").textContent = said;
  return item;
}

let latest = 0;
async function ask(text, point) {
  const mine = ++latest;
  const state = byId("state");
  state.className = "";
  state.textContent = "asking …";
  try {
    const answer = await predict(text, point);
    const open = about.operating_points[point].thresholds.map((bar, j) => bar !== "inf" || j === about.exits.length - 1);
    const steps = [];
    for (let j = 0; j < about.exits.length; j++) {
      if (j > answer.exit) steps.push(line(about.exits[j], 0, "not run", "left"));
      else if (!open[j]) steps.push(line(about.exits[j], 0, "isn't asked at this point", "left"));
      else {
        const here = j === answer.exit ? answer : await predict(text, point, j);
        const said = `${name(here)} · ${percent(here.confidence)} · ${j === answer.exit ? "leaves here" : "goes on"}`;
        steps.push(line(about.exits[j], here.confidence ?? 0, said, j === answer.exit ? "here" : ""));
      }
    }
    const took = [], whole = [];
    let full;
    for (let k = 0; k < TURNS; k++) {
      took.push((await predict(text, point)).took);
      full = await predict(text, "full");
      whole.push(full.took);
    }
    if (mine !== latest) return;
    byId("answer").textContent = name(answer);
    byId("abstained").textContent = answer.abstain
      ? `Abstains: at ${percent(answer.confidence)} it isn't sure enough to be relied on.`
      : `Answered, ${percent(answer.confidence)} sure.`;
    byId("abstained").className = answer.abstain ? "bad" : "";
    byId("steps").replaceChildren(...steps);
    byId("flops").textContent = percent(answer.flops / full.flops);
    byId("took").textContent = `${median(took).toFixed(1)} ms`;
    byId("whole").textContent = `${median(whole).toFixed(1)} ms`;
    byId("result").hidden = false;
    state.textContent = "";
  } catch (error) {
    if (mine !== latest) return;
    state.className = "bad";
    state.textContent = error.message;
    byId("result").hidden = true;
  }
}

const about = await json("v1/operating-points");
byId("model").textContent = `${about.model} ${about.version}`;
byId("point").replaceChildren(
  ...Object.keys(about.operating_points).map((point) => new Option(point, point, false, point === about.operating_point)),
);
byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("row").value || byId("row").placeholder;
  byId("row").value = text;
  ask(text, byId("point").value);
});
byId("point").addEventListener("change", () => byId("form").requestSubmit());

// A link may bring the text along: /try?text=…&point=…
const brought = new URLSearchParams(location.search);
if (about.operating_points[brought.get("point")]) byId("point").value = brought.get("point");
if (brought.get("text")) {
  byId("row").value = brought.get("text");
  ask(brought.get("text"), byId("point").value);
}
