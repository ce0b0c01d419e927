// What the data of a timeline say, see page_data.py: lanes, calls, bars, and words for them. Times
// are microseconds since the cell began; a bar is a call, or a thread's wait for one. A call that
// blocked from its begin to its end comes without its waits.

const [COMPUTING, WAITING, EXPOSED, COMMUNICATING, STUCK, POSTED, MESSAGE, EAGER, MET] =
  Array(9).keys();
const MEANING = [
  ...["computing", "waiting for a partner", "exposed: waiting for the background"],
  ...["communicating: data move", "partner never came", "in the background, no partner yet"],
  ...["message", "eager send: over before its receiver came", "collective: all are there"],
];

// The first six in a sentence.
const DOING = [
  ...["computing", "waiting", "exposed, waiting for the background", "communicating"],
  ...["stuck", "without a partner yet"],
];

// -- what the data say --------------------------------------------------------------------------

const lanes = data.lanes.map(([rank, begin, end, problem]) => ({
  rank,
  begin,
  end,
  problem,
  bars: [],
}));
const laneOf = new Map(lanes.map((lane) => [lane.rank, lane]));
const calls = data.calls.map(([rank, kind, row, start, matched, end, waits]) => {
  const [op, bytes, partner, where] = data.kinds[kind];
  return {
    ...{ lane: laneOf.get(rank), op, bytes, partner, where, row, start },
    matched: matched < 0 ? null : start + matched,
    end: end < 0 ? null : start + end,
    waits: (waits ?? [0, end]).map((time) => (time < 0 ? null : start + time)),
    ...{ others: [], bars: [] },
  };
});
for (const [send, recv, eager] of data.messages) {
  calls[send].others = [calls[recv]];
  calls[recv].others = [calls[send]];
  calls[send].eager = Boolean(eager);
}
for (const met of data.collectives) {
  const last = met.map((k) => calls[k]).reduce((a, b) => (b.start > a.start ? b : a));
  met.forEach((k, place) => {
    calls[k].others = [...met.slice(place + 1), ...met.slice(0, place)].map(
      (other) => calls[other],
    );
    calls[k].last = last.lane.rank;
  });
}

// Cut an operation's time where its partner came.
function phases(call, begin, end, before, moving) {
  if (call.matched === null) return [[begin, end, call.end === null ? STUCK : before]];
  const cut = Math.min(Math.max(begin, call.matched), end);
  const parts = [
    [begin, cut, before],
    [cut, end, moving],
  ].filter(([from, to]) => to > from);
  return parts.length ? parts : [[begin, end, moving]];
}

for (const call of calls) {
  const { lane, row } = call;
  const add = (place, begin, end, parts) => {
    const bar = { call, lane, row: place, begin, end, parts };
    call.bars.push(bar);
    lane.bars.push(bar);
  };
  if (row >= 0) {
    const end = call.end ?? Math.max(lane.end, call.start);
    add(row, call.start, end, phases(call, call.start, end, POSTED, COMMUNICATING));
  }
  for (let k = 0; k < call.waits.length; k += 2) {
    const [begin, end] = [call.waits[k], call.waits[k + 1] ?? lane.end];
    add(-1, begin, end, phases(call, begin, end, WAITING, row < 0 ? COMMUNICATING : EXPOSED));
  }
}
for (const lane of lanes) {
  lane.bars.sort((a, b) => a.begin - b.begin || a.row - b.row);
  lane.rows = Math.max(...lane.bars.map((bar) => bar.row), -1) + 1;
  lane.together = data.together.filter(([rank]) => rank === lane.rank).map(([, ...part]) => part);
}
const last = Math.max(
  1,
  data.view[1],
  ...lanes.map((lane) => lane.end),
  ...lanes.flatMap((lane) => lane.bars.map((bar) => bar.end)),
);

// -- words ----------------------------------------------------------------------------------------

const time = (micro) => ddl.seconds(micro * 1e-6);

// Return a moment as exactly as the view shows it.
function moment(micro) {
  const [unit, one] = last >= 1e6 ? ["s", 1e6] : last >= 1e3 ? ["ms", 1e3] : ["µs", 1];
  const digits = Math.max(0, Math.ceil(Math.log10((1000 * one) / (view[1] - view[0]))));
  return `${(micro / one).toFixed(Math.min(digits, 6))} ${unit}`;
}

function nameOf(call) {
  const bytes = call.bytes ? ` ${ddl.bytes(call.bytes)}` : "";
  const peer = call.partner === null ? "" : `rank ${call.partner}`;
  const side = { send: "to", isend: "to", recv: "from", irecv: "from" }[call.op];
  return `${call.op}${bytes}${side ? ` ${side} ${peer || "any rank"}` : peer && `, root ${peer}`}`;
}

// Return how long a bar's thread was held by anything between two moments.
function heldIn(lane, begin, end) {
  let [sum, until] = [0, begin];
  for (const bar of lane.bars.filter((bar) => bar.row < 0)) {
    const from = Math.max(bar.begin, until);
    if (Math.min(bar.end, end) > from) sum += Math.min(bar.end, end) - from;
    until = Math.max(until, Math.min(bar.end, end));
  }
  return sum;
}

function wordsOf(bar) {
  const { call, lane } = bar;
  const background = bar.row >= 0;
  const does = background || call.row < 0 ? nameOf(call) : `waits for its ${nameOf(call)}`;
  const spent = bar.parts.map(([begin, end, state]) => {
    const who = call.partner ?? call.last;
    const whom =
      state === WAITING && who !== undefined && who !== lane.rank ? ` for rank ${who}` : "";
    return `${DOING[state]}${whom} ${time(end - begin)}`;
  });
  const where = call.where ? `, ${call.where}` : "";
  const computed = bar.end - bar.begin - heldIn(lane, bar.begin, bar.end);
  const sentences = [
    `Rank ${lane.rank}: ${does}${where}.`,
    `It begins at ${moment(bar.begin)} and takes ${time(bar.end - bar.begin)}:`,
    `${spent.join(", ")}.`,
    background && `Meanwhile the thread computes ${time(computed)}.`,
    call.end === null && "It never ended.",
  ];
  return sentences.filter(Boolean).join(" ");
}

function wordsOfComputing(lane, at) {
  if (lane.problem) return `Rank ${lane.rank} did not answer: ${lane.problem}`;
  if (at < lane.begin || at > lane.end) return `Rank ${lane.rank}: the cell is not running.`;
  if (lane.together.some(([begin, end]) => begin <= at && at <= end))
    return `Rank ${lane.rank}: short calls that are drawn together.`;
  const thread = lane.bars.filter((bar) => bar.row < 0);
  const begin = Math.max(
    lane.begin,
    ...thread.filter((bar) => bar.end <= at).map((bar) => bar.end),
  );
  const end = Math.min(
    lane.end,
    ...thread.filter((bar) => bar.begin >= at).map((bar) => bar.begin),
  );
  return `Rank ${lane.rank}: computing for ${time(end - begin)}, from ${moment(begin)} on.`;
}
