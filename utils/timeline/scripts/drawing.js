// The drawing of a timeline: lanes, bars, bands of collectives, arrows of messages, and the axis.

const [LEFT, RIGHT, TOP, THREAD, AXIS] = [66, 12, 6, 24, 42];
const [MOST_HEADS, MOST_BANDS] = [300, 24];

const across = (at) => LEFT + ((at - view[0]) / (view[1] - view[0])) * (width - LEFT - RIGHT);
const when = (pixel) => view[0] + ((pixel - LEFT) / (width - LEFT - RIGHT)) * (view[1] - view[0]);
const seen = (begin, end) => begin <= view[1] && end >= view[0];

// Give each lane its place from the top downward; return where the axis is.
function place() {
  let top = TOP;
  for (const lane of lanes) {
    lane.top = top;
    lane.high = lane.rows > 3 ? 11 : 18;
    lane.bottom = top + THREAD + (lane.rows ? 3 + lane.rows * lane.high : 0) + 4;
    top = lane.bottom + 6;
  }
  return top;
}

function edges(bar) {
  if (bar.row < 0) return [bar.lane.top, THREAD];
  return [bar.lane.top + THREAD + 3 + bar.row * bar.lane.high, bar.lane.high - 2];
}

function redraw() {
  cancelAnimationFrame(frame);
  frame = requestAnimationFrame(draw);
}

function draw() {
  const bottom = place();
  const used = new Set();
  svg.setAttribute("width", width);
  svg.setAttribute("height", bottom + AXIS);
  layer.replaceChildren(...bands(used));
  few.hidden = true;
  lanes.forEach((lane) => drawLane(lane, used));
  const lines = ddl.svg("g", { "clip-path": `url(#${CLIP})` }, arrows(used));
  const inside = { x: LEFT - 6, y: 0, width: width - LEFT - RIGHT + 12, height: bottom };
  clip.replaceChildren(ddl.svg("rect", inside));
  layer.append(lines, ...marks(), ...axis(bottom));
  keys.replaceChildren(...legend(used));
}

function box(begin, end, top, high, state, used) {
  used.add(state);
  const x = Math.max(begin, LEFT);
  const size = { x, y: top, width: Math.max(Math.min(end, width - RIGHT) - x, 0), height: high };
  layer.append(ddl.svg("rect", { ...size, fill: FILLS[state], stroke: EDGES[state] }));
}

// Draw parts in order. Those that fall on one pixel are one box, of the state that lasts longest.
function fill(parts, top, high, used) {
  let narrow = null;
  const flush = () => {
    if (!narrow) return;
    const states = Object.entries(narrow.shares).sort((a, b) => b[1] - a[1]);
    box(narrow.pixel, narrow.pixel + 1.5, top, high, Number(states[0][0]), used);
    few.hidden = false;
    narrow = null;
  };
  for (const [begin, end, state] of parts) {
    if (!seen(begin, end)) continue;
    const [from, to] = [across(begin), across(end)];
    if (to - from >= 1) {
      flush();
      box(from, to, top, high, state, used);
    } else {
      const pixel = Math.floor(from);
      if (narrow?.pixel !== pixel) flush();
      narrow ??= { pixel, shares: {} };
      narrow.shares[state] = (narrow.shares[state] ?? 0) + (to - from);
    }
  }
  flush();
}

function text(x, y, words, look = {}) {
  return ddl.svg("text", { x, y, ...look }, words);
}

function drawLane(lane, used) {
  const { top } = lane;
  layer.append(
    ddl.svg("rect", {
      x: 0,
      y: top + 5,
      width: 9,
      height: 14,
      rx: 2,
      fill: ddl.colors.rank(lane.rank),
    }),
    text(15, top + 17, `rank ${lane.rank}`),
    ddl.svg("rect", {
      x: LEFT,
      y: lane.bottom + 2,
      width: width - LEFT - RIGHT,
      height: 1,
      fill: ddl.colors.pale,
    }),
  );
  if (lane.problem) {
    layer.append(text(LEFT + 4, top + 17, "no answer"));
    return;
  }
  fill([[lane.begin, lane.end, COMPUTING]], top, THREAD, used);
  fill(lane.together, top, THREAD, used);
  for (let row = -1; row < lane.rows; row++) {
    const bars = lane.bars.filter((bar) => bar.row === row);
    if (bars.length)
      fill(
        bars.flatMap((bar) => bar.parts),
        ...edges(bars[0]),
        used,
      );
    bars.filter((bar) => seen(bar.begin, bar.end)).forEach(label);
  }
  if (!lane.bars.length && !lane.together.length) layer.append(nothing(lane));
}

