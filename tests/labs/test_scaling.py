"""Scaling: fits find again what is measured, jobs leave nothing behind, predictions add up."""

import functools
import json
import math
import os

import numpy as np
import psutil
import pytest

import utils.forecast
from utils.forecast.run import Call, Run
from utils.jobs import watchdog
from utils.labs.lab05 import forecast, laws, many_ranks, runs
from utils.labs.shared import script_runs, slurm_script
from utils.mpi.benchmark.alpha_beta import fit_alpha_beta

SIZES = 4.0 ** np.arange(1, 14)  # 4 B … 64 MiB
ALPHA, BETA = 2e-6, 1 / 5e9


def times():
    return ALPHA + SIZES * BETA


def test_latency_and_bandwidth_of_exact_times_are_found():
    fit = fit_alpha_beta(SIZES, times())
    assert fit.alpha == pytest.approx(ALPHA)
    assert fit.bandwidth == pytest.approx(5e9)
    assert fit.max_error == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_five_percent_of_noise_moves_latency_and_bandwidth_little(seed):
    noise = np.random.default_rng(seed).lognormal(0, 0.05, len(SIZES))
    fit = fit_alpha_beta(SIZES, times() * noise)
    assert fit.alpha == pytest.approx(ALPHA, rel=0.1)
    assert fit.beta == pytest.approx(BETA, rel=0.1)
    assert 0.005 < fit.error < 0.1


@pytest.mark.parametrize("where", [(0,), (12,), (3, 9)])
def test_samples_that_took_ten_times_as_long_do_not_spoil_the_fit(where):
    disturbed = times()
    disturbed[list(where)] *= 10
    fit = fit_alpha_beta(SIZES, disturbed)
    assert fit.alpha == pytest.approx(ALPHA, rel=0.05)
    assert fit.beta == pytest.approx(BETA, rel=0.05)
    assert fit.max_error == pytest.approx(0.9, abs=0.05)  # and they are not hidden


def test_the_smallest_message_counts_as_much_as_the_largest():
    """Without relative errors, 64 MiB would decide alone and α could be anything."""
    slower = times()
    slower[-1] *= 1.05
    assert fit_alpha_beta(SIZES, slower).alpha == pytest.approx(ALPHA, rel=0.05)


def test_times_that_fall_with_the_size_give_no_negative_bandwidth():
    fit = fit_alpha_beta([4, 1024], [3e-6, 2e-6])
    assert fit.beta == 0
    assert fit.bandwidth == math.inf
    assert 2e-6 < fit.alpha < 3e-6


def test_a_bandwidth_without_latency_gives_no_negative_latency():
    fit = fit_alpha_beta([1e6, 2e6, 4e6], [1e-3, 2.2e-3, 5e-3])
    assert fit.alpha == 0
    assert fit.bandwidth == pytest.approx(1e9, rel=0.25)


def test_a_prediction_is_alpha_and_beta_per_byte_for_one_size_and_for_many():
    fit = fit_alpha_beta([0, 1000], [1e-6, 2e-6])
    assert fit.predict(2000) == pytest.approx(3e-6)
    assert fit.predict([0, 2000]) == pytest.approx([1e-6, 3e-6])


@pytest.mark.parametrize(
    ("nbytes", "seconds", "said"),
    [
        ([4], [1e-6], "at least 2 different sizes"),
        ([], [], "at least 2 different sizes"),
        ([4, 4], [1e-6, 2e-6], "at least 2 different sizes"),
        ([4, 8], [1e-6], "2 sizes and 1 times"),
        ([-4, 8], [1e-6, 1e-6], "negative"),
        ([4, 8], [1e-6, -1e-6], "positive"),
        ([4, 8], [1e-6, 0.0], "positive"),
        ([4, 8], [1e-6, math.nan], "NaN"),
        ([4, math.inf], [1e-6, 1e-6], "finite"),
    ],
)
def test_measurements_that_cannot_be_fitted_are_refused_with_the_reason(nbytes, seconds, said):
    with pytest.raises(ValueError, match=said):
        fit_alpha_beta(nbytes, seconds)


