"""Fashion-MNIST: from where it comes, what happens when it is damaged or out of reach; the loader.

No test leaves this machine: torchvision's download runs against a server on 127.0.0.1.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import hashlib
import http.server
import multiprocessing
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
import time
import types
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from utils import data
from utils.data import course_text, torchvision_repair
from utils.data.torchvision_repair import import_torchvision
from utils.models import mlp

REAL = os.environ.get(data.ROOT_VARIABLE)
DEADLINE = 180  # seconds for a subprocess, most of which is `import torch` on a busy machine


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


# --- a small Fashion-MNIST and a server that has it -------------------------------------------


def small_files() -> dict[str, bytes]:
    """Four raw files with 40 training and 20 test images."""
    random = np.random.RandomState(0)
    files = {}
    for part, n in (("train", 40), ("t10k", 20)):
        pixels = random.randint(0, 256, n * 784, dtype=np.uint8).tobytes()
        labels = random.randint(0, 10, n, dtype=np.uint8).tobytes()
        files[f"{part}-images-idx3-ubyte"] = struct.pack(">4i", 0x803, n, 28, 28) + pixels
        files[f"{part}-labels-idx1-ubyte"] = struct.pack(">2i", 0x801, n) + labels
    return files


class Server:
    """Serves packed files, counts what is asked for, and misbehaves on request."""

    def __init__(self, files: dict[str, bytes], level: int = 6):
        self.files = {f"{name}.gz": gzip.compress(raw, level) for name, raw in files.items()}
        self.asked: Counter[str] = Counter()
        self.delay = 0.0
        self.stall_at = ""  # send half of this file, then nothing
        self.cut_once: set[str] = set()  # send half of these and hang up, the first time
        self.instead: bytes | None = None
        self.stalled = threading.Event()
        self.over = threading.Event()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                # torchvision looks for redirects with a GET that says HEAD in a header.
                probe = self.headers.get("Method") == "HEAD"
                outer.answer(self, self.path.lstrip("/"), body=not probe)

            def log_message(self, *_):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def answer(self, request, name: str, body: bool) -> None:
        content = self.files[name] if self.instead is None else self.instead
        request.send_response(200)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        if not body:
            return
        self.asked[name] += 1
        time.sleep(self.delay)
        half = len(content) // 2
        if name in self.cut_once:
            self.cut_once.discard(name)
            request.wfile.write(content[:half])
        elif name == self.stall_at:
            request.wfile.write(content[:half])
            request.wfile.flush()
            self.stalled.set()
            self.over.wait(DEADLINE)
        else:
            request.wfile.write(content)

    def close(self) -> None:
        self.over.set()
        self.http.shutdown()
        self.http.server_close()


class World:
    """A cache folder and a server, for this process and for others."""

    def __init__(self, files: dict[str, bytes], cache: Path, server: Server):
        self.files, self.cache, self.server = files, cache, server
        self.mirror = server.url
        self.raw_files = {name: (len(raw), md5(raw)) for name, raw in files.items()}
        self.resources = [(name, md5(packed)) for name, packed in server.files.items()]

    @property
    def raw(self) -> Path:
        return self.cache / "FashionMNIST" / "raw"

    def fill(self, root: Path) -> Path:
        folder = root / "FashionMNIST" / "raw"
        folder.mkdir(parents=True)
        for name, raw in self.files.items():
            (folder / name).write_bytes(raw)
        return folder

    def intact(self) -> bool:
        return all((self.raw / name).read_bytes() == raw for name, raw in self.files.items())

    @property
    def place(self) -> Place:
        return Place(self.cache, self.raw_files, self.resources, self.mirror)

    def install(self, monkeypatch) -> None:
        """Make this process live in this world."""
        settle(self.place, monkeypatch.setattr)
        for name in outside_variables():
            monkeypatch.delenv(name)


class Place(NamedTuple):
    """What another process must know to live in a `World`."""

    cache: Path
    raw_files: dict[str, tuple[int, str]]
    resources: list[tuple[str, str]]
    mirror: str


def settle(place: Place, put=setattr) -> None:
    real = import_torchvision().datasets.FashionMNIST
    table = {name: data.RawFile(*row) for name, row in place.raw_files.items()}
    put(data, "RAW_FILES", table)
    put(data, "cache_folder", lambda: place.cache)
    put(data, "_standin_because", None)
    put(real, "resources", place.resources)
    put(real, "mirrors", [place.mirror])


def outside_variables() -> list[str]:
    """Variables that would lead out of a `World`."""
    return [name for name in os.environ if name == data.ROOT_VARIABLE or "proxy" in name.lower()]


# --- other processes --------------------------------------------------------------------------

# Ranks come from a server that has imported torch and torchvision once, for all of them.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["utils.data.fashion", "pytest"])


def load(place: Place) -> tuple[bool, str]:
    """What a rank does: is it the stand-in, and the MD5 of the training images."""
    for name in outside_variables():
        del os.environ[name]
    settle(place)
    found = data.fashion_mnist()
    return found.is_standin, digest(found)


def draw_elsewhere(n: int) -> str:
    torch.manual_seed(99)
    torch.set_num_threads(2)
    return digest(stand_in(n=n))


def digest(found) -> str:
    return md5(found.data.numpy().tobytes() + found.targets.numpy().tobytes())


class Rank:
    """A function at work in another process."""

    def __init__(self, function, *args):
        self.answer, theirs = FORKS.Pipe(duplex=False)
        self.process = FORKS.Process(target=self.work, args=(theirs, function, *args), daemon=True)
        self.process.start()
        theirs.close()

    @staticmethod
    def work(answer, function, *args):
        answer.send(function(*args))

    def result(self):
        try:
            assert self.answer.poll(DEADLINE), f"no answer within {DEADLINE} s"
            return self.answer.recv()
        finally:
            self.kill()

    def kill(self):
        self.process.kill()
        self.process.join(DEADLINE)


def stand_in(*args, **kwargs):
    from utils.data import fashion  # imports torchvision

    return fashion.StandInFashionMNIST(*args, **kwargs)


def run_fresh(code: str, *args: object) -> str:
    """What Python code prints in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def world(tmp_path, monkeypatch):
    files = small_files()
    server = Server(files)
    world = World(files, tmp_path / "cache", server)
    world.install(monkeypatch)
    monkeypatch.setattr("utils.data.fashion.SAMPLES", {True: 40, False: 20})
    yield world
    server.close()


