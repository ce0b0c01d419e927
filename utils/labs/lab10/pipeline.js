// A pipeline's chart. A chart of `data.schedules` is "rows|bubble|held", see moving_pictures.py.
const { svg, html, colors } = ddl;
const [LEFT, RIGHT, TOP, ROW] = [54, 62, 20, 28];
const names = Object.keys(data.schedules);
const [fewestStages, mostStages, stages] = data.stages;
const [fewest, most, microbatches] = data.microbatches;
let width = 0;

const whole = (count, one) => `${count} ${one}${count === 1 ? "" : "s"}`;
const schedule = ddl.choice({ label: "Schedule", options: names, value: names[0] }, draw);
const p = ddl.slider(
  { label: "Stages", min: fewestStages, max: mostStages, step: 1, value: stages, format: String },
  draw,
);
const m = ddl.slider(
  { label: "Microbatches", min: fewest, max: most, step: 1, value: microbatches, format: String },
  draw,
);
const drawing = svg("svg", { role: "img" });
const status = ddl.status();
const legend = html("div", { class: "ddl-controls" });
root.append(ddl.controls(schedule), ddl.controls(p, m), drawing, legend, status);
ddl.onWidth((pixels) => {
  width = pixels;
  draw();
});

// Write out what repeats: "F3(BB.)2" is "FFFBB.BB.".
function written(row) {
  return row.replace(/(?:\((.+?)\)|(\D))(\d+)/g, (_, unit, one, count) => (unit ?? one).repeat(count));
}

// Return the actions of a row, with the microbatch that each of them works on.
function actionsOf(row, lastFirst, microbatches) {
  const actions = [];
  const begun = {};
  for (let at = 0; at < row.length; at += 1) {
    const kind = row[at];
    if (kind === ".") continue;
    // A backward in one piece takes two units of time.
    const length = kind === "B" ? 2 : 1;
    const count = (begun[kind] = (begun[kind] ?? 0) + 1);
    const microbatch = kind !== "F" && lastFirst ? microbatches - count : count - 1;
    actions.push({ kind, at, length, microbatch });
    at += length - 1;
  }
  return actions;
}

function draw() {
  if (width === 0) return;
  const name = schedule.read();
  const { lastFirst, charts } = data.schedules[name];
  const [rows, bubble, held] = charts[p.read() - fewestStages][m.read() - fewest].split("|");
  const lanes = rows.split(" ").map((row) => actionsOf(written(row), lastFirst, m.read()));
  const length = Math.max(...lanes.map((lane) => lane.at(-1).at + lane.at(-1).length));
  const unit = (width - LEFT - RIGHT) / length;
  const height = TOP + lanes.length * ROW + 20;
  for (const [key, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` }))
    drawing.setAttribute(key, value);
  drawing.replaceChildren();
  const idle = ddl.hatch(drawing, colors.waiting);
  drawing.append(svg("text", { x: width, y: 13, "text-anchor": "end" }, "holds"));
  lanes.forEach((lane, stage) => {
    const y = TOP + stage * ROW;
    const box = { y: y + 2, height: ROW - 4 };
    drawing.append(
      svg("text", { x: 0, y: y + 18 }, `stage ${stage}`),
      svg("rect", { x: LEFT, width: length * unit, fill: idle, ...box }),
      ...lane.map((action) => actionIn(action, stage, unit, box)),
      svg("text", { x: width, y: y + 18, "text-anchor": "end" }, held.split(" ")[stage]),
    );
  });
  const end = { x: LEFT + length * unit, y: height - 4, "text-anchor": "end" };
  drawing.append(svg("text", { x: LEFT, y: height - 4 }, "0"), svg("text", end, `time ${length}`));
  tell(name, bubble, length, held.split(" ").map(Number));
  showKinds(lanes);
}

function actionIn({ kind, at, length, microbatch }, stage, unit, box) {
  const [color, words, ink] = data.kinds[kind];
  const x = LEFT + at * unit;
  const look = { x, width: length * unit, fill: color, stroke: "#222222", "stroke-width": 0.6 };
  const title = `stage ${stage}, ${words}, microbatch ${microbatch}: ${at} to ${at + length}`;
  const middle = { x: x + (length * unit) / 2, y: box.y + 16, "text-anchor": "middle" };
  const roomy = length * unit >= 8 * String(microbatch).length + 2;
  return svg(
    ...["g", {}, svg("title", {}, title), svg("rect", { ...look, ...box })],
    roomy ? svg("text", { ...middle, style: `fill: ${ink}; font-size: 11px` }, microbatch) : null,
  );
}

function tell(name, bubble, length, held) {
  const share = `${(100 * Number(bubble)).toFixed(0)} %`;
  const chosen = `${name}, ${whole(p.read(), "stage")}, ${whole(m.read(), "microbatch")}`.replace("hs", "hes");
  const peak = `stage ${held.indexOf(Math.max(...held))} holds at most ${Math.max(...held)}`;
  const words = `${chosen}: the bubble is ${share} of ${length} units of time, and ${peak}.`;
  status.say(words);
  drawing.setAttribute("aria-label", words);
}

function showKinds(lanes) {
  const there = new Set(lanes.flat().map(({ kind }) => kind));
  const swatch = (fill) => svg("rect", { width: 14, height: 14, fill, stroke: "#222222" });
  const keys = Object.entries(data.kinds).filter(([kind]) => there.has(kind));
  const key = (icon, words) =>
    html("span", {}, svg("svg", { width: 18, height: 14, style: "display: inline" }, icon), words);
  const waits = svg("svg", { width: 18, height: 14, style: "display: inline" });
  waits.append(svg("rect", { width: 14, height: 14, fill: ddl.hatch(waits, colors.waiting) }));
  legend.replaceChildren(
    ...keys.map(([, [color, words]]) => key(swatch(color), words)),
    html("span", {}, waits, "idle: the bubble"),
  );
}
