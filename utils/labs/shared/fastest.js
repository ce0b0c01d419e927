// Times of all-reduces against the bytes of the tensor, and which of them is the fastest.
const { svg, html, colors } = ddl;
const [LEFT, TOP, HEIGHT, STRIP] = [62, 8, 250, 26];
const DASHES = ["", "9 4", "2 4", "9 4 2 4", "16 4", "5 3"];
const [smallest, largest, nbytes] = data.bytes;
const count = (number) => String(Math.round(number));
let width = 0;

const slider = (label, [min, max, value], more) =>
  ddl.slider({ label, min, max, value, log: true, step: "any", ...more }, draw);
const p = slider("Ranks p", data.ranks, { log: false, step: 1, format: count });
const alpha = slider("Latency α", data.alpha, { format: ddl.seconds });
const rate = (number) => `${ddl.bytes(number)}/s`;
const bandwidth = slider("Bandwidth 1/β", data.bandwidth, { format: rate });
const tensor = slider("Tensor", data.bytes, { format: ddl.bytes });
const groups = Object.keys(data.groups);
const links = ddl.choice({ label: "Links", options: groups, value: groups[0] }, draw);
const drawing = svg("svg", { role: "img" });
const ranking = html("ol", { style: "margin: 4px 0 4px 1.6em; padding: 0" });
const status = ddl.status();
root.append(ddl.controls(p, tensor), ddl.controls(alpha, bandwidth));
if (groups.length > 1) root.append(ddl.controls(links));
root.append(drawing, status, ranking);
ddl.onWidth((pixels) => {
  width = pixels;
  draw();
});

// Return the algorithms that run on so many ranks, each with its line: a + n · b seconds.
function linesNow() {
  return data.algorithms
    .map(({ name, color, costs }, k) => ({ name, color, dash: DASHES[k], cost: costs[p.read() - data.ranks[0]] }))
    .filter(({ name, cost }) => cost && data.groups[links.read()].includes(name))
    .map((line) => ({ ...line, a: line.cost[0] * alpha.read(), b: line.cost[1] / bandwidth.read() }));
}

// Return the fastest algorithms in order of size, each with its smallest number of bytes.
function fastest(lines) {
  const first = (one, other) => one.from - other.from || one.line.a - other.line.a || one.line.b - other.line.b;
  const best = [lines.map((line) => ({ line, from: 0 })).sort(first)[0]];
  for (;;) {
    const { a, b } = best.at(-1).line;
    const flatter = lines.filter((line) => line.b < b);
    if (flatter.length === 0) return best;
    const meetings = flatter.map((line) => ({ line, from: (line.a - a) / (b - line.b) }));
    best.push(meetings.sort((one, other) => one.from - other.from || one.line.b - other.line.b)[0]);
  }
}