# --- laws --------------------------------------------------------------------------------------

PS = (1, 2, 4, 8)


def rounds(law, serial, noise=0.0, seed=0, count=7):
    """Rounds of a machine that follows the law, T(1) being 10 s."""
    random = np.random.default_rng(seed)
    ideal = {p: 10 / law(p, serial) * (p if law is laws.gustafson else 1) for p in PS}
    return {p: (t * random.normal(1, noise, count)).tolist() for p, t in ideal.items()}


FITS = [(laws.amdahl, laws.fit_amdahl), (laws.gustafson, laws.fit_gustafson)]


@pytest.mark.parametrize(("law", "fit"), FITS)
@pytest.mark.parametrize("serial", [0.0, 0.07, 0.5, 1.0])
def test_the_serial_fraction_of_exact_times_is_found(law, fit, serial):
    found = fit(rounds(law, serial))
    assert found.serial == pytest.approx(serial, abs=1e-6)
    assert found.time == pytest.approx(10)
    assert (found.low, found.high) == pytest.approx((serial, serial), abs=1e-6)
    assert found.speedup(8) == pytest.approx(law(8, serial))


@pytest.mark.parametrize(("law", "fit"), FITS)
def test_the_interval_holds_the_serial_fraction_most_of_the_time(law, fit):
    fits = [fit(rounds(law, 0.2, noise=0.05, seed=seed)) for seed in range(20)]
    assert sum(one.low <= 0.2 <= one.high for one in fits) >= 14
    assert all(0 < one.high - one.low < 0.3 for one in fits)
    lower, upper = fits[0].band(np.array(PS))
    assert (lower <= upper).all()


@pytest.mark.parametrize(("law", "fit"), FITS)
def test_better_than_ideal_is_no_negative_fraction(law, fit):
    assert fit(rounds(law, -0.05)).serial == 0


def test_amdahl_is_bounded_and_gustafson_is_not():
    assert laws.amdahl(1e9, 0.05) == pytest.approx(20)
    assert laws.gustafson(1000, 0.05) == pytest.approx(950.05)
    assert laws.amdahl(1, 0.3) == laws.gustafson(1, 0.3) == 1


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ({1: [1.0]}, "at least 2 rank counts"),
        ({0: [1.0], 1: [1.0]}, "begin at 1"),
        ({1: [1.0], 2: []}, "2 ranks: expected a list"),
        ({1: [1.0], 2: [0.0]}, "positive"),
        ({1: [1.0], 2: [math.nan]}, "finite"),
    ],
)
def test_rounds_that_cannot_be_fitted_are_refused(measured, said):
    with pytest.raises(ValueError, match=said):
        laws.fit_amdahl(measured)


def test_a_speedup_band_pairs_slow_with_fast():
    band = laws.speedup_band([8, 9, 10, 12, 13], [4, 5, 5.5, 6.5, 7])
    assert band == pytest.approx((9 / 6.5, 10 / 5.5, 12 / 5))
    with pytest.raises(ValueError, match="positive"):
        laws.speedup_band([1.0], [0.0])


# --- predictions -------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_a_ring_sends_its_share(ranks):
    sent = forecast.messages("ring", 1000, ranks)
    assert len(sent) == 2 * (ranks - 1)
    assert sum(one.nbytes for one in sent) == pytest.approx(2000 * (ranks - 1) / ranks)


@pytest.mark.parametrize(
    ("ranks", "distances"), [(1, []), (2, [1]), (8, [1, 2, 4]), (3, [1, 1, 1])]
)
def test_recursive_doubling_sends_everything_ever_further(ranks, distances):
    sent = forecast.messages("recursive doubling", 1000, ranks)
    assert [one.distance for one in sent] == distances
    assert all(one.nbytes == 1000 for one in sent)


def test_another_pattern_is_refused():
    with pytest.raises(ValueError, match="ring, recursive doubling"):
        forecast.messages("star", 1, 2)


TABLE = 4.0 ** np.arange(1, 13)


