// Efficiency against the ranks on three machines, and what a step consists of.
const { svg, colors } = ddl;
const [LEFT, TOP, HEIGHT, BAR] = [46, 22, 210, 34];
const DASHES = ["", "9 5", "9 4 2 4"];
const last = data.ranks.length - 1;
const names = data.machines.map(([name]) => name);
const count = (number) => Math.round(number).toLocaleString("en");
let width = 0;

// Return a slider that moves over the entries of a list; `node.chosen()` is the chosen one.
function over(label, list, first, format) {
  const words = (k) => format(list[Math.round(k)]);
  const range = { min: 0, max: list.length - 1, step: 1, value: list.indexOf(first) };
  const node = ddl.slider({ label, ...range, format: words }, draw);
  return Object.assign(node, { chosen: () => list[Math.round(node.read())] });
}

const machine = ddl.choice({ label: "Machine", options: names, value: names[1] }, change);
const ranks = over("Ranks", data.ranks, 1024, count);
const spine = over("Oversubscription", data.spines, usual(names[1]), (factor) => `${factor}:1`);
const size = over("Weights and speed", data.sizes, data.size, (times) => `${count(times)} ×`);
const slow = ddl.choice({ label: "Slow steps", options: ["left out", "as recorded"] }, draw);
const drawing = svg("svg", { role: "img" });
const status = ddl.status();
root.append(ddl.controls(machine), ddl.controls(ranks, spine), ddl.controls(size, slow));
root.append(drawing, status);
ddl.onWidth((pixels) => {
  width = pixels;
  draw();
});

// Return the usual oversubscription of a machine.
function usual(name) {
  return data.machines.find(([other]) => other === name)[2];
}

// Begin with the usual oversubscription of another machine.
function change(name) {
  spine.set(data.spines.indexOf(usual(name)));
  draw();
}

function narrow() {
  return width < 600;
}

// Return the parts of a step on the k-th number of ranks: seconds, a reason and an algorithm.
function parts(name, factor, k) {
  const [communicating, reason, algorithm] = data.points[`${name}/${factor}/${size.chosen()}`][k];
  const more = slow.read() === "as recorded" ? data.straggling[k] : 0;
  const seconds = data.step[k] + more + communicating;
  const waiting = Math.max(0, data.step[k] + more - data.computing[k]);
  const computing = seconds - communicating - waiting;
  const words = [data.reasons[reason], data.algorithms[algorithm]];
  return { seconds, computing, waiting, communicating, efficiency: data.step[0] / seconds, words };
}

