// Several all-reduces side by side, round by round: which chunk travels, and what it sums.
const { svg, html, colors } = ddl;
const [LEFT, TOP, MARK, GAP] = [48, 20, 14, 16];
const last = Math.max(...data.films.map(({ rounds }) => rounds.length - 1));
let [width, round, share] = [0, 0, 1];
let [timer, stop] = [null, () => {}];

const format = (k) => `${k} of ${last}`;
const slider = ddl.slider({ label: "Round", min: 0, max: last, step: 1, value: 0, format }, pauseAt);
const step = (by) => () => pauseAt(Math.min(Math.max(round + by, 0), last));
const play = ddl.button("Play", () => (timer === null ? begin() : pause()));
const buttons = [play, ddl.button("Back", step(-1)), ddl.button("Step", step(1))];
const status = ddl.status();
const panels = data.films.map(() => ({
  drawing: svg("svg", { role: "img" }),
  title: html("p", { class: "ddl-title" }),
}));
const row = html("div", { style: `display: flex; flex-wrap: wrap; gap: ${GAP}px` });
row.append(...panels.map(({ drawing, title }) => html("div", {}, title, drawing)));
const key = "A number in a cell names a rank whose part is in the sum. A framed cell has all parts. " +
  "A traveling chunk is added (solid arrow) or replaces the old values (dashed arrow).";
root.append(ddl.controls(...buttons, slider), row, status, html("p", {}, key));
ddl.onWidth((pixels) => {
  width = pixels;
  draw();
});

function begin() {
  play.textContent = "Pause";
  const next = () => {
    if (round === last) return pause();
    show(round + 1);
    timer = setTimeout(next, 1600);
  };
  if (round === last) show(0);
  timer = setTimeout(next, round === 0 ? 500 : 0);
}

function pause() {
  clearTimeout(timer);
  timer = null;
  play.textContent = "Play";
}

function pauseAt(k) {
  pause();
  show(k);
}

// Show a round. The next round begins with traveling chunks, unless the reader asked for less motion.
function show(k) {
  stop();
  const forward = k === round + 1;
  round = k;
  slider.set(k);
  tell();
  const drawShare = (now) => {
    share = now;
    draw();
  };
  if (forward && !ddl.calm()) stop = ddl.animate(0.8, drawShare);
  else drawShare(1);
}

function tell() {
  const counts = data.films.map(({ title, complete, rounds }) => {
    const cells = rounds[Math.min(round, rounds.length - 1)].cells.flat();
    const done = cells.filter((cell) => cell.replace("b", "") === complete).length;
    return `${title}: ${done} of ${cells.length} cells complete`;
  });
  status.say(`Round ${round} of ${last}. ${counts.join("; ")}.`);
}

function draw() {
  if (width === 0) return;
  const across = Math.min(data.films.length, Math.max(1, Math.floor((width + GAP) / (230 + GAP))));
  const each = Math.min(430, Math.floor((width + GAP) / across) - GAP);
  data.films.forEach((film, k) => drawFilm(film, panels[k], each));
  if (status.textContent === "") tell();
}

function drawFilm({ title, members, inks, chunks, complete, rounds }, panel, each) {
  const now = Math.min(round, rounds.length - 1);
  const travels = share < 1 && round < rounds.length;
  const { moves, words } = rounds[now];
  const { cells } = rounds[travels ? now - 1 : now];
  const total = chunks.reduce((sum, { length }) => sum + length, 0);
  const widths = chunks.map(({ length }) => ((each - LEFT - 4) * length) / total);
  const left = (chunk) => LEFT + widths.slice(0, chunk).reduce((sum, one) => sum + one, 0);
  const perLine = Math.max(1, Math.floor((Math.min(...widths.filter(Boolean)) - 20) / MARK));
  const high = Math.ceil(members.length / perLine) * MARK + 12;
  const height = TOP + high * members.length + 4;
  const over = round >= rounds.length - 1;
  panel.title.textContent = `${title}${over ? ` · done after ${rounds.length - 1} rounds` : ""}`;
  for (const [name, value] of Object.entries({ width: each, height, viewBox: `0 0 ${each} ${height}` }))
    panel.drawing.setAttribute(name, value);
  panel.drawing.setAttribute("aria-label", `${title}, round ${now}: ${words}`);
  panel.drawing.replaceChildren(
    ...chunks.map(({ name }, k) => text(left(k) + widths[k] / 2, TOP - 6, name, "middle")),
    ...members.map((rank, r) => text(0, TOP + (r + 0.5) * high + 4, `rank ${rank}`, "start")),
    ...cells.flatMap((row, r) =>
      row.flatMap((cell, chunk) => drawCell(cell, left(chunk), TOP + r * high, widths[chunk], high)),
    ),
    ...chunks.flatMap((_, chunk) => {
      const here = moves.filter(([, , moved]) => round === now && moved === chunk);
      const [right, middle] = [left(chunk) + widths[chunk] - 7, (r) => TOP + (r + 0.5) * high];
      return here.map(([source, to, , effect], k) => arrow(right - 9 * k, middle(source), middle(to), effect));
    }),
  );

  function drawCell(cell, x, y, wide, high) {
    const counts = cell.replace("b", "");
    const done = counts === complete;
    const look = { stroke: done ? colors.ink : colors.soft, "stroke-width": done ? 2.5 : 0.6 };
    const dashes = cell.startsWith("b") ? "3 3" : "";
    const box = { x: x + 2, y: y + 2, width: Math.max(wide - 4, 0), height: high - 4 };
    const frame = svg("rect", { ...box, ...look, fill: done ? colors.pale : "none", "stroke-dasharray": dashes });
    if (!/^\d+$/.test(counts)) return [frame, text(x + 6, y + high / 2 + 4, counts, "start")];
    const marks = [...counts].flatMap((count, r) => {
      const place = { x: x + 6 + (r % perLine) * MARK, y: y + 6 + Math.floor(r / perLine) * MARK };
      if (count === "0") return [];
      const fill = colors.rank(members[r]);
      const label = text(place.x + MARK / 2 - 1, place.y + MARK - 4, count === "1" ? members[r] : `${count}×`, "middle");
      label.style = `fill: ${inks[r]}; font-size: 10px; font-weight: 600`;
      const side = { width: MARK - 2, height: MARK - 2, stroke: colors.soft };
      return [svg("rect", { ...place, ...side, fill }), label];
    });
    return [frame, ...marks];
  }
}

function text(x, y, words, anchor) {
  return svg("text", { x, y, "text-anchor": anchor }, String(words));
}

// Draw where a chunk goes. While the chunk travels, the arrow ends where the chunk is.
function arrow(x, from, to, effect) {
  const [way, end] = [from + (to - from) * share, Math.sign(to - from)];
  // We mix in some ink, so that the arrow is visible on light and on dark pages.
  const blue = `color-mix(in srgb, ${colors.communicating} 65%, ${colors.ink})`;
  const look = { stroke: blue, "stroke-width": 2, "stroke-dasharray": effect === "copied" ? "5 3" : "" };
  const head = `${x - 4},${way - 7 * end} ${x + 4},${way - 7 * end} ${x},${way}`;
  return svg(
    ...["g", { fill: blue }, svg("line", { x1: x, x2: x, y1: from, y2: way - 5 * end, ...look })],
    ...[svg("circle", { cx: x, cy: from, r: 3 }), svg("polygon", { points: head })],
  );
}
