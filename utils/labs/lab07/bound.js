// Workers that may be ahead of the slowest by a bound. `run` follows the rule of bounded_steps.py.
const { svg, html, colors } = ddl;
const [LEFT, TOP, ROW] = [104, 6, 34];
const [least, noBound, bound] = data.bound;
const [single, most, factor] = data.factor;
const { steps, slow, until } = data;
let width = 0;

const limit = ddl.slider(
  {
    ...{ label: "Bound s", min: least, max: noBound, step: 1, value: bound },
    format: (s) => (s === noBound ? "∞ (no bound)" : String(s)),
  },
  draw,
);
const times = ddl.slider(
  {
    ...{ label: `Rank ${slow + 1} slower by`, min: single, max: most, step: 0.5, value: factor },
    format: (number) => `${ddl.short(number)} ×`,
  },
  draw,
);
const drawing = svg("svg", { role: "img" });
const status = ddl.status();
root.append(ddl.controls(limit, times), drawing, legend(), status);
ddl.onWidth((pixels) => {
  width = pixels;
  draw();
});

// Return when each worker computes and waits, and by how many updates each gradient is late.
function run(lengths, bound) {
  const clock = lengths.map(() => 0);
  const sentAt = [...clock];
  const since = new Map(lengths.map((_, k) => [k, 0]));
  const [ends, bars, staleness] = [[], [], []];
  let now = 0;
  while (now <= until) {
    const slowest = Math.min(...clock);
    for (const k of [...since.keys()].sort((one, other) => one - other)) {
      if (clock[k] - slowest > bound) continue;
      bars.push({ worker: k, begin: since.get(k), end: now, waits: true });
      bars.push({ worker: k, begin: now, end: Math.min(now + lengths[k], until), waits: false });
      since.delete(k);
      ends.push([now + lengths[k], k]);
      sentAt[k] = staleness.length;
    }
    // The gradient that ends first comes first. If several end together, the lowest rank does.
    ends.sort(([end, k], [otherEnd, other]) => end - otherEnd || k - other);
    const [end, k] = ends.shift();
    now = end;
    if (now > until) break;
    staleness.push(staleness.length - sentAt[k]);
    clock[k] += 1;
    since.set(k, now);
  }
  for (const [worker, begin] of since) bars.push({ worker, begin, end: until, waits: true });
  return { bars: bars.filter(({ begin, end }) => end > begin), staleness };
}

function draw() {
  if (width === 0) return;
  const bound = limit.read() === noBound ? Infinity : limit.read();
  const lengths = steps.map((step, k) => step * (k === slow ? times.read() : 1));
  const { bars, staleness } = run(lengths, bound);
  const height = TOP + ROW * steps.length + 22;
  const unit = (width - LEFT - 4) / until;
  for (const [key, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` }))
    drawing.setAttribute(key, value);
  drawing.replaceChildren();
  const hatch = ddl.hatch(drawing, colors.waiting);
  steps.forEach((_, k) => {
    const y = TOP + ROW * k;
    const name = `rank ${k + 1}${k === slow ? " (slow)" : ""}`;
    const look = { fill: colors.rank(k + 1), stroke: colors.soft };
    drawing.append(svg("rect", { x: 1, y: y + 5, width: 8, height: ROW - 10, ...look }));
    drawing.append(svg("text", { x: 14, y: y + 21 }, name));
  });
  for (const { worker, begin, end, waits } of bars) {
    const title = `rank ${worker + 1} ${waits ? "waits" : "computes"}: ${begin} to ${end} ms`;
    const box = { x: LEFT + begin * unit, y: TOP + ROW * worker + 4, width: (end - begin) * unit, height: ROW - 8 };
    const look = waits ? { fill: hatch } : { fill: colors.computing, stroke: "#222222", "stroke-width": 0.6 };
    drawing.append(svg("rect", { ...box, ...look }, svg("title", {}, title)));
  }
  const foot = { y: height - 4, "text-anchor": "end", x: width - 4 };
  drawing.append(svg("text", { x: LEFT, y: height - 4 }, "0"), svg("text", foot, `${until} ms`));
  tell(bars, staleness);
}

function tell(bars, staleness) {
  const waited = bars.filter(({ waits }) => waits).reduce((sum, { begin, end }) => sum + end - begin, 0);
  const share = (100 * waited) / (until * steps.length);
  const rate = staleness.length / (until / 1000);
  const late = staleness.length ? Math.max(...staleness) : 0;
  const words =
    `${rate.toFixed(0)} gradients per second, and the largest staleness is ${late} ` +
    `update${late === 1 ? "" : "s"}. The ranks wait ${share.toFixed(0)} % of the time.`;
  status.say(words);
  drawing.setAttribute("aria-label", words);
}

function legend() {
  const icon = () => svg("svg", { width: 20, height: 14, style: "display: inline; vertical-align: -2px" });
  const [computes, waits] = [icon(), icon()];
  const box = { width: 16, height: 14 };
  computes.append(svg("rect", { ...box, fill: colors.computing, stroke: "#222222" }));
  waits.append(svg("rect", { ...box, fill: ddl.hatch(waits, colors.waiting) }));
  const keys = [[computes, "computes a gradient"], [waits, "waits at the bound"]];
  return ddl.controls(...keys.map(([key, words]) => html("span", {}, key, words)));
}