@pytest.fixture
def offline(world, monkeypatch):
    with socket.socket() as unused:  # bound but not listening: connections are refused
        unused.bind(("127.0.0.1", 0))
        real = import_torchvision().datasets.FashionMNIST
        monkeypatch.setattr(real, "mirrors", [f"http://127.0.0.1:{unused.getsockname()[1]}/"])
        yield world


# --- download ---------------------------------------------------------------------------------


def test_first_use_downloads_and_later_uses_do_not(world):
    train, test = data.fashion_mnist(), data.fashion_mnist(train=False)
    assert (len(train), len(test)) == (40, 20)
    assert not train.is_standin
    assert train.data.numpy().tobytes() == world.files["train-images-idx3-ubyte"][16:]
    assert bytes(test.targets.tolist()) == world.files["t10k-labels-idx1-ubyte"][8:]
    assert set(world.server.asked.values()) == {1}
    assert not (world.cache / "incoming").exists()


def test_ranks_that_start_together_download_each_file_once(world):
    world.server.delay = 0.2
    ranks = [Rank(load, world.place) for _ in range(3)]
    images, labels = (world.files[f"train-{kind}-ubyte"] for kind in ("images-idx3", "labels-idx1"))
    wide = np.frombuffer(labels[8:], np.uint8).astype(np.int64)
    assert {rank.result() for rank in ranks} == {(False, md5(images[16:] + wide.tobytes()))}
    assert world.server.asked == dict.fromkeys(world.server.files, 1)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "half a file": lambda path: path.write_bytes(path.read_bytes()[:-5]),
    "a flipped bit": flip_a_bit,
    "no file": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
