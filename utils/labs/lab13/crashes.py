"""The check of a save that may be interrupted: what is on the disk after each file operation.

Each rank saves to a separate copy of the folder, and :mod:`.save_probe` notes what a crash would
leave. :func:`states` combines the copies into what the machine has if all ranks end together: one
rank is after its k-th operation, and the others are as far as the collectives between them require,
or as far as they allow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from utils.checks.comparison import inside, some, waited
from utils.checks.task import Report, Step, communication, facts, task
from utils.checks.trials import judge_each_group, on
from utils.cluster.questions import Ranks

from .save_probe import NEW, NEW_FOLDER, OLD, OLD_FOLDER, probe_save, whole_state

#: What may end the ranks, in the order of :attr:`Moment.left`.
KINDS = ("kill", "power", "power, folders kept", "power, new folders lost")


def states(ranks: Sequence[Sequence[dict]]) -> Iterator[tuple[str, int, list[int]]]:
    """Yield moments at which all ranks may end together.

    Args:
        ranks: the moments of each rank, with ``calls`` and ``sure`` as in `Moment`.

    Yields:
        What ends the ranks (one of :data:`KINDS`), the rank that a message would name, and the
        number of each rank's moment.
    """
    for rank, moments in enumerate(ranks):
        for k, moment in enumerate(moments):
            behind = []
            ahead = []
            for theirs in ranks:
                # The others have called what this rank is sure of, and done all that comes before.
                must = [j for j, m in enumerate(theirs) if m["calls"] < moment["sure"]]
                can = [j for j, m in enumerate(theirs) if m["sure"] <= moment["calls"]]
                behind.append(max(must, default=0))
                ahead.append(max(can, default=0))
            behind[rank] = ahead[rank] = k
            for chosen in (behind, ahead):
                for kind in KINDS:
                    yield kind, rank, chosen


# -- 13.3: a save that may end at any moment --------------------------------------------------


@task("13.3", "a save that may crash", points=4)
def safe_save(ranks: Ranks, report: Report) -> None:
    """Judge whether `latest` names a whole checkpoint whenever the ranks end."""
    cases = [{"partition": [[1, 2, 3], [0]]}, {"partition": None}]

    def judge(_: dict[str, Any], members: list[int], results: list[dict]) -> None:
        kept_in_group = [
            report.follow(rank, [communication(result["calls"], inside(members), waited)])
            for rank, result in zip(members, results, strict=True)
        ]
        if all(kept_in_group):
            report.follow(None, _saves(members, results))

    judge_each_group(ranks, report, probe_save, cases, judge)


def to_rank(rank: int, step: Step) -> Step:
    """Return a step whose problem is reported for this rank."""
    return lambda report, _: step(report, rank)


def _saves(members: list[int], results: list[dict]) -> Iterator[Step]:
    for place, rank in enumerate(members):
        wrong = _wrong_files(members, results, place) | _shared_files(members, results, place)
        yield to_rank(rank, facts(wrong))
    for left, place, kill, done in _ends(results):
        for step in _loaded(left, len(members), kill, done, on(members)):
            yield to_rank(members[place], step)
    for rank, result in zip(members, results, strict=True):
        yield to_rank(rank, communication(result["calls"], some(members)))


def _ends(results: list[dict]) -> Iterator[tuple[dict[str, str], int, bool, bool]]:
    """Yield each distinct end once: the files, the rank to name, if by a kill, if all were done."""
    moments = [result["moments"] for result in results]
    last = [len(of_rank) - 1 for of_rank in moments]
    seen = set()
    for kind, place, chosen in [*states(moments), *((kind, 0, last) for kind in KINDS)]:
        left = _left(results, chosen, kind)
        how = kind == "kill", chosen == last
        key = how, tuple(sorted(left.items()))
        if key not in seen:
            seen.add(key)
            yield left, place, *how


def _at_first(results: list[dict]) -> dict[str, str]:
    return results[0]["moments"][0]["left"][0]


def _wrong_files(members: list[int], results: list[dict], place: int) -> dict[str, object]:
    """Return what is wrong with the files that a rank writes and leaves at the end."""
    first = _at_first(results)
    result = results[place]
    path = f"{NEW_FOLDER}/rank-{place}.pt"
    last = result["moments"][-1]["left"][0]
    changed = {name for name, text in last.items() if first.get(name) != text}
    others = [name for name in changed if name.endswith(".pt") and name != path]
    overwritten = [name for name in others if name.startswith(OLD_FOLDER)]
    markers = [rank for rank, other in zip(members, results, strict=True) if _writes_marker(other)]
    content = last.get(path)
    left_by_crash = content == first.get(path) is not None
    return {
        f"You overwrote {''.join(overwritten[:1])}, which a crash now would need. Write into the "
        "folder of the new step": overwritten,
        f"You wrote {''.join(others[:1])} on group rank {place}. Write {path} there": others,
        f"You left no {path}, only {result['files'][:6]}. Write each rank's state into its file": (
            path not in result["files"]
        ),
        f"{path} is still what a crashed save left. Let every rank write its file": left_by_crash,
        f"{path} is {content}. Save the whole state, so that torch.load returns it": (
            content != whole_state(NEW, place)
        ),
        "No rank wrote `latest`. Let group rank 0 write it, which place_and_size(group) finds: "
        "it need not be rank 0 of the world": not markers,
        f"Ranks {markers} wrote `latest`. Let only group rank 0 write it": len(markers) > 1,
    }


def _writes_marker(result: dict) -> bool:
    return any(moment["left"][0].get("latest") != OLD_FOLDER for moment in result["moments"])


def _shared_files(members: list[int], results: list[dict], place: int) -> dict[str, object]:
    """Return what would go wrong in a shared folder, although each rank has a copy here."""
    first = _at_first(results)
    written = [
        {path for moment in result["moments"] for path in moment["left"][0]} - set(first)
        for result in results
    ]
    others = [k for k in range(len(members)) if k != place]
    shared = sorted(path for k in others for path in written[place] & written[k])
    paths = {k: f"{NEW_FOLDER}/rank-{k}.pt" for k in others}
    removed = [
        path for k, path in paths.items() if _removes(results[place], results[k], first, path)
    ]
    return {
        f"Several ranks write {''.join(shared[:1])} at the same time, because all ranks of the lab "
        "save into one folder. Give each rank's temporary file a separate name": shared,
        f"You removed {''.join(removed[:1])}, which another rank may just have written. Remove "
        "only this rank's files": removed,
    }


def _removes(result: dict, other: dict, first: dict[str, str], path: str) -> bool:
    """Return whether a rank may remove a file after the other rank has written it."""
    wrote = (m for m in other["moments"] if m["left"][0].get(path) != first.get(path))
    gone = (m for m in result["moments"] if path not in m["left"][0])
    begins, ends = next(wrote, None), next(gone, None)
    return bool(path in first and begins and ends and begins["sure"] <= ends["calls"])


def _left(results: list[dict], chosen: list[int], kind: str) -> dict[str, str]:
    """Return the shared disk's content: each file as the rank that changes it leaves it."""
    trees = [
        result["moments"][k]["left"][KINDS.index(kind)]
        for result, k in zip(results, chosen, strict=True)
    ]
    first = _at_first(results)
    left = {}
    for path in set(first).union(*trees):
        changed = [tree.get(path) for tree in trees if tree.get(path) != first.get(path)]
        # If a rank removes another rank's file, it does so in its copy, but the file was written.
        changed.sort(key=lambda content: content is None)
        content = changed[0] if changed else first.get(path)
        if content is not None:
            left[path] = content
    return left