@pytest.mark.parametrize("pattern", forecast.PATTERNS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_links_are_found_again_and_predict_other_rank_counts(pattern, ranks):
    def seconds(n, p):
        return sum(ALPHA + one.nbytes * BETA for one in forecast.messages(pattern, n, p))

    local = forecast.fit_regimes(TABLE, [seconds(n, ranks) for n in TABLE], ranks, pattern)
    for nbytes in (40, 20_480, 1_605_632):
        assert local.all_reduce(nbytes, 8) == pytest.approx(seconds(nbytes, 8), rel=1e-6)


def test_each_regime_has_its_own_line():
    times = [n * 1e-9 + (1e-6 if n <= 2**10 else 1e-5 if n <= 2**20 else 1e-4) for n in TABLE]
    local = forecast.fit_regimes(TABLE, times, 2, "recursive doubling")
    assert local.message(16) == pytest.approx(1e-6, rel=0.05)
    assert local.message(2**16) == pytest.approx(1e-5 + 2**16 * 1e-9, rel=0.05)
    assert local.message(2**23) == pytest.approx(1e-4 + 2**23 * 1e-9, rel=0.3)


def test_a_table_without_long_messages_is_refused():
    with pytest.raises(ValueError, match="at least 2 messages from 1 MiB"):
        forecast.fit_regimes([4, 64, 2**14, 2**16], [1e-6] * 4, 2)


def free(pattern):
    """Messages inside a node cost nothing."""
    nothing = fit_alpha_beta([1, 2], [1e-15, 1e-15])
    return forecast.Regimes(pattern, nothing, nothing, nothing)


def test_four_nodes_with_two_domains_each():
    link = forecast.Link(latency=1e-3, bandwidth=1e6)
    machine = forecast.Machine(nodes=4, domains=2, network=link)
    assert machine.ranks == 8
    ring = machine.all_reduce(8e6, free("ring"))
    assert ring == pytest.approx(14 * (1e-3 + 1.0))  # the slowest link sets the pace
    doubling = machine.all_reduce(8e6, free("recursive doubling"))
    assert doubling == pytest.approx(2 * (1e-3 + 16.0))  # two steps cross; two ranks share a link
    step = machine.step(0.5, [8e6, 8e6], free("ring"))
    assert step == pytest.approx(0.5 + 2 * ring)


def test_several_nodes_need_a_network():
    with pytest.raises(ValueError, match="need a network"):
        forecast.Machine(nodes=2, domains=1).all_reduce(8, free("ring"))


def test_a_prediction_has_a_band_that_knows_the_slowdown_and_the_tables_error():
    table = [n * 1e-9 * (1.1 if k % 2 else 0.9) + 1e-6 for k, n in enumerate(TABLE)]
    local = forecast.fit_regimes(TABLE, table, 2)
    machine = forecast.Machine(nodes=1, domains=2)
    low, middle, high = machine.step_band([0.9, 1.0, 1.1], [8e6], local, slowdown=1.2)
    sent = machine.all_reduce(8e6, local)
    assert middle == pytest.approx(1.2 + sent)
    assert low == pytest.approx(0.95 + sent * (1 - local.error))
    assert high == pytest.approx(1.2 * 1.05 + sent * (1 + local.error))
    assert 0.05 < local.error < 0.15
    exact = machine.step_band([1.0], [], local)
    assert exact == (1.0, 1.0, 1.0)


# --- jobs --------------------------------------------------------------------------------------

REPORT = """
import json, os
from mpi4py import MPI
comm = MPI.COMM_WORLD
threads = comm.gather(os.environ.get("OMP_NUM_THREADS"))
if comm.rank == 0:
    print("words before")
    print(json.dumps({"size": comm.size, "threads": threads, "pid": os.getpid()}))
    print("words behind")
"""


def script(tmp_path, source):
    path = tmp_path / "script.py"
    path.write_text(source)
    return path


def test_a_run_gives_the_json_the_bindings_and_survives_a_file(tmp_path):
    one = runs.run(script(tmp_path, REPORT), job=runs.Job(2, bind=False), deadline=200)
    assert one.result["size"] == 2
    assert one.result["threads"] == ["1", "1"]
    assert set(one.bindings) <= {0, 1}
    assert "-n 2" in one.command
    runs.save([one], tmp_path / "runs.json")
    assert runs.load(tmp_path / "runs.json") == [one]


def test_forgotten_threads_are_left_unset(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    one = runs.run(script(tmp_path, REPORT), job=runs.Job(1, threads=None), deadline=200)
    assert one.result["threads"] == [None]


def test_a_job_that_hangs_is_ended_with_all_its_processes_and_says_its_last_words(tmp_path):
    pids = tmp_path / "pids"
    source = f"""
import os, sys, time
open({str(pids)!r}, "a").write(f"{{os.getpid()}} ")
print("epoch 3", file=sys.stderr, flush=True)
time.sleep(9999)
"""
    said = r"(?s)was not done after 6 s.* busy .*deadline=12.*epoch 3"
    with pytest.raises(runs.RunFailed, match=said):
        runs.run(script(tmp_path, source), job=runs.Job(2), deadline=6)
    for pid in map(int, pids.read_text().split()):
        assert not psutil.pid_exists(pid) or not watchdog.alive(psutil.Process(pid))


def test_progress_comes_while_the_job_runs_and_each_line_once(tmp_path):
    source = """
import sys, time
for k in range(3):
    print(f"> line {k}", "of a job", file=sys.stderr, flush=True)
    print("other words", file=sys.stderr)
    time.sleep(0.5)
print("{}")
"""
    told = []
    runs.run(script(tmp_path, source), job=runs.Job(1), deadline=200, say=told.append)
    assert told[0].startswith("mpiexec -n 1")
    assert told[1:] == [f"  line {k} of a job" for k in range(3)]


@pytest.mark.parametrize(
    ("source", "said"),
    [("1 / 0", "ZeroDivisionError"), ("print('no numbers')", "printed no JSON object")],
)
def test_a_job_that_fails_says_its_last_words(tmp_path, source, said):
    with pytest.raises(runs.RunFailed, match=said):
        runs.run(script(tmp_path, source), job=runs.Job(1), deadline=200)


def test_a_job_that_cannot_be_started_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no script"):
        runs.run(tmp_path / "nothing.py", job=runs.Job(1))
    with pytest.raises(ValueError, match="n=0"):
        runs.run(script(tmp_path, REPORT), job=runs.Job(0))


def test_a_rehearsal_shows_the_trap_of_one_core_for_each_rank():
    server = "pack:2 numa:1 l3:1 core:4 pu:2"
    trap = runs.rehearse(server, 2, "--map-by", "ppr:1:numa", "--bind-to", "core")
    if not trap:
        pytest.skip("this mpiexec is not Open MPI's")
    right = runs.rehearse(server, 2, "--map-by", "ppr:1:numa:PE=4", "--bind-to", "core")
    assert [text.partition("core:")[2] for text in trap.values()] == ["L0]", "L4]"]
    assert [text.partition("core:")[2] for text in right.values()] == ["L0-3]", "L4-7]"]
    with pytest.raises(runs.RunFailed, match="not enough slots"):
        runs.rehearse(server, 20, "--bind-to", "core")


def test_runs_are_json(tmp_path):
    one = runs.Run(runs.Job(2, None, False), {"step": [1.0]}, 2.0, "mpiexec", {0: "bound"})
    runs.save([one], tmp_path / "runs.json")
    assert json.loads((tmp_path / "runs.json").read_text())[0]["result"] == {"step": [1.0]}
    assert one.job.label == "2 × ?, not bound"


# --- a series of rank counts -------------------------------------------------------------------


def result(ranks, **seconds):
    """What train.py writes: one strategy at 128 samples, strong, and 128 for each rank."""
    cases = [("strong", 128)] + ([("weak", 128 * ranks)] if ranks > 1 else [])
    known = [
        {"strategy": "DDP", "scaling": scaling, "minibatch": minibatch, **seconds}
        for scaling, minibatch in cases
    ]
    return {"ranks": [{"host": "node1"}] * ranks, "cases": known}


def test_the_newest_series_is_read_in_the_order_of_its_rank_counts(tmp_path):
    for job, counts, when in (("7", (1, 2, 4), 100), ("8", (8, 1), 200)):
        (tmp_path / job).mkdir()
        for ranks in counts:
            file = tmp_path / job / f"{ranks}.json"
            file.write_text(json.dumps(result(ranks)))
            os.utime(file, (when, when))
    assert list(runs.series(tmp_path)) == [1, 8]
    with pytest.raises(FileNotFoundError, match="no job has written results"):
        runs.series(tmp_path / "nothing")


def test_a_case_is_found_by_the_minibatch_of_all_ranks_or_of_each():
    two = result(2, step=[2.0, 4.0], compute=[1.0, 3.0])
    assert runs.rounds_of(two, "DDP", 128) == [2.0, 4.0]
    assert runs.rounds_of(two, "DDP", 128, "weak", "compute") == [1.0, 3.0]
    assert runs.rounds_of(result(1, step=[5.0]), "DDP", 128, "weak") == [5.0]
    assert runs.share_of_limit(two, "DDP", 128) == pytest.approx((0.5 + 0.75) / 2)
    with pytest.raises(LookupError, match="by hand, 64 samples"):
        runs.rounds_of(two, "by hand", 64)


def test_a_batch_script_asks_for_what_it_uses_and_bash_reads_it(monkeypatch, tmp_path):
    site = tmp_path / "etc/ddl-labs/site.toml"
    site.parent.mkdir(parents=True)
    site.write_text(
        '[slurm]\npartition = "lab"\naccount = ""\nsetup = ["module load openmpi/5.0"]\n'
    )
    monkeypatch.setattr(slurm_script, "PREFIX", str(tmp_path))
    text = slurm_script.series(4, 2, 24, "--data", "my images.pt", time="1:00:00")
    for line in ("--nodes=4", "--ntasks-per-node=2", "--cpus-per-task=24", "--partition=lab"):
        assert f"#SBATCH {line}\n" in text
    assert "--account" not in text
    assert "\nmodule load openmpi/5.0\n" in text
    assert "for ranks in 1 2 4 8; do" in text
    assert "--map-by ppr:1:numa:PE=24 --bind-to core" in text
    assert "train.py --data 'my images.pt'" in text
    assert f":-{tmp_path}}}" in text
    first = next(k for k, line in enumerate(text.splitlines()) if line and line[0] != "#")
    assert not any(line.startswith("#SBATCH") for line in text.splitlines()[first:])
    assert script_runs.unreadable(text) == ""
    started = script_runs.launches(text, 4, 2, 24)
    assert [call[:4] for call in started] == [["mpiexec", "24", "-n", p] for p in "1248"]


def test_what_a_script_would_start_is_seen_without_starting_anything(tmp_path):
    text = f"""#!/bin/bash
set -euo pipefail
module load openmpi && source venv/bin/activate
touch {tmp_path}/touched
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
for n in 1 $(( SLURM_NNODES * 2 )); do
    /opt/bin/mpiexec -n $n python "my train.py" > out
done
"""
    assert script_runs.launches(text, 3, 2, 5) == [
        ["mpiexec", "5", "-n", n, "python", "my train.py"] for n in ("1", "6")
    ]
    assert list(tmp_path.iterdir()) == []
    assert "syntax error" in script_runs.unreadable("export (")
    asked = slurm_script.request([
        "#!/bin/bash",
        "#SBATCH -N4 -c 2 --time=5 # it's short",
        "#SBATCH -n 8",
    ])
    assert asked == {"--nodes": "4", "--cpus-per-task": "2", "--time": "5", "--ntasks": "8"}
    for line in ("-p lab,long", "-plab,long", "--partition=lab,long"):
        assert slurm_script.request([f"#SBATCH {line}"]) == {"--partition": "lab,long"}


@pytest.mark.parametrize(
    ("variables", "asked"),
    [
        ({}, {"--partition": "lab", "--time": "5"}),
        ({"SBATCH_PARTITION": "long"}, {"--partition": "long", "--time": "5"}),
        ({"SBATCH_TIMELIMIT": "90"}, {"--partition": "lab", "--time": "90"}),
    ],
)
def test_a_script_is_judged_by_the_partition_and_time_that_slurm_will_take(
    tmp_path, monkeypatch, variables, asked
):
    """sbatch puts its variables before a script's own lines; the hub exports the partition."""
    for name in ("SBATCH_PARTITION", "SBATCH_TIMELIMIT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        slurm_script.slurm, "shortfall", lambda given: f"of {sorted(given.items())}"
    )
    script = tmp_path / "series.sh"
    script.write_text("#!/bin/bash\n#SBATCH -p lab\n#SBATCH -t 5\n")
    said = slurm_script.submit(script)
    assert f"of {sorted(asked.items())}" in said
    for name, value in variables.items():
        assert f"{name}={value} overrides the script" in said


@pytest.mark.parametrize(
    ("nodes", "domains", "counts"), [(1, 1, "1"), (3, 1, "1 2"), (2, 4, "1 2 4 8")]
)
def test_a_series_has_the_powers_of_two_that_fit(nodes, domains, counts):
    assert f"for ranks in {counts}; do" in slurm_script.series(nodes, domains, 1)


# --- many ranks ----------------------------------------------------------------------------------


def steps_by_hand(steps=6, gradients=(1_600_000, 40)) -> Run:
    """Two ranks that compute and then reduce their gradients, in steps that differ."""
    calls = tuple(Call("all_reduce", (0, 1), n) for _ in range(steps) for n in gradients)
    events = []
    for rank in range(2):
        own = []
        for number in range(len(calls)):
            seconds = 3e-3 * (1 + 0.1 * ((number + rank) % 3))
            own += [("compute", seconds), ("start", number), ("wait", number)]
        events.append(tuple(own))
    return Run(calls, tuple(events), (1.0, 1.0), cores=2)


@functools.cache
def surveyed() -> many_ranks.Survey:
    return many_ranks.survey(steps_by_hand())


@pytest.mark.parametrize("name", many_ranks.LINKS)
@pytest.mark.parametrize("size", [1, 100])
def test_a_survey_says_what_a_replay_of_each_point_says(name, size):
    run = steps_by_hand()
    survey = surveyed()
    spine = many_ranks.LINKS[name][0]
    machine = many_ranks.machines()[name].with_level(oversubscription=spine)
    for k in (0, 1, 4, 10):
        p, point = many_ranks.RANKS[k], survey.points[name, spine, size][k]
        told = utils.forecast.forecast(many_ranks.larger(run, size), machine, p, jitter=0.0)
        assert told.seconds == pytest.approx(survey.step[k] + point.seconds)
        noisy = utils.forecast.forecast(many_ranks.larger(run, size), machine, p)
        together = survey.step[k] + survey.straggling[k] + point.seconds
        assert noisy.seconds == pytest.approx(together, rel=1e-6) or k == 0


def test_the_largest_part_counts_all_rounds_that_a_link_limits():
    cluster, run = many_ranks.machines()["cluster"], steps_by_hand(gradients=(268_000_000,))
    reasons = [many_ranks._point("cluster", cluster, run, p).reason for p in (8, 16, 32)]
    nvlink, of_node, _ = many_ranks.LINKS["cluster"][1]
    # Of 32 ranks, the ring inside a node is longer than each round between nodes, but not than all.
    assert reasons == [nvlink, nvlink, of_node]


def test_the_bend_is_the_first_number_of_ranks_below_one_half():
    survey = surveyed()
    p = survey.bend("cluster", 1000)
    efficiencies = dict(zip(many_ranks.RANKS, survey.efficiencies("cluster", 1000), strict=True))
    assert efficiencies[p] < 0.5 <= efficiencies[p // 2]
    assert survey.bend("NVL72 racks", 1) is None
