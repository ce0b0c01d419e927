"""Check of a mapping in lab 11: a mix for a model on a machine, with its time, memory and levels.

Each rank answers for other models and machines. The answers are numbers of given formulas, so no
verdict depends on a measured time.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from utils.checks.comparison import is_number
from utils.checks.task import Report, Step, facts, task, to_each
from utils.checks.trials import enough
from utils.cluster.questions import Ranks

from .mix_search import RECOMPUTES, reason
from .mixes import Estimate, Mix, MixError, check, estimate
from .probes import Case, mix_of, probe_mapping
from .sharding import WORLD
from .step_costs import axes_of, groups, levels

#: How far an answer may be from the best time, and from the formulas.
TOLERANCE = 0.05
MICROBATCHES = (1, 2, 4, 8)
#: How far the answer `memory` may be, called with the activations that it should add.
EXACT = 0.002
KEYS = ("mix", "seconds", "memory", "levels")
LONG = {"sequence": 131072}
TINY = {"vocabulary": 256, "sequence": 128}

#: For each rank, sizes of a transformer, a machine of the catalog, its levels' units, and batches.
#: The check draws a batch, and each size that is a range. Heads of drawn models have 128 channels.
CASES: tuple[tuple[tuple[dict, str, dict, tuple[int, ...]], ...], ...] = (
    (
        ({"layers": 64, "width": 8192, "heads": 64}, "cluster", {}, (1024,)),
        ({"layers": range(24, 97, 4), "heads": range(24, 97, 4)}, "cluster", {}, (1024, 2048)),
    ),
    (
        ({"layers": 192, "width": 20480, "heads": 160}, "cluster", {}, (2048,)),
        (
            {"layers": range(24, 65, 4), "heads": range(24, 65, 4)},
            "cluster",
            {"spine": 4},
            (256, 512, 1024),
        ),
    ),
    (
        ({"layers": 48, "width": 6144, "heads": 48}, "rack-nvlink", {"node": 16}, (256, 512)),
        ({"layers": 96, "width": 12288, "heads": 96}, "rack-nvlink", {}, (64, 128)),  # fits nowhere
        # The best mix has one axis, tensor 24, and any other mix is at least 14 % slower.
        ({"layers": 6, "width": 12288, "heads": 96}, "selene", {"node": 6, "fabric": 4}, (2,)),
    ),
    (
        ({"layers": 48, "width": 4096, "heads": 32}, "selene", {"node": 4, "fabric": 16}, (128,)),
        ({"layers": range(16, 49, 2), "heads": range(16, 41, 2)}, "rack-pcie", {}, (32, 64, 128)),
        # Tensor 2 × pipeline 5 × data 2 would be faster, with 20 of the 24 devices.
        (
            {"layers": 40, "width": 1536, "heads": 12},
            "cluster",
            {"node": 4, "rack": 3, "spine": 2},
            (64,),
        ),
    ),
    (
        # Eight ranks of the data axis don't divide a rack of twelve devices.
        (
            {"layers": 36, "width": 6144, "heads": 48},
            "cluster",
            {"node": 4, "rack": 3, "spine": 2},
            (128,),
        ),
        ({"layers": 40, "width": 5120, "heads": 40} | LONG, "selene", {"fabric": 2}, (16, 32)),
        # Only mixes without a data axis fit.
        (
            {"layers": 24, "width": 12288, "heads": 96},
            "cluster",
            {"node": 3, "rack": 4, "spine": 1},
            (32,),
        ),
    ),
    (
        ({"layers": 8, "width": 256, "heads": 4} | TINY, "four-nodes", {}, (32, 64)),
        ({"layers": range(6, 17), "heads": range(4, 13)} | TINY, "laptop", {}, (24, 32, 40, 48)),
        # Devices of 4 GB, and the fastest mix on larger ones needs 10 GB.
        ({"layers": 16, "width": 2048, "heads": 16}, "four-nodes", {}, (16,)),
    ),
)

#: Mixes for which `levels` and `memory` are called, each with its model and machine.
MIXES: tuple[tuple[tuple[dict, str, dict, int], dict[str, Any]], ...] = (
    ((CASES[0][0][0], "cluster", {}, 1024), {"data": 128, "tensor": 8, "microbatch": 8}),
    ((CASES[1][0][0], "cluster", {}, 2048), {"data": 4, "tensor": 8, "pipeline": 32}),
    ((*CASES[4][0][:3], 128), {"data": 4, "tensor": 2, "pipeline": 3}),
)


def drawn_cases(seed: int) -> list[list[tuple]]:
    """Return for each rank the arguments of its cases, so that no answer can know the models."""
    draw = random.Random(seed)

    def one(sizes: dict, name: str, units: dict, batches: tuple[int, ...]) -> tuple:
        chosen = {k: draw.choice(v) if isinstance(v, range) else v for k, v in sizes.items()}
        return {"width": 128 * chosen["heads"]} | chosen, name, units, draw.choice(batches)

    return [[one(*case) for case in of_rank] for of_rank in CASES]


@functools.lru_cache(maxsize=64)
def optimum(case: Case) -> Estimate | None:
    """Return the fastest mix that fits, of those that the task names; None if none fits."""
    n, model = case.machine.devices, case.model
    tensors = [k for k in range(1, n + 1) if n % k == model.heads % k == 0]
    pipelines = [k for k in range(1, n + 1) if n % k == model.layers % k == 0]
    found = []
    for tensor, pipeline, b, recompute in itertools.product(
        tensors, pipelines, MICROBATCHES, RECOMPUTES
    ):
        data, rest = divmod(n, tensor * pipeline)
        if rest == 0 and case.batch % (data * b) == 0:
            mix = Mix(data, tensor, pipeline, zero=1, microbatch=b, recompute=recompute)
            found.append(estimate(model, mix, case.machine, case.batch))
    return min((one for one in found if one.fits), key=lambda one: one.seconds, default=None)


def planned() -> list[tuple[Case, Estimate]]:
    """Return the cases and estimates of `MIXES`."""
    found = []
    for given, sizes in MIXES:
        case, mix = Case.of(*given), mix_of(sizes)
        found.append((case, estimate(case.model, mix, case.machine, case.batch)))
    return found


@task("11.8", "map a model onto a machine", points=3)
def whole_machine(ranks: Ranks, report: Report) -> None:
    """Judge whether each mix is possible, fits, and is fast, and what is said about it."""
    if not enough(ranks, report, WORLD):
        return
    cases = drawn_cases(report.seed)
    own = planned()
    mixes = [
        [*given, sizes, estimated.held["activations"]]
        for (given, sizes), (_, estimated) in zip(MIXES, own, strict=True)
    ]
    for answer in report.answers(ranks, probe_mapping, each=to_each(cases=cases), mixes=mixes):
        parts = zip(own, answer.value["parts"], strict=True)
        steps = [_parts(*known, got) for known, got in parts]
        mapped = zip(cases[answer.rank], answer.value["mapped"], strict=True)
        steps += [_steps(Case.of(*given), got) for given, got in mapped]
        report.follow(answer.rank, itertools.chain(*steps))


def _parts(case: Case, own: Estimate, got: dict[str, Any]) -> Iterator[Step]:
    """Yield the steps that `levels` and `memory` are right for a mix."""
    yield _levels(case, own.mix, got["levels"])
    yield from _needs(case, own, got["memory"], EXACT)


def _steps(case: Case, got: dict[str, Any]) -> Iterator[Step]:
    result, best = got["result"], optimum(case)
    yield facts({f"{case}: You changed the model or the machine. Only read them": got["changed"]})
    if best is None:
        shown = _mix_in(result)
        said = f"You returned {shown}, but no mix fits on these devices. Return None"
        yield facts({f"{case}: {said}": result is not None})
        return
    yield facts({f"{case}: You returned None, but this mix fits: {best.mix}": result is None})
    yield _form(case, result)
    mix = Mix(**result["mix"])
    yield _possible(case, mix)
    own = estimate(case.model, mix, case.machine, case.batch)
    # A wrong cost explains a wrong choice, so known mistakes come first.
    if not _near(result["seconds"], own.seconds):
        seconds = f"{case}, {mix}: seconds"
        yield _known(seconds, result["seconds"], _wrong_seconds(own))
        yield facts({f"{seconds}: {_other(result['seconds'], own.seconds)}": True})
    yield from _needs(case, own, result["memory"], TOLERANCE)
    yield _fast(case, own, best)
    yield _levels(case, mix, result["levels"])


def _needs(case: Case, own: Estimate, got: Any, tolerance: float) -> Iterator[Step]:
    """Yield the steps that a number of bytes is right."""
    if not _near(got, own.memory, tolerance):
        memory = f"{case}, {own.mix}: memory"
        yield _known(memory, got, _wrong_memory(own))
        shown = f"{got / 1e9:.4g} GB" if is_number(got) else got
        yield facts({f"{memory}: you return {shown}, and it needs {own.memory / 1e9:.4g} GB": True})


def _mix_in(result: Any) -> str:
    if not isinstance(result, dict):
        return str(result)
    if "mix" not in result:
        return "a dict without a mix"
    made = result["mix"]
    return str(Mix(**made)) if isinstance(made, dict) else f"a dict whose mix is {made}"


def _form(case: Case, result: Any) -> Step:
    """Return the step that the result has the form that the task asks for."""
    wanted = "Return a dict with the keys " + ", ".join(KEYS)
    if not isinstance(result, dict):
        return facts({f"You returned {result}. {wanted}": True})
    missing = [key for key in KEYS if key not in result]
    mix = result.get("mix")
    sizes = {f.name: mix[f.name] for f in fields(Mix)} if isinstance(mix, dict) else {}
    broken = [name for name, size in sizes.items() if not isinstance(size, int | str)]
    return facts({
        f"The key {' and '.join(missing)} is missing. {wanted}": missing,
        f"The entry mix is {mix}. Make it a Mix, such as Mix(data=4, tensor=8)": not sizes,
        f"{case}: {' and '.join(broken)} of your mix is not an int. Divide with //": broken,
    })


def _possible(case: Case, mix: Mix) -> Step:
    n = case.machine.devices
    problem = ""
    try:
        check(case.model, mix, case.batch)
    except MixError as error:
        problem = str(error).removesuffix(".")
    return facts({
        f"{case}: Your mix has {mix.ranks:,} ranks ({mix}), and the machine has {n:,} devices. "
        "Choose data so that data × tensor × pipeline is the number of devices": mix.ranks != n,
        f"{case}: {problem}. Leave out such mixes": problem,
        f"{case}: Your mix ({mix}) has zero={mix.zero}. Use zero=1": mix.zero != 1 < mix.data,
        f"{case}: Your mix has interleave={mix.interleave}. Use interleave=1": mix.interleave > 1,
        f"{case}: Your mix has recompute={mix.recompute!r}. Choose one of "
        f"{', '.join(RECOMPUTES)}": mix.recompute not in RECOMPUTES,
    })


def _fast(case: Case, own: Estimate, best: Estimate) -> Step:
    """Return the step that the mix fits and takes at most a little longer than the fastest one."""
    needs = (
        f"{own.memory / 1e9:.1f} GB of {case.machine.device.memory / 1e9:.0f} GB, and the largest "
        f"part is {own.largest} ({own.held[own.largest] / 1e9:.1f} GB)"
    )
    slow = own.seconds > (1 + TOLERANCE) * best.seconds
    return facts({
        f"{case}: Your mix ({own.mix}) doesn't fit: it needs {needs}. Compare the memory before "
        "the seconds": not own.fits,
        f"{case}: Your mix ({own.mix}) takes {own.seconds:.3g} s, but the fastest that fits takes "
        f"{best.seconds:.3g} s. It loses most here: {reason(own, best)}. Try all mixes, and keep "
        "the fastest": slow,
    })


def _known(what: str, got: Any, wrong: Mapping[str, float]) -> Step:
    """Return the step that a number is not the result of a known mistake."""
    near = {said: abs(got - value) for said, value in wrong.items() if _near(got, value, 0.002)}
    said = min(near, key=lambda text: near[text], default="")
    return facts({f"{what}: {said}": said})


def _other(got: Any, expected: float) -> str:
    return f"expected {expected:.4g}, got {got if isinstance(got, str) else format(got, '.4g')}"


def _near(got: Any, value: float, tolerance: float = TOLERANCE) -> bool:
    return is_number(got) and abs(got - value) <= tolerance * abs(value)


def _wrong_seconds(own: Estimate) -> dict[str, float]:
    count, stages = own.mix.microbatches(own.batch), own.mix.pipeline
    bubble = "you left out the pipeline's bubble"
    return {
        "you returned milliseconds. Return seconds": 1e3 * own.seconds,
        f"{bubble}. Return what step_cost says": own.seconds - own.times["bubble"],
        f"{bubble}. Don't change what step_cost says": own.seconds * count / (count + stages - 1),
        "you counted only the computing. Return what step_cost says": own.times["compute"],
        "this is the time of one microbatch. Return the step's time": own.seconds / count,
    }


def _wrong_memory(own: Estimate) -> dict[str, float]:
    total, held, mix, data = own.memory, own.held, own.mix, own.mix.data
    states = total - held["activations"]
    embedding = (6 + 12 / data) * own.model.embedding / mix.tensor
    return {
        "you returned GB. Return bytes": total / 1e9,
        "you left out the activations. Add what step_cost says": states,
        "these are only the activations. Add weights, gradients, and optimizer": total - states,
        "every rank has the whole optimizer. With ZeRO-1, divide it by data": (
            total + (data - 1) * held["optimizer"]
        ),
        "you divided everything by data. ZeRO-1 divides only the optimizer": (
            9 * held["weights"] / data + held["activations"]
        ),
        "you divided the optimizer by all ranks. ZeRO-1 divides it by data": (
            total + (data / mix.ranks - 1) * held["optimizer"]
        ),
        "you divided the gradients too. ZeRO-1 divides only the optimizer": (
            total + (1 / data - 1) * held["gradients"]
        ),
        "you left out the optimizer": total - held["optimizer"],
        "you left out the embedding": total - embedding,
        "you divided the embedding by pipeline. Divide only the layers": (
            total + (1 / mix.pipeline - 1) * embedding
        ),
        "you didn't divide the embedding by tensor": total + (mix.tensor - 1) * embedding,
        "this is the memory of all ranks together. Return one rank's": mix.ranks * total,
    }


def _levels(case: Case, mix: Mix, got: Any) -> Step:
    """Return the step that each axis has the name of its highest level."""
    right, names = levels(mix, case.machine), [level.name for level in case.machine.levels]
    if not isinstance(got, dict):
        return facts({f"{case}: The entry levels is no dict. Return axis → name": True})
    unknown = sorted({str(name) for name in got.values()} - set(names))
    wrong = [axis for axis in right if got.get(axis) in names and got[axis] != right[axis]]
    return facts({
        f"{case}, {mix}: levels lacks {', '.join(right.keys() - got.keys())}. Name each axis "
        "that has several ranks": right.keys() - got.keys(),
        f"{case}, {mix}: levels has {', '.join(got.keys() - right.keys())}, which has one rank. "
        "Leave out such axes": got.keys() - right.keys(),
        f"{case}: The machine has no level {', '.join(unknown)}, but {', '.join(names)}. Use the "
        "names of machine.levels": unknown,
        **{f"{case}, {mix}: {_crossing(case, mix, axis, got[axis])}": True for axis in wrong[:1]},
    })


def _crossing(case: Case, mix: Mix, axis: str, got: Any) -> str:
    """Return why an axis has another level, with a group that shows it."""
    right, sizes = levels(mix, case.machine)[axis], case.machine.sizes
    size = sizes[[level.name for level in case.machine.levels].index(got)]
    members = groups(mix.ranks, axes_of(mix, (axis,)))
    crossing = next((row for row in members.tolist() if len({r // size for r in row}) > 1), None)
    if crossing is None:
        return f"the {axis} axis stays within the {right}, but you say {got}"
    ends = f"{crossing[0]}, {crossing[1]}, … {crossing[-1]}" if len(crossing) > 2 else f"{crossing}"
    return (
        f"the {axis} axis crosses the {right}, but you say {got}. Its group {ends} is in "
        f"different units of {size} devices"
    )