function draw() {
  if (width === 0) return;
  const lines = linesNow();
  const times = lines.flatMap(({ a, b }) => [a + smallest * b, a + largest * b]);
  const low = Math.floor(Math.log10(Math.min(...times)));
  const high = Math.ceil(Math.log10(Math.max(...times)));
  const across = Math.log10(largest / smallest);
  const x = (n) => LEFT + ((width - LEFT - 8) * Math.log10(n / smallest)) / across;
  const y = (time) => TOP + (HEIGHT * (high - Math.log10(time))) / (high - low);
  const height = TOP + HEIGHT + STRIP + 38;
  for (const [key, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` }))
    drawing.setAttribute(key, value);
  drawing.replaceChildren(...axes(x, y, low, high));
  for (const { name, color, dash, a, b } of lines) {
    const points = Array.from({ length: 61 }, (_, k) => smallest * 10 ** ((across * k) / 60));
    const path = points.map((n) => `${x(n).toFixed(1)},${y(a + n * b).toFixed(1)}`).join(" ");
    const look = { fill: "none", stroke: color, "stroke-width": 2.5, "stroke-dasharray": dash };
    drawing.append(svg("polyline", { points: path, ...look }, svg("title", {}, name)));
  }
  const best = fastest(lines);
  drawing.append(...strip(best, x), cursor(x));
  tell(best);
  rank(lines);
}

function axes(x, y, low, high) {
  const grid = [];
  for (let k = low; k <= high; k += 1) {
    const at = y(10 ** k);
    const look = { y1: at, y2: at, stroke: colors.pale };
    grid.push(svg("line", { x1: LEFT, x2: x(largest), ...look }));
    const words = ddl.seconds(10 ** k);
    grid.push(svg("text", { x: LEFT - 6, y: at + 4, "text-anchor": "end" }, words));
  }
  for (let n = smallest; n <= largest; n *= 1000) {
    const look = { y1: TOP, y2: TOP + HEIGHT, stroke: colors.pale };
    grid.push(svg("line", { x1: x(n), x2: x(n), ...look }));
    const anchor = n === smallest ? "start" : n === largest ? "end" : "middle";
    const place = { x: x(n), y: TOP + HEIGHT + STRIP + 18, "text-anchor": anchor };
    grid.push(svg("text", place, ddl.bytes(n)));
  }
  const label = { x: (LEFT + x(largest)) / 2, y: TOP + HEIGHT + STRIP + 34, "text-anchor": "middle" };
  grid.push(svg("text", label, "bytes of the tensor (the strip names the fastest algorithm)"));
  return grid;
}

// Draw a strip below the axes that names the fastest, and a line at each crossover.
function strip(best, x) {
  const inside = (n) => x(Math.min(Math.max(n, smallest), largest));
  return best.flatMap(({ line, from }, k) => {
    const [begin, end] = [inside(from), inside(best[k + 1]?.from ?? largest)];
    const y = TOP + HEIGHT + 3;
    const bar = svg("rect", { x: begin, y, width: end - begin, height: STRIP - 6, fill: line.color });
    const ground = { fill: colors.paper, height: STRIP - 10, y: y + 2 };
    const [length, middle] = [7 * line.name.length + 4, (begin + end) / 2];
    const named = [
      svg("rect", { ...ground, x: middle - length / 2, width: length }),
      svg("text", { x: middle, y: y + 14, "text-anchor": "middle" }, line.name),
    ];
    const meets = k > 0 && from >= smallest && from <= largest;
    const look = { x1: begin, x2: begin, y1: TOP, y2: y + STRIP - 6, stroke: colors.ink };
    const crossing = meets ? [svg("line", { ...look, "stroke-dasharray": "2 3" })] : [];
    return [bar, ...(end - begin > length ? named : []), ...crossing];
  });
}

function cursor(x) {
  const at = { x1: x(tensor.read()), x2: x(tensor.read()), y1: TOP, y2: TOP + HEIGHT };
  return svg("line", { ...at, stroke: colors.soft, "stroke-width": 6, opacity: 0.25 });
}

function tell(best) {
  const shown = best.filter((each, k) => each.from <= largest && (best[k + 1]?.from ?? largest) > smallest);
  const spans = shown.map(({ line }, k) =>
    k + 1 < shown.length ? `${line.name} up to ${ddl.bytes(shown[k + 1].from)}` : line.name,
  );
  const words = `On ${p.read()} ranks the fastest is ${spans.join(", then ")}.`;
  status.say(words);
  drawing.setAttribute("aria-label", words);
}

// List the times of the chosen tensor, the fastest first.
function rank(lines) {
  const timed = lines.map((line) => ({ ...line, time: line.a + tensor.read() * line.b }));
  timed.sort((one, other) => one.time - other.time);
  const dash = ({ color, dash: stroke }) =>
    svg(
      ...["svg", { width: 40, height: 8, style: "display: inline; margin-right: 6px" }],
      svg("line", { x2: 40, y1: 4, y2: 4, stroke: color, "stroke-width": 3, "stroke-dasharray": stroke }),
    );
  const rows = timed.map((line) => html("li", {}, dash(line), `${line.name}: ${ddl.seconds(line.time)}`));
  const missing = data.groups[links.read()].filter((name) => !lines.some((line) => line.name === name));
  const rest = missing.map((name) => html("li", {}, `${name}: not on ${p.read()} ranks`));
  ranking.replaceChildren(...rows, ...rest);
}
