// A bundle without Python: node cascade.mjs bundle rows.json [operating point]. Needs `npm install onnxruntime-node`.
// rows.json has the model's inputs by name: {"x": {"dims": [2, 8, 8], "data": [0, 0, 5, …]}}, row after row.
import { existsSync, readFileSync } from "node:fs";

const fail = (why) => {
  throw new Error(why);
};
const reading = (what, how) => {
  try {
    return how();
  } catch (error) {
    return fail(`${what} (${error.code ?? error.message}).`);
  }
};
const read = (name) => {
  const text = reading(`${name}: can't be read`, () => readFileSync(name, "utf8"));
  return reading(`${name}: not JSON`, () => JSON.parse(text)) ?? fail(`${name}: expected an object, found null.`);
};
const bar = (t) => {
  const up = new Float32Array([Number(String(t).replace("inf", "Infinity"))]); // +inf: this exit is closed
  if (up[0] < t) new Int32Array(up.buffer)[0] += up[0] < 0 ? -1 : 1; // rounded up: no score crosses a rounded threshold
  return up[0];
};

function thresholds(bundle, { gates, exits }, point) {
  const bars = new Float32Array(gates - 1).fill(Infinity); // `full`, which is there without a calibration, too
  const file = `${bundle}/calibration.json`;
  const points = existsSync(file) ? read(file).operating_points : { full: { thresholds: exits.map(() => "inf") } };
  const chosen = Object.hasOwn(points, point) ? points[point] : fail(`operating point is "${point}", expected one of ${Object.keys(points).join(", ")}.`);
  exits.slice(0, -1).forEach((gate, j) => (bars[gate] = bar(chosen.thresholds[j])));
  return bars;
}

function tensor(ort, file, { name, dtype, shape }, rows) {
  const { dims, data } = rows[name] ?? {};
  const fits = Array.isArray(dims) && dims.length === shape.length && shape.every((size, i) => typeof size === "string" || size === dims[i]);
  if (!fits || !Array.isArray(data) || !data.every(Number.isFinite))
    fail(`${file}: "${name}" is missing or has another form, expected {"${name}": {"dims": ${JSON.stringify(shape)}, "data": [numbers]}}.`);
  return reading(`${file}: "${name}" is no ${dtype} of its dims`, () => new ort.Tensor(dtype, data, dims));
}

async function main([bundle, file, point = "full"]) {
  if (!bundle || !file) fail("usage: node cascade.mjs bundle rows.json [operating point]");
  const { cascade, inputs, classes } = read(`${bundle}/manifest.json`);
  if (!cascade) fail(`${bundle}/manifest.json: names no cascade graph, expected a bundle that a current offramp exported.`);
  const bars = thresholds(bundle, cascade, point);
  const rows = read(file);
  const { default: ort } = await import("onnxruntime-node").catch(() => fail("onnxruntime-node isn't there: npm install onnxruntime-node."));
  const feeds = { thresholds: new ort.Tensor("float32", bars, [1, bars.length]) }; // one row for all
  for (const input of inputs) feeds[input.name] = tensor(ort, file, input, rows);
  const session = await ort.InferenceSession.create(`${bundle}/${cascade.file}`, { logSeverityLevel: 4 });
  const { label, score, exit } = await session.run(feeds, ["label", "score", "exit"]); // one entry a row, in their order
  for (const [k, number] of label.data.entries())
    console.log(JSON.stringify({ class: classes[Number(number)], score: score.data[k], exit: cascade.exits.indexOf(exit.data[k]) }));
}

main(process.argv.slice(2)).catch((error) => {
  console.error(String(error.message).split("\n")[0]);
  process.exitCode = 2;
});
