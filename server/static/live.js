// What /metrics says, drawn. Everything is read from this server.

const EVERY = 1000, KEPT = 120;
const byId = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en");
const percent = (share) => (Number.isFinite(share) ? `${(100 * share).toFixed(1)}%` : "–");
const seconds = (s) => (!Number.isFinite(s) ? "–" : s < 1 ? `${(1000 * s).toPrecision(3)} ms` : `${s.toPrecision(3)} s`);

/** Samples of Prometheus' text format: {name: [{labels, value}, …]}. */
function parse(text) {
  const samples = {};
  for (const line of text.split("\n")) {
    const match = /^(\w+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[name] = value;
    const value = { "+Inf": Infinity, "-Inf": -Infinity }[match[3]] ?? Number(match[3]);
    (samples[match[1]] ??= []).push({ labels, value });
  }
  return samples;
}

/** The sum of a metric's series, of one operating point or of all. */
const total = (samples, name, point) =>
  (samples[name] ?? []).filter((s) => point === undefined || s.labels.operating_point === point).reduce((sum, s) => sum + s.value, 0);

/** A quantile of a histogram, linear within its bucket. */
function quantile(samples, name, q) {
  const buckets = (samples[`${name}_bucket`] ?? []).map((s) => [s.labels.le === "+Inf" ? Infinity : Number(s.labels.le), s.value]);
  buckets.sort((a, b) => a[0] - b[0]);
  const count = buckets.at(-1)?.[1] ?? 0;
  let [below, seen] = [0, 0];
  for (const [edge, until] of buckets) {
    if (until >= q * count && until > seen) {
      return edge === Infinity ? below : below + ((edge - below) * (q * count - seen)) / (until - seen);
    }
    [below, seen] = [edge, until];
  }
  return NaN;
}

const of = (samples, point) => {
  const rows = total(samples, "offramp_rows_total", point);
  return {
    rows,
    saved: 1 - total(samples, "offramp_flops_total", point) / total(samples, "offramp_flops_full_total", point),
    abstained: total(samples, "offramp_abstentions_total", point) / rows,
  };
};

/** A line for each point that was asked for: what one saves says nothing about another. */
function drawPoints(samples, names) {
  const asked = names.map((name) => [name, of(samples, name)]).filter(([, found]) => found.rows);
  byId("points").hidden = asked.length < 2;
  byId("by-point").replaceChildren(
    ...asked.map(([name, found]) => {
      const line = document.createElement("tr");
      for (const text of [name, whole.format(found.rows), percent(found.saved), percent(found.abstained)]) {
        line.append(Object.assign(document.createElement("td"), { textContent: text }));
      }
      return line;
    }),
  );
}

function drawExits(samples, names, rows, point) {
  const list = byId("exits");
  names.forEach((name, j) => {
    const left = (samples.offramp_exits_total ?? []).find((s) => s.labels.exit === String(j) && s.labels.operating_point === point)?.value ?? 0;
    let item = list.children[j];
    if (!item) {
      item = document.createElement("li");
      item.innerHTML = '<span class="name"></span><div class="track"><div class="fill"></div></div><span class="share"></span>';
      list.append(item);
      const deep = names.length > 1 ? j / (names.length - 1) : 0;
      item.querySelector(".fill").style.background = `color-mix(in oklab, hsl(var(--last)) ${100 * deep}%, hsl(var(--first)))`;
      item.querySelector(".name").textContent = name;
      item.querySelector(".name").title = name;
    }
    item.querySelector(".fill").style.width = rows ? `${(100 * left) / rows}%` : "0";
    item.querySelector(".share").textContent = rows ? `${percent(left / rows)} · ${whole.format(left)}` : "–";
  });
  byId("no-rows").hidden = rows > 0;
}

const one = (samples, name, point) => (samples[name] ?? []).find((s) => s.labels.operating_point === point)?.value;

/** What labels show, where the server keeps rows: a bar for the risk, a tick for its limit, a line for the promise. */
function drawRisk(samples, names) {
  const known = names.filter((name) => one(samples, "offramp_labelled_rows", name) > 0);
  byId("risk").hidden = !samples.offramp_calibration_version;
  byId("by-risk").replaceChildren(
    ...known.map((name) => {
      const [rows, coverage, risk, most, promised] = ["labelled_rows", "coverage", "selective_risk", "selective_risk_bound", "promised_risk"].map(
        (metric) => one(samples, `offramp_${metric}`, name),
      );
      const scale = 1.25 * Math.max(...[risk, most, promised].filter(Number.isFinite), 0.01);
      const line = document.createElement("tr");
      const drawn = document.createElement("td");
      drawn.innerHTML = '<div class="track"><div class="fill"></div><div class="limit"></div><div class="promise"></div></div>';
      drawn.firstElementChild.ariaLabel = `risk ${percent(risk)}, promised ${percent(promised)}`;
      drawn.querySelector(".fill").style.width = Number.isFinite(risk) ? `${(100 * risk) / scale}%` : "0";
      for (const [mark, value] of [["limit", most], ["promise", promised]]) {
        const place = drawn.querySelector(`.${mark}`);
        place.hidden = !Number.isFinite(value);
        place.style.left = `${(100 * value) / scale}%`;
      }
      const cells = [name, whole.format(rows), percent(coverage), drawn, percent(risk), percent(most), percent(promised)];
      line.append(...cells.map((cell) => (cell === drawn ? drawn : Object.assign(document.createElement("td"), { textContent: cell }))));
      line.className = risk > promised ? "bad" : "";
      return line;
    }),
  );
  const version = samples.offramp_calibration_version?.[0]?.value;
  byId("calibration").textContent = version === 0 ? "the bundle’s own" : `version ${version}, made online`;
  const drifted = (samples.offramp_drift_alarm ?? []).filter((s) => s.value).map((s) => `${s.labels.of} at ${s.labels.operating_point}`);
  byId("drift").textContent = drifted.length ? `drift: ${drifted.join(", ")}` : "no drift seen";
  byId("drift").className = drifted.length ? "bad" : "";
}

function drawRequests(samples) {
  byId("requests").replaceChildren(
    ...(samples.offramp_requests_total ?? [])
      .filter((s) => s.value || s.labels.outcome === "ok")
      .map((s) => {
        const item = document.createElement("li");
        item.textContent = `${s.labels.outcome.replace("_", " ")}: ${whole.format(s.value)}`;
        if (s.labels.outcome === "error") item.className = "bad";
        return item;
      }),
  );
}

const history = [];
function drawSpeed(rows, now) {
  const before = history.at(-1);
  const rate = before && rows >= before.rows ? (1000 * (rows - before.rows)) / (now - before.now) : 0;
  history.push({ rows, now, rate });
  if (history.length > KEPT) history.shift();
  const top = Math.max(...history.map((h) => h.rate), 1);
  const points = history.map((h, k) => `${KEPT - history.length + k},${29 - (28 * h.rate) / top}`);
  byId("speed").firstElementChild.setAttribute("points", points.join(" "));
  byId("rate").textContent = whole.format(Math.round(rate));
}

async function get(path) {
  const reply = await fetch(path, { cache: "no-store" });
  if (!reply.ok) throw new Error(`${path}: ${reply.status}`);
  return reply;
}

let about;
async function draw() {
  about ??= await (await get("v1/operating-points")).json();
  const samples = parse(await (await get("metrics")).text());
  const others = Object.keys(about.operating_points).filter((name) => name !== about.operating_point);
  byId("model").textContent = `${about.model} ${about.version}`;
  byId("point").textContent = `operating point ${about.operating_point}` + (others.length ? `, also ${others.join(", ")}` : "");
  const rows = total(samples, "offramp_rows_total");
  const here = of(samples, about.operating_point);
  byId("saved").textContent = percent(here.saved);
  byId("abstained").textContent = percent(here.abstained);
  for (const place of document.querySelectorAll(".at")) place.textContent = `at ${about.operating_point}`;
  byId("median").textContent = seconds(quantile(samples, "offramp_request_duration_seconds", 0.5));
  byId("slowest").textContent = seconds(quantile(samples, "offramp_request_duration_seconds", 0.95));
  byId("rows").textContent = whole.format(rows);
  byId("waiting").textContent = whole.format(total(samples, "offramp_queue_rows"));
  drawExits(samples, about.exits, here.rows, about.operating_point);
  drawPoints(samples, [about.operating_point, ...others]);
  drawRisk(samples, [about.operating_point, ...others]);
  drawRequests(samples);
  drawSpeed(rows, performance.now());
}

for (;;) {
  const state = byId("state");
  try {
    await draw();
    state.textContent = "live, since the server's start";
    state.className = "";
  } catch (error) {
    state.textContent = `no answer from the server (${error.message}); trying again`;
    state.className = "bad";
    about = undefined;
  }
  await new Promise((done) => setTimeout(done, EVERY));
}
