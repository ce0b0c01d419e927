// A timeline that answers: it says what a bar is, zooms, and follows messages. The calls and their
// words come from calls.js and the drawing from drawing.js, which are parts of the same function.

const HINT =
  "Point at a bar to read what it is. A click follows its message. " +
  "Ctrl and the wheel zoom, dragging moves. On the keyboard: Tab, then the arrows.";
const KEYS =
  "Left and right go to the next call, up and down to the next rank, Enter follows the message, " +
  "plus and minus zoom, 0 shows the first view, Escape ends.";

// -- the page -----------------------------------------------------------------------------------

let [view, width, current, linked, frame] = [[...data.view], 0, null, [], 0];
const svg = ddl.svg("svg", {
  ...{ tabindex: 0, role: "application", class: "ddl-timeline" },
  "aria-label": `Timeline of ${lanes.length} ranks with ${calls.length} calls. ${KEYS}`,
});
const status = ddl.status(HINT);
const layer = ddl.svg("g");
const FILLS = [
  ddl.colors.computing,
  ddl.hatch(svg, ddl.colors.waiting, { ground: ddl.colors.paper }),
  ddl.hatch(svg, ddl.colors.exposed, { angle: 90, gap: 5, ground: ddl.colors.paper }),
  ...[
    ddl.colors.communicating,
    ddl.hatch(svg, ddl.colors.ink, { angle: -45, ground: ddl.colors.paper }),
  ],
  `color-mix(in srgb, ${ddl.colors.communicating} 22%, ${ddl.colors.paper})`,
];
const EDGES = {
  [WAITING]: ddl.colors.waiting,
  [EXPOSED]: ddl.colors.exposed,
  [POSTED]: ddl.colors.communicating,
};
// Arrows end where the lanes end.
const CLIP = ddl.unique("clip");
const clip = ddl.svg("clipPath", { id: CLIP });
svg.append(ddl.svg("defs", {}, clip), layer);
status.classList.add("ddl-two-lines");

function zoom(
  factor,
  at = current ? (current.begin + current.end) / 2 : (view[0] + view[1]) / 2,
) {
  const length = Math.min(Math.max((view[1] - view[0]) * factor, 10), last);
  const share = Math.min(Math.max((at - view[0]) / (view[1] - view[0]), 0), 1);
  show(at - share * length, length);
}

// Show a part of the cell: from when on, and how long.
function show(begin, length) {
  const from = Math.min(Math.max(begin, 0), Math.max(last - length, 0));
  view = [from, from + length];
  redraw();
}

const reset = () => show(data.view[0], data.view[1] - data.view[0]);
const whole = data.view[1] - data.view[0] < 0.99 * last;

function table([heads, ...rows]) {
  const row = (tag, cells) =>
    ddl.html(
      "tr",
      {},
      cells.map((cell, k) =>
        ddl.html(k ? tag : "th", { scope: tag === "th" ? "col" : k ? null : "row" }, cell),
      ),
    );
  const caption = ddl.html("caption", {}, "Sums of the whole cell");
  const body = ddl.html(
    "tbody",
    {},
    rows.map((cells) => row("td", cells)),
  );
  const sums = ddl.html(
    "table",
    { class: "ddl-sums" },
    caption,
    ddl.html("thead", {}, row("th", heads)),
    body,
  );
  return ddl.html(
    "div",
    { class: "ddl-wide", tabindex: 0, role: "group", "aria-label": "Sums" },
    sums,
  );
}

const keys = ddl.html("div", { class: "ddl-controls ddl-keys" });
const few = ddl.html(
  "p",
  { class: "ddl-soft", hidden: true },
  "Some calls are narrower than a pixel: zoom in to see each.",
);
const left = data.left
  ? ddl.html(
      "p",
      { class: "ddl-soft" },
      `You can point at the longest calls of each rank, ${calls.length} in all. ` +
        `The other ${data.left} are drawn together.`,
    )
  : null;
const buttons = ddl.controls(
  ddl.button("+", () => zoom(0.5), { "aria-label": "Zoom in" }),
  ddl.button("−", () => zoom(2), { "aria-label": "Zoom out" }),
  ddl.button("Reset", () => {
    select(null);
    reset();
  }),
  whole ? ddl.button("Whole cell", () => show(0, last)) : null,
  data.note ? ddl.html("span", { class: "ddl-soft" }, data.note) : null,
);
const [above, below] = [[buttons], [keys, few, left, table(data.sums)].filter(Boolean)];
const more = ddl.html("details", {}, ddl.html("summary", {}, "more"));
if (data.simple) more.append(...above.splice(0), ...below.splice(0, below.length, more));
root.append(ddl.html("p", { class: "ddl-title" }, data.title), ...above, status, svg, ...below);