// Say that a rank has not communicated, on its bar if there is room, else beside it.
function nothing(lane) {
  const [from, to] = [across(lane.begin), across(lane.end)].map((x) =>
    Math.min(Math.max(x, LEFT), width - RIGHT),
  );
  const words = "no communication";
  const room = 120;
  if (to - from > room)
    return text((from + to) / 2, lane.top + 17, words, {
      class: "ddl-on-grey",
      "text-anchor": "middle",
    });
  const left = to + room < width - RIGHT ? to + 6 : from - room;
  return text(left, lane.top + 17, words, { class: "ddl-soft" });
}

// Name a bar's longest part where there is room, with a line at the bar's begin.
function label(bar) {
  const [top, high] = edges(bar);
  const shown = bar.parts.map(([begin, end, state]) => [
    Math.max(across(begin), LEFT),
    Math.min(across(end), width - RIGHT),
    state,
  ]);
  const [from, to, state] = shown.reduce((a, b) => (b[1] - b[0] > a[1] - a[0] ? b : a));
  if (across(bar.begin) > LEFT && to - from > 4) {
    layer.append(
      ddl.svg("rect", {
        x: across(bar.begin) - 0.5,
        y: top,
        width: 1,
        height: high,
        fill: ddl.colors.paper,
      }),
    );
  }
  const moving = state === COMMUNICATING || state === POSTED;
  const who = bar.call.partner ?? bar.call.last;
  const choices =
    state === STUCK
      ? [`✗ ${nameOf(bar.call)} never ended`, "✗ never ended"]
      : moving
        ? [
            nameOf(bar.call),
            `${bar.call.op} ${bar.call.bytes ? ddl.bytes(bar.call.bytes) : ""}`.trim(),
            bar.call.op,
          ]
        : state === WAITING && who !== undefined && who !== bar.lane.rank
          ? [`${bar.call.op} waits for rank ${who}`, `waits for rank ${who}`]
          : [`waits for ${bar.call.op}`];
  const wide = (words) => 6.4 * words.length + 8;
  const words = high >= 16 ? choices.find((each) => wide(each) <= to - from) : null;
  if (!words) return;
  const [middle, base] = [(from + to) / 2, top + high / 2 + 4];
  if (state !== COMMUNICATING && state !== POSTED) {
    const card = {
      x: middle - wide(words) / 2 + 2,
      y: top + 1,
      width: wide(words) - 4,
      height: high - 2,
    };
    layer.append(ddl.svg("rect", { ...card, rx: 2, fill: ddl.colors.paper }));
  }
  layer.append(
    text(middle, base, words, {
      "text-anchor": "middle",
      class: state === COMMUNICATING ? "ddl-on-blue" : null,
    }),
  );
}

// Return the bands in which the ranks of a collective are all there.
function bands(used) {
  const shown = data.collectives
    .map((met) => met.map((k) => calls[k]))
    .filter((met) => met.length > 1 && met.every((call) => call.end !== null))
    .map((met) => [
      met,
      Math.max(...met.map((call) => call.start)),
      Math.max(...met.map((call) => call.end)),
    ])
    .filter(([, begin, end]) => seen(begin, end));
  if (!shown.length || shown.length > MOST_BANDS) return [];
  used.add(MET);
  return shown.flatMap(([met, begin, end]) => {
    const x = Math.max(across(begin), LEFT);
    const high = {
      width: Math.max(Math.min(across(end), width - RIGHT) - x, 1),
      fill: ddl.colors.communicating,
    };
    return met.map(({ lane }) =>
      ddl.svg("rect", {
        x,
        y: lane.top - 3,
        height: lane.bottom - lane.top + 6,
        ...high,
        "fill-opacity": 0.15,
      }),
    );
  });
}

// Return where a message begins and ends on the page.
function line(send, recv) {
  const ends = [send.bars[0], recv.bars[0]].map(edges);
  const down = recv.lane.top > send.lane.top;
  const y = ends.map(([top, high], k) => ((k === 0) === down ? top + high : top));
  return [across(send.start), y[0], across(recv.end), y[1]];
}