def test_damaged_file_in_the_cache_is_fetched_again_and_only_that_one(world, damage, name):
    world.fill(world.cache)
    damage(world.raw / name)
    data.fashion_mnist()
    assert world.intact()
    assert world.server.asked == {f"{name}.gz": 1}


def test_file_damaged_after_it_was_checked_is_noticed_in_the_same_process(world):
    data.fashion_mnist()
    flip_a_bit(world.raw / "train-labels-idx1-ubyte")
    data.fashion_mnist()
    assert world.intact()


def test_rank_killed_during_the_download_leaves_a_cache_that_the_next_call_repairs(world):
    first, second = list(world.server.files)[:2]
    world.server.stall_at = second
    rank = Rank(load, world.place)
    assert world.server.stalled.wait(DEADLINE), "the download never started"
    rank.kill()
    assert not world.raw.exists(), "half a download must not be seen by others"

    world.server.stall_at = ""
    assert len(data.fashion_mnist()) == 40
    assert world.intact()
    assert world.server.asked[first] == 1, "what was complete need not be fetched again"
    assert world.server.asked[second] == 2


def test_half_unpacked_file_of_a_killed_rank_is_not_taken_for_complete(world):
    staged = world.cache / "incoming" / "FashionMNIST" / "raw"
    staged.mkdir(parents=True)
    for name, raw in world.files.items():
        (staged / name).write_bytes(raw[:50])
    data.fashion_mnist()
    assert world.intact()


def test_connection_that_breaks_once_does_not_cost_the_real_data(world):
    world.server.cut_once = {"train-labels-idx1-ubyte.gz"}
    assert not data.fashion_mnist().is_standin
    assert world.intact()


def test_silent_server_is_given_up_instead_of_waited_for_for_ever(world, monkeypatch, capsys):
    monkeypatch.setattr(data, "SILENCE", 0.2)
    world.server.stall_at = "train-images-idx3-ubyte.gz"
    assert data.fashion_mnist().is_standin
    assert "timed out" in capsys.readouterr().out
    assert socket.getdefaulttimeout() is None


def test_lock_that_is_never_released_ends_in_an_error_that_names_it(world, monkeypatch):
    monkeypatch.setattr(data, "LONGEST_DOWNLOAD", 0.1)
    world.cache.mkdir()
    with (
        data.filelock.FileLock(world.cache / "fashion-mnist.lock"),
        pytest.raises(RuntimeError, match=r"holds .*fashion-mnist\.lock"),
    ):
        data.fashion_mnist()


