"""Answers to lab 18, wrong ones and right ones, that students really give."""

from __future__ import annotations

from lab_tools import source_of

from answers import ward

NOTEBOOK = "18_the_clinic.ipynb"
CELLS = {
    "18.1": "lab18-waits-answer",
    "18.2": "lab18-stacks-answer",
    "18.3": "lab18-record-answer",
    "18.4": "lab18-profile-answer",
    "18.5": "lab18-digest-answer",
    **ward.CELLS,
}
SLOW = HINTED_BY_THE_ROOM = ward.TASKS
ON_RANKS = ward.ON_RANKS
BEFORE = source_of(NOTEBOOK, "ranks-join").replace("%%px\n", "")

_FIRST = 'first = max(dump[0]["seq"] for dump in dumps if dump)'
_WORDS = '("missing", "call", "sizes", "line")'
_DIGEST = "zlib.crc32(about.encode() + row.view(torch.uint8).numpy().tobytes())"
_BYTES = "row.view(torch.uint8).numpy().tobytes()"
_UP = """            while around is not None and around.name not in labels:
                around = around.cpu_parent
"""

# task, what the student did, a part of the solution, what stands in its place, words of the message
CHANGES = [
    ("18.2", "knows of one loader", 'split("(most recent call first):")[-1]',
     'split("(most recent call first):")[1:3][-1]', ""),
    ("18.4", "always has the same labels", 'dict.fromkeys(["", *labels], 0)',
     'dict.fromkeys(["", "forward", "loss", "backward", "clip", "log", "step"], 0)', "expected {"),
    ("18.1", "leaves out the cycles", "ends | cycles", "ends", "You left out the cycle"),
    ("18.1", "leaves out the ends", "ends | cycles", "cycles",
     "You left out ranks that wait for nobody"),
    ("18.1", "takes the tail of a cycle", "if rank in reached(rank)",
     "if any(other in reached(other) for other in reached(rank))",
     "Some of these ranks only wait for a cycle"),
    ("18.1", "takes idle ranks", "{other for others in waits for other in others "
     "if not waits[other]}", "{rank for rank, others in enumerate(waits) if not others}",
     "Nobody waits for some of these ranks"),
    ("18.1", "does not sort", "sorted(ends | cycles)", "sorted(ends | cycles, reverse=True)",
     "Sort the ranks"),
    ("18.1", "cycles of two only", "if rank in reached(rank)",
     "if any(rank in waits[other] for other in waits[rank])", ""),
    ("18.1", "does not follow the waits", "ahead += waits[other]", "pass", ""),
    ("18.1", "empties the waits", "list(waits[rank])", "waits[rank]",
     "blame changed its argument waits"),
    ("18.2", "the first thread", '(most recent call first):")[-1]',
     '(most recent call first):")[1]', "You read the first thread"),
    ("18.2", "the outermost frame", "own[0] if own", "own[-1] if own",
     "You took the outermost frame"),
    ("18.2", "frames of other files", " if path == file]", "]",
     "You took frames of other files, too"),
    ("18.2", "the end of the name", "if path == file", "if path.endswith('train.py')",
     "another file ends alike"),
    ("18.2", "the beginning of the name", "if path == file", "if path.startswith(file)",
     "train.pyx begins alike"),
    ("18.2", "the file anywhere in the name", "if path == file", "if file in path", ""),
    ("18.2", "without the line", 'f"{name}, line {line}"', "name", "You grouped by function"),
    ("18.2", "leaves ranks out", "[[place, members] for place, members in found.items()]",
     "[[place, members] for place, members in found.items() if place]",
     "You left out ranks without a frame"),
    ("18.2", "the largest group first", "return sorted(pairs, "
     "key=lambda pair: (len(pair[1]), pair[1]))", "return sorted(pairs, "
     "key=lambda pair: (len(pair[1]), pair[1]))[::-1]", ""),
    ("18.2", "does not sort", "return sorted(pairs, key=lambda pair: (len(pair[1]), pair[1]))",
     "return pairs", ""),
    ("18.2", "a dict", "return sorted(pairs, key=lambda pair: (len(pair[1]), pair[1]))",
     "return found", ""),
    ("18.2", "another form of the place", 'f"{name}, line {line}"', 'f"{name}:{line}"', ""),
    ("18.3", "ignores the ring", _FIRST, 'first = min(dump[0]["seq"] for dump in dumps if dump)',
     "Some ranks have overwritten this entry"),
    ("18.3", "from number 1", _FIRST, "first = 1", ""),
    ("18.3", "compares positions", 'by_seq = [{entry["seq"]: entry for entry in dump} '
     "for dump in dumps]", "by_seq = [dict(enumerate(dump, 1)) for dump in dumps]",
     ""),
    ("18.3", "stops at the shortest", 'last = max(dump[-1]["seq"] for dump in dumps if dump)',
     'last = min(dump[-1]["seq"] if dump else 0 for dump in dumps)',
     "You stopped at the shortest recording"),
    ("18.3", "the state, too", _WORDS, '("missing", "call", "sizes", "line", "state")',
     "You compared the state"),
    ("18.3", "no lines", _WORDS, '("missing", "call", "sizes")', "You did not compare the lines"),
    ("18.3", "no sizes", _WORDS, '("missing", "call", "line")', "You did not compare the sizes"),
    ("18.3", "no calls", _WORDS, '("missing", "sizes", "line")', "You did not compare the calls"),
    ("18.3", "the other ranks", "if value != most]", "if value == most]", ""),
    ("18.3", "those who differ from rank 0", "if value != most]", "if value != values[0]]",
     "You named the ranks that agree"),
    ("18.3", "one culprit", "return seq, others, what", "return seq, others[:1], what",
     "Return all ranks outside the largest group"),
    ("18.3", "the last difference", "range(first, last + 1)", "range(last, first - 1, -1)",
     "This is the last difference"),
    ("18.3", "a position, not a number", "return seq, others, what",
     "return seq - first, others, what", ""),
    ("18.3", "never None", "    return None\n", "    return last, [], 'missing'\n",
     "The ranks agree. Return None"),
    ("18.3", "a missing rank raises", "if dump)\n    last", ")\n    last", ""),
    ("18.4", "names that begin alike", "event.name == op", "event.name.startswith(op)",
     "You counted too much"),
    ("18.4", "no labels", _UP, "            around = None\n", "You found no label"),
    ("18.4", "the parent only", "while around is not None", "if around is not None",
     ""),
    ("18.4", "the outermost label", _UP, """            labeled = None
            while around is not None:
                if around.name in labels:
                    labeled = around
                around = around.cpu_parent
            around = labeled
""", "You took the outermost label"),
    ("18.4", "each label around", _UP, """            while around is not None:
                if around.name in labels:
                    counts[around.name] += 1
                around = around.cpu_parent
            continue
""", ""),
    ("18.4", "leaves out what is outside", "return counts",
     "return {name: n for name, n in counts.items() if name}",
     "You left out the calls outside all labels"),
    ("18.4", "runs it twice", "        step()\n", "        step()\n        step()\n",
     "ran the step 2 times"),
    ("18.4", "warms up", "    with profile(", "    step()\n    with profile(",
     "ran the step 2 times"),
    ("18.4", "every operator", "if event.name == op:", "if event.name.startswith('aten'):",
     "You counted too much"),
    ("18.4", "one number", "return counts", "return sum(counts.values())",
     "Return a dict"),
    ("18.4", "the name without aten", "if event.name == op:", "if event.name == op[6:]:",
     "You counted a mark"),
    ("18.4", "only labels with calls", "return counts",
     "return {name: n for name, n in counts.items() if n}", "You left out labels without a call"),
    ("18.5", "only the values", "about.encode() + ", "", "differ in the"),
    ("18.5", "no shape", "{list(tensor.shape)} ", "{tensor.numel()} ", "differ in the shape"),
    ("18.5", "no dtype", "{tensor.dtype} ", "", "differ in the dtype"),
    ("18.5", "a sum", _DIGEST, "int(row.double().sum().item() * 1e6) "
     "if not row.isnan().any() else 0", "differ in"),
    ("18.5", "the printed tensor", _DIGEST, "zlib.crc32((about + str(row)).encode())",
     "one bit of a long tensor"),
    ("18.5", "numbers in text", _DIGEST, "zlib.crc32((about + str(row.tolist())).encode())",
     "the bits of a NaN"),
    ("18.5", "Python's hash of the numbers", _DIGEST,
     "hash((about, *row.nan_to_num(7.5).tolist()))", "the sign of a zero"),
    ("18.5", "the whole tensor", _DIGEST, "(about.encode() + " + _BYTES + ").hex()",
     "as good as the tensor itself"),
    ("18.5", "as it is stored", "tensor.detach().contiguous().reshape(-1)",
     "torch.as_strided(tensor.detach(), (tensor.numel(),), (1,))",
     "have equal bits but different digests"),
    ("18.5", "sorted bytes", _BYTES, "bytes(sorted(" + _BYTES + "))", "the order of the entries"),
    ("18.5", "bytes, not a text", _DIGEST, "(about.encode() + " + _BYTES + ")[:64]",
     "Return a text or an integer"),
    ("18.5", "the last good step", "return bad, rank, name", "return bad - 1, rank, name",
     "This is the last good step"),
    ("18.5", "compares with rank 0", "if value != most:", "if value != values[0]:",
     "You named a rank that agrees with the others"),
    ("18.5", "every step", "middle = (good + bad) // 2", "middle = good + 1",
     "halve the steps that are left"),
    ("18.5", "looks again", "seen = seen or digests_at(bad)",
     "digests_at(good)\n    seen = digests_at(bad)", "halve the steps that are left"),
    ("18.5", "looks at the end", "seen = seen or digests_at(bad)", "seen = digests_at(steps)", ""),
    ("18.5", "only compares ranks 0 and 1", "all(one == found[0] for one in found)",
     "found[0] == found[1]", ""),
    ("18.5", "forgets the name", "return bad, rank, name", "return bad, rank", ""),
]  # fmt: skip