// -- what the reader does -----------------------------------------------------------------------

// Tell about a bar, and frame it.
function select(bar, { follow = [], move = false } = {}) {
  [current, linked] = [bar, follow];
  status.say(bar ? wordsOf(bar) : HINT);
  const length = view[1] - view[0];
  if (bar && move && (bar.begin < view[0] || bar.begin > view[1]))
    show(bar.begin - length / 4, length);
  else redraw();
}

// Go to the other end of a bar's message, or to the next rank of its collective.
function follow(bar) {
  const other = bar.call.others.find((call) => call.bars.length);
  if (!other) {
    status.say(`${wordsOf(bar)} There is no other end to follow.`);
    return;
  }
  select(other.bars[0], { follow: [bar.call.bars[0], other.bars[0]], move: true });
}

function inside({ clientX, clientY }) {
  const { left, top } = svg.getBoundingClientRect();
  return [clientX - left, clientY - top];
}

// Return the bar and the lane at a place on the page.
function at(event) {
  const [x, y] = inside(event);
  const lane = lanes.find((each) => y >= each.top - 3 && y < each.bottom + 3);
  if (!lane || x < LEFT - 4) return {};
  const row = lane.rows
    ? Math.min(Math.floor((y - lane.top - THREAD - 1) / lane.high), lane.rows - 1)
    : -1;
  const away = (bar) => Math.max(across(bar.begin) - x, x - across(bar.end), 0);
  const near = lane.bars.filter((bar) => bar.row === Math.max(row, -1) && away(bar) <= 3);
  near.sort((a, b) => away(a) - away(b) || a.end - a.begin - (b.end - b.begin));
  return { lane, bar: near[0], thread: row < 0 };
}

let drag = null;
svg.addEventListener("pointerdown", (event) => {
  drag = { x: inside(event)[0], begin: view[0], moved: false };
});
svg.addEventListener("pointermove", (event) => {
  if (drag && event.buttons) {
    const moved = inside(event)[0] - drag.x;
    if (!drag.moved && Math.abs(moved) < 4) return;
    if (!drag.moved) svg.setPointerCapture(event.pointerId);
    drag.moved = true;
    show(drag.begin - (moved / (width - LEFT - RIGHT)) * (view[1] - view[0]), view[1] - view[0]);
    return;
  }
  const { lane, bar, thread } = at(event);
  if (bar !== current && (bar || !linked.length))
    select(bar ?? null, { follow: linked.includes(bar) ? linked : [] });
  if (!bar && thread && !linked.length)
    status.say(wordsOfComputing(lane, when(inside(event)[0])));
});
svg.addEventListener("pointerup", (event) => {
  const { bar } = at(event);
  if (drag && !drag.moved) bar ? follow(bar) : select(null);
  drag = null;
});
svg.addEventListener(
  "wheel",
  (event) => {
    if (!event.ctrlKey && document.activeElement !== svg) return;
    event.preventDefault();
    zoom(1.0015 ** event.deltaY, when(inside(event)[0]));
  },
  { passive: false },
);

// Return the bar that a key leads to.
function next(key) {
  const with_bars = lanes.filter((lane) => lane.bars.length);
  if (!current)
    return (
      with_bars.flatMap((lane) => lane.bars).find((bar) => seen(bar.begin, bar.end)) ??
      with_bars[0]?.bars[0]
    );
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[key];
  if (key === "ArrowRight" || key === "ArrowLeft") {
    return current.lane.bars[current.lane.bars.indexOf(current) + step];
  }
  const lane = with_bars[with_bars.indexOf(current.lane) + step];
  return lane?.bars.reduce((a, b) =>
    Math.abs(b.begin - current.begin) < Math.abs(a.begin - current.begin) ? b : a,
  );
}

svg.addEventListener("keydown", (event) => {
  const { key } = event;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.shiftKey && key === "Enter") return; // the notebook's next cell
  if (key.startsWith("Arrow")) {
    const bar = next(key);
    if (bar) select(bar, { move: true });
  } else if (key === "Enter" || key === " ") {
    if (current) follow(current);
  } else if (key === "+" || key === "=") zoom(0.5);
  else if (key === "-") zoom(2);
  else if (key === "0") reset();
  else if (key === "Escape") {
    select(null);
    svg.blur();
    svg.closest(".jp-Cell")?.focus(); // the notebook's keys work again
  }
  else return;
  event.preventDefault();
  event.stopPropagation();
});
svg.addEventListener("focus", () => {
  if (!current && svg.matches(":focus-visible")) status.say(KEYS);
});
ddl.onWidth((pixels) => {
  width = pixels;
  draw();
});