@pytest.mark.filterwarnings("ignore:flock not supported")
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_home_folder_without_locks_does_not_cost_the_real_data(world, monkeypatch, number):
    def without(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", without)
    assert not data.fashion_mnist().is_standin
    assert not [path for path in world.cache.glob("*.lock*") if path.stat().st_size]


@pytest.mark.bare
@pytest.mark.skipif(not REAL, reason=f"{data.ROOT_VARIABLE} is not set: no real Fashion-MNIST")
def test_real_files_survive_torchvisions_download_and_our_checksums(tmp_path, monkeypatch):
    files = {name: (Path(REAL) / "FashionMNIST/raw" / name).read_bytes() for name in data.RAW_FILES}
    checksums = data.RAW_FILES
    server = Server(files, level=1)
    try:
        World(files, tmp_path, server).install(monkeypatch)
        monkeypatch.setattr(data, "RAW_FILES", checksums)
        train, test = data.fashion_mnist(), data.fashion_mnist(train=False)
    finally:
        server.close()
    assert (len(train), len(test)) == (60_000, 10_000)
    assert not train.is_standin
    pixels = train.data.double() / 255
    assert pixels.mean().item() == pytest.approx(data.MEAN, abs=1e-4)
    assert pixels.std().item() == pytest.approx(data.STD, abs=1e-4)


# --- offline ----------------------------------------------------------------------------------


def test_offline_a_stand_in_takes_over_and_says_so_once(offline, capsys):
    train, test = data.fashion_mnist(), data.fashion_mnist(train=False)
    assert train.is_standin
    assert test.is_standin
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1
    assert said[0].startswith("! ")
    assert "STAND-IN" in said[0]
    assert "refused" in said[0]


def test_login_page_in_place_of_the_data_is_not_taken_for_it(world, capsys):
    world.server.instead = b"<html>Please log in to this hotel's network</html>"
    assert data.fashion_mnist().is_standin
    assert capsys.readouterr().out.startswith("!")


def test_cache_that_cannot_be_written_leads_to_the_stand_in(world, capsys):
    world.cache.write_text("a file, not a folder")
    assert data.fashion_mnist().is_standin
    assert "cache can't be used" in capsys.readouterr().out


def test_training_and_test_data_match_when_the_network_returns_between_them(offline, monkeypatch):
    assert data.fashion_mnist().is_standin
    real = import_torchvision().datasets.FashionMNIST
    monkeypatch.setattr(real, "mirrors", [offline.mirror])
    monkeypatch.setattr(data, "SAME_FAILURE_FOR", 0)
    assert data.fashion_mnist(train=False).is_standin


def test_rank_that_comes_later_takes_the_stand_in_that_the_first_took(offline, monkeypatch, capsys):
    data.fashion_mnist()
    first = capsys.readouterr().out
    monkeypatch.setattr(data, "_standin_because", None)  # another rank
    real = import_torchvision().datasets.FashionMNIST
    monkeypatch.setattr(real, "mirrors", [offline.mirror])
    assert data.fashion_mnist().is_standin
    assert capsys.readouterr().out == first
    assert not offline.server.asked


def test_network_that_returns_gives_real_data_after_a_restart(offline, monkeypatch):
    data.fashion_mnist()
    monkeypatch.setattr(data, "_standin_because", None)  # a restarted kernel
    monkeypatch.setattr(data, "SAME_FAILURE_FOR", 0)
    real = import_torchvision().datasets.FashionMNIST
    monkeypatch.setattr(real, "mirrors", [offline.mirror])
    assert not data.fashion_mnist().is_standin
    assert not (offline.cache / "fashion-mnist.failed").exists()


# --- FASHION_MNIST_ROOT -----------------------------------------------------------------------


def test_given_root_is_used_without_download_or_writing(world, tmp_path, monkeypatch):
    root = tmp_path / "given"
    folder = world.fill(root)
    monkeypatch.setenv(data.ROOT_VARIABLE, str(root))
    assert len(data.fashion_mnist(train=False)) == 20
    assert sorted(path.name for path in folder.iterdir()) == sorted(world.files)
    assert not world.server.asked
    assert not world.cache.exists()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (DAMAGE["half a file"], "has 51 bytes, expected 48"),
        (DAMAGE["a flipped bit"], "has MD5 .*, expected"),
        (DAMAGE["no file"], "is missing"),
    ],
    ids=DAMAGE,
)
def test_broken_root_is_an_error_that_names_folder_file_and_remedy(
    world, tmp_path, monkeypatch, damage, said
):
    root = tmp_path / "given"
    folder = world.fill(root)
    path = folder / "train-labels-idx1-ubyte"
    damage(path)
    if "bytes" in said:
        said = f"has {path.stat().st_size} bytes, expected 48"
    monkeypatch.setenv(data.ROOT_VARIABLE, str(root))
    with pytest.raises(RuntimeError, match=f"train-labels-idx1-ubyte {said}") as error:
        data.fashion_mnist()
    assert str(folder) in str(error.value)
    assert f"unset {data.ROOT_VARIABLE}" in str(error.value)
    assert "t10k" not in str(error.value).split("Nothing is ever")[0], "good files are not blamed"
    assert not world.server.asked


