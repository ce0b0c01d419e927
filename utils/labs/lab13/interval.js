// What checkpoints and failures cost, against the interval. The formulas are those of faults.py.
const { svg, colors } = ddl;
const [LEFT, TOP, HEIGHT, FOOT] = [52, 26, 240, 36];
const [shortest, longest, chosen] = data.interval;
const UNITS = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1], ["ms", 1e-3]];
const TICKS = [1, 60, 3600, 86400, 864000];
const TOPS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100];
let width = 0;

// Return a time in the largest unit that fits.
function time(seconds) {
  const [unit, one] = UNITS.find(([, one]) => seconds >= 0.9995 * one) ?? UNITS.at(-1);
  return `${ddl.short(seconds / one)} ${unit}`;
}

const slider = (label, [min, max, value]) =>
  ddl.slider({ label, min, max, value, log: true, step: "any", format: time }, draw);
const mtbf = slider("MTBF", data.mtbf);
const save = slider("Time of a save", data.save);
const restart = slider("Time of a restart", data.restart);
const mine = slider("Your interval", data.interval);
const drawing = svg("svg", { role: "img" });
const status = ddl.status();
root.append(ddl.controls(mtbf, save), ddl.controls(restart, mine), drawing, status);
ddl.onWidth((pixels) => {
  width = pixels;
  draw();
});

// Return the expected seconds for each second of work, less 1 (Daly 2006, equation 13).
function overhead(interval) {
  const [M, R] = [mtbf.read(), restart.read()];
  return (Math.exp(R / M) * M * Math.expm1((interval + save.read()) / M)) / interval - 1;
}

function young() {
  return Math.sqrt(2 * save.read() * mtbf.read());
}

// Return Daly's interval (2006, equation 37).
function daly() {
  const M = mtbf.read();
  if (save.read() >= 2 * M) return M;
  const share = save.read() / (2 * M);
  return young() * (1 + Math.sqrt(share) / 3 + share / 9) - save.read();
}

function draw() {
  if (width === 0) return;
  const best = daly();
  const top = TOPS.find((one) => one >= 3 * overhead(best)) ?? 4 * overhead(best);
  const across = Math.log(longest / shortest);
  const x = (seconds) => LEFT + ((width - LEFT - 12) * Math.log(seconds / shortest)) / across;
  const y = (share) => TOP + HEIGHT * (1 - share / top);
  const height = TOP + HEIGHT + FOOT;
  for (const [key, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` }))
    drawing.setAttribute(key, value);
  const grid = Array.from({ length: 241 }, (_, k) => shortest * Math.exp((across * k) / 240));
  const points = grid.filter((seconds) => overhead(seconds) <= top);
  const path = points.map((seconds) => `${x(seconds).toFixed(1)},${y(overhead(seconds)).toFixed(1)}`);
  drawing.replaceChildren(
    ...axes(x, y, top),
    svg("polyline", { points: path.join(" "), fill: "none", stroke: colors.ink, "stroke-width": 2 }),
    ...mark(x(young()), "#009E73", "7 4", "Young", "start"),
    ...mark(x(best), "#CC79A7", "2 3", "Daly", "end"),
    ...dot(x, y, top),
  );
  tell(best);
}

function axes(x, y, top) {
  const rows = [0, 0.25, 0.5, 0.75, 1].map((share) => share * top);
  const lines = rows.map((share) => ({ x1: LEFT, x2: x(longest), y1: y(share), y2: y(share) }));
  const columns = TICKS.map((seconds) => ({ x1: x(seconds), x2: x(seconds), y1: TOP, y2: TOP + HEIGHT }));
  const below = { y: TOP + HEIGHT + 16, "text-anchor": "middle" };
  return [
    ...[...lines, ...columns].map((ends) => svg("line", { ...ends, stroke: colors.pale })),
    ...rows.map((share) =>
      svg("text", { x: LEFT - 6, y: y(share) + 4, "text-anchor": "end" }, `${ddl.short(100 * share)} %`),
    ),
    ...TICKS.map((seconds) => svg("text", { ...below, x: x(seconds) }, time(seconds))),
    svg("text", { ...below, x: (LEFT + width) / 2, y: TOP + HEIGHT + 32 }, "work between two checkpoints"),
    svg("text", { x: 0, y: 12 }, "overhead (share of the work)"),
  ];
}

function mark(at, color, dashes, name, anchor) {
  const look = { stroke: color, "stroke-width": 2.5, "stroke-dasharray": dashes };
  const beside = anchor === "end" ? at - 5 : at + 5;
  return [
    svg("line", { x1: at, x2: at, y1: TOP, y2: TOP + HEIGHT, ...look }),
    svg("text", { x: beside, y: TOP + 12, "text-anchor": anchor }, name),
  ];
}

// Draw the chosen interval; at the upper edge if its overhead is above it.
function dot(x, y, top) {
  const share = Math.min(overhead(mine.read()), top);
  const place = { cx: x(mine.read()), cy: y(share), r: 7 };
  return [
    svg("circle", { ...place, fill: "none", stroke: colors.exposed, "stroke-width": 3 }),
    svg("text", { x: place.cx + 12, y: place.cy + 16 }, "yours"),
  ];
}

function tell(best) {
  const percent = (seconds) => {
    const share = 100 * overhead(seconds);
    return share < 10000 ? `${ddl.short(share)} %` : "more than 10000 %";
  };
  const words =
    `Young: every ${time(young())}, ${percent(young())} overhead. Daly: every ${time(best)}, ` +
    `${percent(best)}. Yours: every ${time(mine.read())}, ${percent(mine.read())}.`;
  status.say(words);
  drawing.setAttribute("aria-label", words);
}