def _loaded(left: dict[str, str], p: int, kill: bool, done: bool, where: str) -> Iterator[Step]:
    """Judge whether a rank could load what is left after a kill or a power failure."""
    marker = left.get("latest", "")
    end = f"{where}: {'a kill' if kill else 'a power failure'}"
    why = (
        "open(…, 'w') empties the file before the text comes. Write to another file, then call "
        "os.replace"
        if kill
        else "its name may be on the disk without its content. Call file.flush() and os.fsync "
        "before you rename the file"
    )
    yield facts({
        f"{end} may leave `latest` empty or missing, because {why}": not marker,
        f"{end} may leave {marker!r} in `latest` instead of the folder's name, {NEW_FOLDER!r}. "
        "Write it to another file, then call os.replace": marker not in (OLD_FOLDER, NEW_FOLDER),
    })
    for place in range(p):
        content = left.get(f"{marker}/rank-{place}.pt", "missing")
        yield _file(marker, place, content, kill, where)
    yield facts({
        f"{where}: a power failure after save has returned may bring the old `latest` back. Let "
        "one rank write it, then call os.fsync, os.replace and "
        "flush_folder(folder)": done and marker == OLD_FOLDER
    })


def _file(marker: str, place: int, content: str, kill: bool, where: str) -> Step:
    """Judge the content of a rank's file, after a kill or a power failure."""
    end = f"{where}: {'a kill' if kill else 'a power failure'}"
    old = marker == OLD_FOLDER
    name = f"rank-{place}.pt"
    why = (
        "you wrote the marker too early. Write the data of all ranks first, then call a barrier, "
        "then write the marker"
        if kill
        else "its content or its name isn't on the disk yet. Before the marker, call flush_folder "
        "of the parent after mkdir, file.flush() and os.fsync before the renaming, and "
        "flush_folder of the file's folder after it"
    )
    wrong = content != whole_state(OLD if old else NEW, place)
    return facts({
        f"{end} during the save leaves `latest` at {marker}, whose {name} is {content}, because "
        "you overwrote the only complete checkpoint. Write into a new folder": wrong and old,
        f"{where}: {marker}/{name} is {content}. Let each rank save its own state": wrong
        and content.startswith("the state"),
        f"{end} may leave `latest` at {marker}, whose {name} is {content}, because {why}": wrong,
    })
