// A bundle without Python: node cascade.mjs bundle rows.json [operating point]. Needs `npm install onnxruntime-node`.
import { readFileSync } from "node:fs";
import ort from "onnxruntime-node";

const [bundle, file, point = "full"] = process.argv.slice(2);
const read = (name) => JSON.parse(readFileSync(name, "utf8"));
const { cascade, inputs, classes } = read(`${bundle}/manifest.json`);
const bar = (t) => {
  const up = new Float32Array([Number(String(t).replace("inf", "Infinity"))]); // +inf: this exit is closed
  if (up[0] < t) new Int32Array(up.buffer)[0] += up[0] < 0 ? -1 : 1; // rounded up: no score crosses a rounded threshold
  return up[0];
};
const bars = new Float32Array(cascade.gates - 1).fill(Infinity);
const { thresholds } = read(`${bundle}/calibration.json`).operating_points[point];
cascade.exits.slice(0, -1).forEach((gate, j) => (bars[gate] = bar(thresholds[j])));

const session = await ort.InferenceSession.create(`${bundle}/${cascade.file}`);
const rows = read(file); // {"input's name": {"dims": [rows, …], "data": [numbers, …]}, …}
const feeds = { thresholds: new ort.Tensor("float32", bars, [1, bars.length]) }; // one row for all
for (const { name, dtype } of inputs) feeds[name] = new ort.Tensor(dtype, rows[name].data, rows[name].dims);
const { label, score, exit } = await session.run(feeds, ["label", "score", "exit"]); // one entry a row, in their order
for (const [k, number] of label.data.entries())
  console.log(JSON.stringify({ class: classes[Number(number)], score: score.data[k], exit: cascade.exits.indexOf(exit.data[k]) }));