WRONG = [
    ("18.1", "the victims", """
def blame(waits):
    return [rank for rank, others in enumerate(waits) if others]
""", "they are the victims"),
    ("18.1", "who is waited for most", """
def blame(waits):
    counted = Counter(other for others in waits for other in others)
    most = max(counted.values(), default=0)
    return sorted(rank for rank in counted if counted[rank] == most)
""", ""),
]  # fmt: skip

RIGHT = [
    ("18.1", "removes ranks that nobody is waiting for", """
def blame(waits):
    n = len(waits)
    reach = [[other in waits[rank] for other in range(n)] for rank in range(n)]
    for k in range(n):
        for i in range(n):
            for j in range(n):
                reach[i][j] = reach[i][j] or (reach[i][k] and reach[k][j])
    awaited = [any(rank in others for others in waits) for rank in range(n)]
    return [r for r in range(n) if reach[r][r] or (awaited[r] and not waits[r])]
"""),
    ("18.1", "colors", """
def blame(waits):
    found = set()
    for start in range(len(waits)):
        layer = set(waits[start])
        seen = set()
        while layer - seen:
            seen |= layer
            layer = {other for rank in layer for other in waits[rank]}
        if start in seen:
            found.add(start)
        found |= {rank for rank in seen if not waits[rank]}
    return sorted(found)
"""),
    ("18.1", "recursion", """
def blame(waits):
    def follow(rank, seen):
        for other in waits[rank]:
            if other not in seen:
                seen.add(other)
                follow(other, seen)
        return seen
    all_of = [follow(rank, set()) for rank in range(len(waits))]
    ends = set().union(*all_of) if all_of else set()
    return sorted({r for r in ends if not waits[r]} | {r for r, of in enumerate(all_of) if r in of})
"""),
    ("18.2", "line by line", """
def groups(dumps, file):
    places = []
    for dump in dumps:
        place = ""
        for line in dump.splitlines():
            if line.startswith(("Thread", "Current thread")):
                place = ""
            elif line.startswith(f'  File "{file}", line ') and not place:
                number, _, name = line.rpartition(", line ")[2].partition(" in ")
                place = f"{name}, line {number}"
        places.append(place)
    found = [[p, [r for r, q in enumerate(places) if q == p]] for p in dict.fromkeys(places)]
    found.sort(key=lambda pair: (len(pair[1]), pair[1][0]))
    return found
"""),
    ("18.2", "tuples", """
def groups(dumps, file):
    found = {}
    for rank, dump in enumerate(dumps):
        main = dump[dump.rindex("Thread 0x"):]
        match = re.search(r'^  File "' + re.escape(file) + r'", line (\\d+) in (.*)$', main, re.M)
        place = f"{match[2]}, line {match[1]}" if match else ""
        found[place] = [*found.get(place, []), rank]
    return [(p, r) for p, r in sorted(found.items(), key=lambda i: (len(i[1]), i[1]))]
"""),
    ("18.2", "two sorts", """
def groups(dumps, file):
    found = {}
    for rank in range(len(dumps)):
        frames = []
        for line in dumps[rank].split("Thread ")[-1].split("\\n"):
            parts = line.split('"')
            if len(parts) == 3 and parts[1] == file:
                _, number, _, name = parts[2].split(" ", 4)[1:]
                frames.append(name + ", line " + number)
        found.setdefault((frames or [""])[0], []).append(rank)
    ordered = sorted(found.items(), key=lambda item: item[1][0])
    ordered = sorted(ordered, key=lambda item: len(item[1]))
    return [list(item) for item in ordered]
"""),
    ("18.3", "counts by hand", """
def first_difference(dumps):
    start = 1
    for dump in dumps:
        if len(dump) > 0:
            start = max(start, dump[0]["seq"])
    end = max([dump[-1]["seq"] for dump in dumps if dump] + [0])
    for seq in range(start, end + 1):
        row = [next((e for e in dump if e["seq"] == seq), None) for dump in dumps]
        missing = [r for r, e in enumerate(row) if e is None]
        present = [r for r, e in enumerate(row) if e is not None]
        if missing:
            return [seq, min(missing, present, key=len), "missing"]
        for what in ["call", "sizes", "line"]:
            by_value = {}
            for r, e in enumerate(row):
                by_value.setdefault(repr(e[what]), []).append(r)
            if len(by_value) > 1:
                largest = max(by_value.values(), key=len)
                return [seq, [r for r in range(len(dumps)) if r not in largest], what]
"""),
    ("18.3", "sets of numbers", """
def first_difference(dumps):
    known = [dict((e["seq"], e) for e in dump) for dump in dumps]
    numbers = sorted(set().union(*known))
    first = max(min(of) for of in known if of)
    for seq in (n for n in numbers if n >= first):
        for what in ("missing", "call", "sizes", "line"):
            seen = [seq in of if what == "missing" else of[seq][what] for of in known]
            best = max(seen, key=seen.count)
            culprits = [r for r, one in enumerate(seen) if one != best]
            if culprits:
                return (seq, culprits, what)
    return None
"""),
    ("18.3", "one tuple per entry", """
def first_difference(dumps):
    words = ("call", "sizes", "line")
    rows = [{e["seq"]: tuple(str(e[w]) for w in words) for e in d} for d in dumps]
    lo = max(min(r) for r in rows if r)
    hi = max(max(r) for r in rows if r)
    while lo <= hi:
        at = [r.get(lo) for r in rows]
        if len(set(at)) > 1:
            gone = [a is None for a in at]
            columns = [gone] if any(gone) else list(zip(*at))
            names = ["missing"] if any(gone) else list(words)
            for name, column in zip(names, columns):
                most = Counter(column).most_common(1)[0][0]
                if any(c != most for c in column):
                    return lo, [k for k, c in enumerate(column) if c != most], name
        lo += 1
    return None
"""),
    ("18.4", "a recursion", """
def calls_in(step, op, labels):
    def label_of(event):
        if event is None:
            return ""
        return event.name if event.name in labels else label_of(event.cpu_parent)
    with torch.profiler.profile() as p:
        step()
    found = Counter(label_of(e.cpu_parent) for e in p.events() if e.name == op)
    return {name: found[name] for name in ["", *labels]}
"""),
    ("18.4", "from the top", """
def calls_in(step, op, labels):
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        step()
    counts = {"": 0} | {label: 0 for label in labels}
    def walk(event, label):
        if event.name in labels:
            label = event.name
        if event.name == op:
            counts[label] += 1
        for child in event.cpu_children:
            walk(child, label)
    for event in prof.events():
        if event.cpu_parent is None:
            walk(event, "")
    return counts
"""),
    ("18.4", "start and stop", """
def calls_in(step, op, labels):
    prof = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
    prof.start()
    step()
    prof.stop()
    counts = {label: 0 for label in labels}
    counts[""] = 0
    for event in prof.events():
        if event.name != op:
            continue
        chain = []
        while event:
            chain.append(event.name)
            event = event.cpu_parent
        inside = [name for name in chain if name in labels]
        counts[inside[0] if inside else ""] += 1
    return counts
"""),
    ("18.5", "sha256, and bisect", """
import bisect

def digest(tensor):
    tensor = tensor.detach()
    hashed = hashlib.sha256(repr((str(tensor.dtype), tuple(tensor.shape))).encode())
    hashed.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()

def find_flip(digests_at, steps):
    seen = {}
    def bad(step):
        seen[step] = digests_at(step)
        return len({str(sorted(one.items())) for one in seen[step]}) > 1
    step = bisect.bisect_left(range(1, steps), True, key=bad) + 1
    replicas = seen[step] if step in seen else digests_at(step)
    for name in replicas[0]:
        column = [one[name] for one in replicas]
        for rank in range(len(column)):
            if column.count(column[rank]) == 1:
                return [step, rank, name]
"""),
    ("18.5", "from the end", """
def digest(tensor):
    data = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    value = zlib.crc32(str(tensor.dtype).encode())
    value = zlib.crc32(str(tuple(tensor.shape)).encode(), value)
    return f"{zlib.crc32(data.view(torch.uint8).numpy().tobytes(), value):08x}"

def find_flip(digests_at, steps):
    low, high, memory = 1, steps, {}
    while low < high:
        step = (low + high) // 2
        memory[step] = digests_at(step)
        if any(one != memory[step][0] for one in memory[step][1:]):
            high = step
        else:
            low = step + 1
    last = memory.get(low) or digests_at(low)
    rank = next(r for r, one in enumerate(last) if sum(one == other for other in last) == 1)
    other = last[rank - 1]
    return low, rank, next(name for name in other if other[name] != last[rank][name])
"""),
    ("18.5", "blake2 and a recursion", """
def digest(tensor):
    about = f"{tuple(tensor.shape)}{tensor.dtype}".encode()
    row = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return int(hashlib.blake2b(row.tobytes(), key=about, digest_size=8).hexdigest(), 16)

def find_flip(digests_at, steps):
    def search(good, bad, found):
        if bad - good == 1:
            return bad, found or digests_at(bad)
        middle = good + (bad - good) // 2
        now = digests_at(middle)
        if now.count(now[0]) == len(now):
            return search(middle, bad, found)
        return search(good, middle, now)
    step, found = search(0, steps, None)
    odd = [r for r in range(len(found)) if found.count(found[r]) == 1][0]
    name = [n for n in found[0] if found[odd][n] != found[(odd + 1) % len(found)][n]][0]
    return step, odd, name
"""),
]  # fmt: skip

WRONG += [
    (
        "18.5",
        "16 bits of a checksum",
        """
    def digest(tensor):
        row = tensor.detach().contiguous().reshape(-1)
        about = f"{tensor.dtype} {list(tensor.shape)} "
        return zlib.crc32(about.encode() + row.view(torch.uint8).numpy().tobytes()) & 0xFFFF
    """,
        "different tensors have only",
    ),
    (
        "18.5",
        "all numbers as float64",
        """
    def digest(tensor):
        row = tensor.detach().double().contiguous().reshape(-1)
        about = f"{tensor.dtype} {list(tensor.shape)} "
        return zlib.crc32(about.encode() + row.view(torch.uint8).numpy().tobytes())
    """,
        "the lowest bit of a large integer",
    ),
]
WRONG += ward.WRONG
RIGHT += ward.RIGHT