def test_root_that_is_not_there_is_an_error_and_no_silent_download(world, tmp_path, monkeypatch):
    monkeypatch.setenv(data.ROOT_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(RuntimeError, match="train-images-idx3-ubyte is missing"):
        data.fashion_mnist()
    assert not world.server.asked


def test_root_with_packed_files_only_says_to_unpack_them(world, tmp_path, monkeypatch):
    folder = tmp_path / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    for name, packed in world.server.files.items():
        (folder / name).write_bytes(packed)
    monkeypatch.setenv(data.ROOT_VARIABLE, str(tmp_path))
    with pytest.raises(RuntimeError, match=r"Unpack its \.gz"):
        data.fashion_mnist()


@pytest.mark.parametrize("wrong", [{"train": "test"}, {"train": 1}, {"transform": "none"}])
def test_wrong_arguments_are_refused_before_anything_is_downloaded(world, wrong):
    with pytest.raises(TypeError, match="must be"):
        data.fashion_mnist(**wrong)
    assert not world.server.asked


# --- torchvision beside another torch ---------------------------------------------------------


def test_data_needs_no_working_torchvision_operators_even_after_a_failed_import():
    said = run_fresh(
        "import sys; from utils import data\n"
        "from utils.data.torchvision_repair import import_torchvision\n"
        "assert 'torchvision' not in sys.modules, 'torchvision imported too early'\n"
        "try:\n    import torchvision\nexcept RuntimeError: pass\n"
        "ours = import_torchvision()\n"
        "import torch, torchvision; from torchvision import datasets, models, transforms\n"
        "assert ours is torchvision is import_torchvision(), 'two torchvisions'\n"
        "print(transforms.ToTensor()(transforms.ToPILImage()(torch.zeros(1, 2, 2))).shape)"
    )
    assert said == "torch.Size([1, 2, 2])\n"


def test_data_set_sent_to_a_fresh_process_arrives(tmp_path):
    small = stand_in(transform=data.default_transform(), n=3)
    (tmp_path / "set").write_bytes(pickle.dumps(small))
    code = "import pickle, sys; x = pickle.load(open(sys.argv[1], 'rb')); print(x[2][0].shape)"
    assert run_fresh(code, tmp_path / "set") == "torch.Size([1, 28, 28])\n"


def test_healthy_torchvision_is_left_alone(monkeypatch):
    healthy = types.ModuleType("torchvision")
    monkeypatch.setitem(sys.modules, "torchvision", healthy)
    monkeypatch.setattr(
        torchvision_repair, "_declare_missing_operators", lambda: pytest.fail("not needed")
    )
    assert import_torchvision() is healthy


def test_torchvision_broken_in_another_way_says_so_itself(monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('compiled for CUDA 99')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        torchvision_repair, "_declare_missing_operators", lambda: pytest.fail("not our case")
    )
    with pytest.raises(RuntimeError, match="CUDA 99"):
        import_torchvision()


# --- the stand-in -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    """A small data set: 250 generated images with the default transform."""
    return stand_in(transform=data.default_transform(), n=250)


def test_stand_in_fits_wherever_fashion_mnist_does(small):
    assert isinstance(small, import_torchvision().datasets.FashionMNIST)
    assert small.data.shape == (250, 28, 28)
    assert small.data.dtype == torch.uint8
    assert small.targets.dtype == torch.int64
    assert set(small.targets.tolist()) == set(range(10))
    assert len(small.classes) == 10
    image, label = small[0]
    assert (image.shape, image.dtype, type(label)) == ((1, 28, 28), torch.float32, int)
    assert "StandIn" in repr(small)


def test_stand_in_has_as_many_images_as_fashion_mnist():
    assert len(stand_in(train=True)) == 60_000
    assert len(stand_in(train=False)) == 10_000


def test_stand_in_has_the_same_bytes_on_every_rank_and_leaves_random_numbers_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    here = stand_in(n=3_000)
    assert torch.equal(torch.get_rng_state(), before)
    assert Rank(draw_elsewhere, 3_000).result() == digest(here)


def test_stand_in_test_images_are_not_training_images():
    train, test = (stand_in(train=part, n=500) for part in (True, False))
    both = torch.cat([train.data, test.data]).flatten(1)
    assert len(torch.unique(both, dim=0)) == 1_000


@pytest.fixture
def one_thread():
    """Threads that fight for busy cores make a small model many times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_mlp_learns_the_stand_in_in_one_epoch_but_not_perfectly(one_thread):
    train = stand_in(train=True, n=20_000)  # a third: less to wait for
    test = stand_in(train=False)
    model = mlp(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = torch.Generator().manual_seed(0)
    for images, labels in data.InMemoryLoader(train, 64, shuffle=True, generator=order):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    with torch.no_grad():
        right = sum(
            (model(images).argmax(1) == labels).sum().item()
            for images, labels in data.InMemoryLoader(test, 1_000)
        )
    assert 0.80 < right / len(test) < 0.99


# --- InMemoryLoader ---------------------------------------------------------------------------


def assert_same_minibatches(ours, theirs) -> None:
    ours, theirs = list(ours), list(theirs)
    assert [len(labels) for _, labels in ours] == [len(labels) for _, labels in theirs]
    for (images, labels), (expected_images, expected_labels) in zip(ours, theirs, strict=True):
        assert torch.equal(labels, expected_labels)
        assert labels.dtype == expected_labels.dtype
        assert images.dtype == torch.float32
        assert images.shape == expected_images.shape
        torch.testing.assert_close(images, expected_images, rtol=0, atol=1e-6)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 64, 250, 300])
def test_loader_in_order_gives_what_dataloader_gives(small, batch_size, drop_last):
    ours = data.InMemoryLoader(small, batch_size, drop_last=drop_last)
    theirs = DataLoader(small, batch_size, drop_last=drop_last)
    assert len(ours) == len(theirs)
    assert_same_minibatches(ours, theirs)


def test_loader_shuffles_like_dataloader_epoch_after_epoch(small):
    ours, theirs = (
        kind(small, 64, shuffle=True, generator=torch.Generator().manual_seed(3))
        for kind in (data.InMemoryLoader, DataLoader)
    )
    for _ in range(3):
        assert_same_minibatches(ours, theirs)


def test_loader_shuffles_like_dataloader_with_the_same_random_sampler(small):
    ours, theirs = (
        kind(small, 64, sampler=RandomSampler(small, generator=torch.Generator().manual_seed(3)))
        for kind in (data.InMemoryLoader, DataLoader)
    )
    assert_same_minibatches(ours, theirs)


def test_swapping_the_loaders_does_not_change_later_random_numbers(small):
    after = []
    for kind in (data.InMemoryLoader, DataLoader):
        torch.manual_seed(11)
        order = [labels for _, labels in kind(small, 64, shuffle=True)]
        after.append((torch.cat(order), torch.rand(3)))
    assert torch.equal(after[0][0], after[1][0])
    assert torch.equal(after[0][1], after[1][1])


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_rank_gets_its_distributed_samplers_part_in_every_epoch(small, p, shuffle):
    for rank in range(p):
        sampler = DistributedSampler(small, p, rank, shuffle=shuffle, seed=5)
        ours = data.InMemoryLoader(small, 16, sampler=sampler)
        theirs = DataLoader(small, 16, sampler=sampler)
        assert len(ours) == len(theirs)
        seen = []
        for epoch in (0, 1):
            sampler.set_epoch(epoch)
            assert_same_minibatches(ours, theirs)
            seen.append(torch.cat([labels for _, labels in ours]))
        assert torch.equal(*seen) != shuffle, "set_epoch must change a shuffled order only"


def test_loader_takes_a_batch_sampler(small):
    batches = BatchSampler(SequentialSampler(small), 60, drop_last=True)
    ours = data.InMemoryLoader(small, batch_sampler=batches)
    assert len(ours) == 4
    assert_same_minibatches(ours, DataLoader(small, batch_sampler=batches))


def test_loader_of_a_subset_gives_the_subset(small):
    part = Subset(Subset(small, range(10, 110)), [5, 0, 99, 7])
    assert_same_minibatches(data.InMemoryLoader(part, 3), DataLoader(part, 3))


def test_loader_applies_the_data_sets_own_normalisation(small):
    transforms = import_torchvision().transforms
    for transform in (
        transforms.ToTensor(),
        transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.25,))]),
    ):
        other = stand_in(transform=transform, n=20)
        assert_same_minibatches(data.InMemoryLoader(other, 8), DataLoader(other, 8))


def test_changing_a_minibatch_does_not_change_the_data_set(small):
    before = small.data.clone(), small.targets.clone()
    for images, labels in data.InMemoryLoader(small, 250):
        images.zero_()
        labels.zero_()
    assert torch.equal(small.data, before[0])
    assert torch.equal(small.targets, before[1])


def test_transform_that_the_loader_cannot_do_is_refused_not_ignored():
    transforms = import_torchvision().transforms
    flipping = transforms.Compose([transforms.RandomHorizontalFlip(), transforms.ToTensor()])
    augmented = stand_in(transform=flipping, n=20)
    with pytest.raises(ValueError, match="RandomHorizontalFlip"):
        data.InMemoryLoader(augmented)
    augmented.transform, augmented.target_transform = None, float
    with pytest.raises(ValueError, match="target_transform"):
        data.InMemoryLoader(augmented)


def test_loader_says_which_arguments_contradict_each_other(small):
    order = SequentialSampler(small)
    with pytest.raises(ValueError, match="not both"):
        data.InMemoryLoader(small, sampler=order, shuffle=True)
    with pytest.raises(ValueError, match="batch_sampler excludes"):
        data.InMemoryLoader(small, batch_sampler=[[0]], sampler=order)


@pytest.mark.parametrize("batch_size", [0, -1, 1.5, None])
def test_loader_refuses_an_impossible_batch_size(small, batch_size):
    with pytest.raises(ValueError, match="batch_size"):
        data.InMemoryLoader(small, batch_size)


def test_loader_sends_other_data_sets_to_dataloader():
    with pytest.raises(TypeError, match=r"SimpleDataSet.*DataLoader"):
        data.InMemoryLoader(data.SimpleDataSet(5))


@pytest.mark.parametrize("wrong", [250, -1])
def test_sampler_that_leaves_the_data_set_is_caught_with_its_indices(small, wrong):
    with pytest.raises(IndexError, match=rf"{wrong}.*data set has only 0 to 249"):
        list(data.InMemoryLoader(small, sampler=[0, wrong]))


# --- SimpleDataSet ----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 7, 24, 25])
def test_items_of_the_simple_data_set_name_their_index(n):
    simple = data.SimpleDataSet(n)
    assert len(simple) == n
    assert list(simple) == [10 * i for i in range(n)]
    assert torch.cat(list(DataLoader(simple, batch_size=4))).tolist() == list(simple)


@pytest.mark.parametrize("index", [24, -1, 1000])
def test_index_outside_the_simple_data_set_is_an_index_error(index):
    with pytest.raises(IndexError, match=f"index {index} .* 0 to 23"):
        data.SimpleDataSet(24)[index]


@pytest.mark.parametrize(
    ("n", "error"),
    [(0, ValueError), (-3, ValueError), (2.0, TypeError), ("24", TypeError), (True, TypeError)],
)
def test_simple_data_set_of_an_impossible_size_is_refused(n, error):
    with pytest.raises(error, match="n must be"):
        data.SimpleDataSet(n)


def test_the_text_of_the_language_models_has_the_bytes_that_stored_results_come_from():
    text = course_text.course_text()
    assert (len(text.train), len(text.test)) == (388_206, 43_134)
    assert (
        hashlib.md5(torch.cat(text).numpy().tobytes()).hexdigest()
        == "9626c1bd94fd877db48fa3589124ce97"
    )


def test_windows_of_a_text_are_followed_by_their_next_bytes_and_follow_from_the_seed():
    text = torch.arange(200, dtype=torch.uint8)
    x, y = course_text.windows(text, samples=50, tokens=7, seed=3)
    assert x.dtype == y.dtype == torch.int64
    assert x.shape == y.shape == (50, 7)
    assert torch.equal(y, x + 1)
    assert torch.equal(x, course_text.windows(text, samples=50, tokens=7, seed=3)[0])
    with pytest.raises(ValueError, match="7 bytes"):
        course_text.windows(text[:7], samples=1, tokens=7, seed=0)