function arrows(used) {
  const shown = new Map();
  for (const [from, to, eager] of data.messages) {
    const [send, recv] = [calls[from], calls[to]];
    if (!send.bars.length || !recv.bars.length || !seen(send.start, recv.end)) continue;
    const marked =
      linked.some((bar) => bar.call === send) && linked.some((bar) => bar.call === recv);
    if (!marked && ![null, send.lane.rank].includes(data.sender)) continue;
    const ends = line(send, recv);
    shown.set(marked ? "marked" : ends.map(Math.round).join(), [ends, eager, marked]);
    used.add(eager ? EAGER : MESSAGE);
  }
  const many = shown.size > MOST_HEADS;
  return [...shown.values()].flatMap(([[x1, y1, x2, y2], eager, marked]) => {
    const opacity = marked ? 1 : linked.length || many ? 0.25 : shown.size > 60 ? 0.5 : 0.8;
    const look = {
      stroke: ddl.colors.ink,
      "stroke-width": marked ? 2.5 : 1,
      opacity,
      class: marked ? "ddl-followed" : null,
    };
    const [length, size] = [Math.hypot(x2 - x1, y2 - y1) || 1, marked ? 10 : 6];
    const [dx, dy] = [(size * (x2 - x1)) / length, (size * (y2 - y1)) / length];
    const corners = [0.4, -0.4].map((side) => [x2 - dx - side * dy, y2 - dy + side * dx].join());
    const head = `M${x2},${y2} L${corners.join(" L")} Z`;
    return [
      ddl.svg("line", { x1, y1, x2, y2, ...look, "stroke-dasharray": eager ? "4 2" : null }),
      many && !marked ? null : ddl.svg("path", { d: head, fill: ddl.colors.ink, opacity }),
    ].filter(Boolean);
  });
}

// Return frames around the bar that the status line is about, and around a message's ends.
function marks() {
  const bars = new Set([...linked, current].filter(Boolean));
  return [...bars]
    .filter((bar) => seen(bar.begin, bar.end))
    .map((bar) => {
      const [top, high] = edges(bar);
      const x = Math.max(across(bar.begin), LEFT) - 1.5;
      const size = {
        x,
        y: top - 1.5,
        width: Math.max(Math.min(across(bar.end), width - RIGHT) - x + 1.5, 4),
        height: high + 3,
      };
      return ddl.svg("rect", {
        ...size,
        rx: 2,
        fill: "none",
        stroke: ddl.colors.ink,
        "stroke-width": 2.5,
        class: "ddl-mark",
      });
    });
}

function axis(bottom) {
  const [unit, one] = view[1] >= 1e6 ? ["s", 1e6] : view[1] >= 1e3 ? ["ms", 1e3] : ["µs", 1];
  const rough = (view[1] - view[0]) / Math.max((width - LEFT) / 100, 2) / one;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((each) => each * power >= rough) * power;
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const made = [
    ddl.svg("rect", {
      x: LEFT,
      y: bottom,
      width: width - LEFT - RIGHT,
      height: 1,
      fill: ddl.colors.ink,
    }),
  ];
  for (let k = Math.ceil(view[0] / one / step); k * step * one <= view[1]; k++) {
    const x = across(k * step * one);
    made.push(ddl.svg("rect", { x, y: bottom, width: 1, height: 5, fill: ddl.colors.ink }));
    if (x < width - 20)
      made.push(text(x, bottom + 18, (k * step).toFixed(digits), { "text-anchor": "middle" }));
  }
  return [...made, text(LEFT, bottom + 36, `time since the cell began [${unit}]`)];
}

// Return the keys of what is drawn.
function legend(used) {
  const swatch = (state) => {
    const line = { x1: 1, x2: 23, y1: 6, y2: 6, stroke: ddl.colors.ink };
    const box = {
      x: 0.5,
      y: 0.5,
      width: 23,
      height: 11,
      fill: FILLS[state],
      stroke: EDGES[state],
    };
    if (state === MET)
      Object.assign(box, { fill: ddl.colors.communicating, "fill-opacity": 0.15 });
    const shown =
      state === MESSAGE || state === EAGER
        ? ddl.svg("line", { ...line, "stroke-dasharray": state === EAGER ? "4 2" : null })
        : ddl.svg("rect", box);
    return ddl.svg("svg", { width: 24, height: 12, "aria-hidden": true }, shown);
  };
  const items = [...used].sort((a, b) => a - b);
  return items.map((state) =>
    ddl.html("span", { class: "ddl-key" }, swatch(state), MEANING[state]),
  );
}