function draw() {
  if (width === 0) return;
  const x = (k) => LEFT + ((width - LEFT - 24) * k) / last;
  const y = (efficiency) => TOP + HEIGHT * (1 - Math.min(efficiency, 1));
  const height = TOP + HEIGHT + 62 + BAR + (narrow() ? 54 : 22);
  for (const [key, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` }))
    drawing.setAttribute(key, value);
  const k = data.ranks.indexOf(ranks.chosen());
  drawing.replaceChildren(...axes(x, y));
  data.machines.forEach((one, place) => drawing.append(...curve(one, place, x, y)));
  const now = parts(machine.read(), spine.chosen(), k);
  const at = { cx: x(k), cy: y(now.efficiency), r: 7, fill: "none" };
  drawing.append(svg("circle", { ...at, stroke: colors.ink, "stroke-width": 3 }));
  drawing.append(...bar(now, TOP + HEIGHT + 62));
  tell(now, k);
}

function axes(x, y) {
  const every = narrow() ? 3 : 1;
  const rows = [0, 0.25, 0.5, 0.75, 1].flatMap((share) => [
    svg("line", { x1: LEFT, x2: x(last), y1: y(share), y2: y(share), stroke: share === 0.5 ? colors.ink : colors.pale }),
    svg("text", { x: LEFT - 6, y: y(share) + 4, "text-anchor": "end" }, `${100 * share} %`),
  ]);
  const below = { y: TOP + HEIGHT + 16, "text-anchor": "middle" };
  const columns = data.ranks.flatMap((p, k) => (k % every ? [] : [svg("text", { ...below, x: x(k) }, count(p))]));
  const label = svg("text", { ...below, y: below.y + 16, x: (LEFT + width) / 2 }, "ranks");
  return [...rows, ...columns, label, svg("text", { x: 0, y: 12 }, "efficiency")];
}

// Draw a machine's line; the chosen one is bold and has the band of the expected error.
function curve([name, color, before], place, x, y) {
  const mine = name === machine.read();
  const factor = mine ? spine.chosen() : before;
  const values = data.ranks.map((_, k) => parts(name, factor, k).efficiency);
  const path = (list) => list.map((value, k) => `${x(k).toFixed(1)},${y(value).toFixed(1)}`);
  const high = path(values.map((value, k) => value * (1 + data.errors[k])));
  const low = path(values.map((value, k) => value / (1 + data.errors[k])));
  const band = svg("polygon", { points: [...high, ...low.reverse()].join(" "), fill: color, opacity: 0.18 });
  const look = { fill: "none", stroke: color, "stroke-width": mine ? 3.5 : 1.5, "stroke-dasharray": DASHES[place] };
  const line = svg("polyline", { points: path(values).join(" "), ...look }, svg("title", {}, name));
  const k = Math.round(0.4 * last);
  const halo = { stroke: colors.paper, "stroke-width": 4, "paint-order": "stroke" };
  const label = { ...halo, x: x(k), y: y(values[k]) - 8, "text-anchor": "middle" };
  const named = svg("text", label, factor > 1 ? `${name}, ${factor}:1` : name);
  return mine ? [band, line, named] : [line, named];
}

// Draw the parts of the chosen step: gray, hatched, and blue.
function bar(now, top) {
  const hatched = ddl.hatch(drawing, colors.waiting, { ground: colors.paper });
  const looks = { computing: colors.computing, waiting: hatched, communicating: colors.communicating };
  const across = width - LEFT - 24;
  let left = LEFT;
  const boxes = Object.entries(looks).map(([part, fill]) => {
    const long = (across * now[part]) / now.seconds;
    left += long;
    return svg("rect", { x: left - long, y: top, width: long, height: BAR, fill, stroke: colors.ink });
  });
  const places = [["start", LEFT], ["middle", LEFT + across / 2], ["end", LEFT + across]];
  const labels = Object.keys(looks).map((part, k) => {
    const [anchor, at] = narrow() ? ["start", LEFT] : places[k];
    const y = top + BAR + 16 + (narrow() ? 16 * k : 0);
    const words = part === "waiting" ? "waiting for slower ranks" : part;
    return svg("text", { x: at, y, "text-anchor": anchor }, `${words} ${ddl.seconds(now[part])}`);
  });
  return [...boxes, ...labels, svg("text", { x: 0, y: top - 6 }, `a step: ${ddl.seconds(now.seconds)}`)];
}

function tell(now, k) {
  const error = data.errors[k];
  const [low, high] = [now.seconds / (1 + error), now.seconds * (1 + error)].map(ddl.seconds);
  const idle = k === 0 || now.communicating === 0;
  const link =
    now.words[0] === "latencies"
      ? "Latencies take the largest part of communicating"
      : `The largest part of communicating is at ${now.words[0]}`;
  const words =
    `${count(data.ranks[k])} ranks, ${machine.read()}: a step takes ${ddl.seconds(now.seconds)} ` +
    `(expected: ${low} to ${high}, an error of ${Math.round(100 * error)} %), and the efficiency is ` +
    `${Math.round(100 * now.efficiency)} %. ` +
    (idle ? "A single rank communicates nothing." : `${link}, in a ${now.words[1]} all-reduce.`);
  status.say(words);
  drawing.setAttribute("aria-label", words);
}
