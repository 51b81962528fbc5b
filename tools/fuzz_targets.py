"""What is fuzzed: each parser with small real files for it, and with what must hold of anything that it accepts."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import struct
import tarfile
import tempfile
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np
import scipy.io
import torch

import engram
from engram.cli.run import configs_of
from engram.config.presets import preset
from engram.config.settings import KINDS, Config, from_dict, load_config, parse_setting
from engram.data import formats
from engram.data.catalogue import File
from engram.data.download import _extract
from engram.data.samples import Dataset, Samples
from engram.data.sources import _read, load
from engram.engine.build import build_learner, build_streams
from engram.engine.checkpoint import CheckpointFolder, Checkpoints
from engram.engine.loop import check_position
from engram.engine.program import Batches
from engram.engine.stacks import plan_stacks
from engram.nn.networks import Network
from engram.report.figures import Drawing, to_svg
from engram.report.html import blocks
from engram.report.tables import gains, so_far, summary
from engram.reproduction.document_tables import selection_tables
from engram.reproduction.write import make_page
from engram.runs import start as runs
from engram.runs.experiment import Progress, Setting, check_shared, gather, run_on
from engram.runs.result import Result, read_run
from engram.runs.sheets import read_reproduction, read_sheet
from engram.runs.start import resume_methods, run_methods
from engram.runs.store.index import NAME as INDEX
from engram.runs.store.index import Index
from engram.runs.store.query import parse_condition, select

ROOT = Path(__file__).resolve().parent.parent
FIGURES = 100  # that are remembered
Files = dict[str, bytes]  # by their paths in a folder


@dataclass(frozen=True)
class Target:
    """A parser: sound files, one of which is damaged at a time, and how the folder with all of them is read.

    `read` is told the folder and the damaged file. It raises InputError, or asserts that what it read is right.
    """

    files: Files
    read: Callable[[Path, str], None]
    damaged: tuple[str, ...] = ()  # of the files; all, if none is named


def digits(count: int = 4) -> Samples:
    return load("mnist-small").test[slice(count)]


def few() -> Dataset:
    whole = load("mnist-small")
    return Dataset("mnist-small", whole.train[slice(60)], whole.test[slice(30)], "structure")


# --- datasets


def idx() -> Target:
    samples = digits()
    images = struct.pack(">4I", 2051, len(samples), 28, 28) + samples.inputs.numpy().tobytes()
    labels = struct.pack(">2I", 2049, len(samples)) + samples.targets.to(torch.uint8).numpy().tobytes()
    plain = {"images-idx3-ubyte": images, "labels-idx1-ubyte": labels}
    packed = {f"{name}.gz": gzip.compress(content, mtime=0) for name, content in plain.items()}

    def read(folder: Path, name: str) -> None:
        parse = formats.parse_idx_images if name.startswith("images") else formats.parse_idx_labels
        part, published = _read(File(name, "0" * 32, parse), folder / name)
        raw = (folder / name).read_bytes()
        raw = gzip.decompress(raw) if name.endswith(".gz") else raw
        assert not published
        if part.images is not None:
            assert part.images.shape[1:] == (1, 28, 28)
            assert part.images.tobytes() == raw[16:]
        if part.labels is not None:
            assert part.labels.astype(np.uint8).tobytes() == raw[8:]

    return Target(plain | packed, read)


def coloured(count: int = 3) -> np.ndarray:
    """Digits as images (N, 3, 32, 32)."""
    small = digits(count).inputs.numpy()
    return np.pad(small, ((0, 0), (0, 0), (2, 2), (2, 2))).repeat(3, axis=1)


def cifar_file(count: int = 3) -> bytes:
    labels = digits(count).targets.numpy().astype(np.uint8)
    return b"".join(bytes([label]) + image.tobytes() for label, image in zip(labels, coloured(count), strict=True))


def cifar() -> Target:
    def read(folder: Path, name: str) -> None:
        content = (folder / name).read_bytes()
        part, _ = _read(File(name, "0" * 32, formats.parse_cifar), folder / name)
        assert part.images is not None
        assert part.labels is not None
        again = b"".join(bytes([k]) + i.tobytes() for k, i in zip(part.labels, part.images, strict=True))
        assert again == content

    return Target({"data_batch_1.bin": cifar_file()}, read)


def archive() -> Target:
    """CIFAR-10's, as if its checksum had been verified: so that damage comes as far as the unpacking."""
    train, test = cifar_file(3), cifar_file(1)
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as packed:
        for name, content in (("made/readme.html", b"hello"), ("made/train.bin", train), ("made/test.bin", test)):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            packed.addfile(info, io.BytesIO(content))
    files = [
        File(f"made/{name}.bin", hashlib.md5(content).hexdigest(), formats.parse_cifar)
        for name, content in (("train", train), ("test", test))
    ]

    def read(folder: Path, name: str) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as staging:
            try:
                found = _extract(folder / name, files, Path(staging))
                assert [path.read_bytes() for path in found.values()] == [train, test]
            finally:
                inside = {path.name for path in Path(staging).rglob("*")}
                assert inside <= {"member-0", "member-1"}, inside
                assert {path.name for path in folder.iterdir()} == {name, Path(staging).name}

    return Target({"all.tar.gz": stream.getvalue()}, read)


def mat() -> Target:
    variables = {"X": coloured(2).transpose(2, 3, 1, 0), "y": np.array([[10], [3]], np.uint8)}
    files = {}
    for name, packed in (("plain.mat", False), ("packed.mat", True)):
        stream = io.BytesIO()
        scipy.io.savemat(stream, variables, do_compression=packed)
        files[name] = stream.getvalue()

    def read(folder: Path, name: str) -> None:
        part, _ = _read(File(name, "0" * 32, formats.parse_svhn), folder / name)
        assert part.images is not None
        assert part.labels is not None
        assert part.images.shape == (len(part.labels), 3, 32, 32)
        assert part.images.dtype == np.uint8
        assert part.labels.dtype == np.int64
        assert set(part.labels.tolist()) <= set(range(10))

    return Target(files, read)


# --- settings and results


def config() -> Target:
    sound = preset("split-mnist", "dhp+online-ewc", trials=2, max_samples=100)

    def read(folder: Path, name: str) -> None:
        found = load_config(folder / name)
        assert from_dict(tomllib.loads(found.to_toml())) == found
        assert all(type(width) is int for width in found.hidden)
        check_shared([found])

    return Target({"config.toml": sound.to_toml().encode(), "config.json": sound.to_json().encode()}, read)


def small_configs(*methods: str) -> list[Config]:
    changes = {"dataset": "mnist-small", "num_tasks": 2, "trials": 2, "epochs": 1, "hidden": [4], "batch_size": 20}
    return [preset("split-mnist", method, **changes) for method in methods]


def all_files(folder: Path) -> Files:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@cache
def a_run() -> Files:
    with tempfile.TemporaryDirectory() as folder:
        run_methods(
            small_configs("si", "dhp+si"), [few()], Path(folder) / "run", command="engram run", setting=Setting("cpu")
        )
        files = all_files(Path(folder) / "run")
    return {name: content for name, content in files.items() if name != "log.txt"}


def check_results(results: list[Result]) -> None:
    """They are whole, and everything that is shown of them can be."""
    for result in results:
        tasks = result.config.num_tasks
        assert result.accuracy.shape[1:] == (tasks, tasks)
        assert result.untrained.shape == (len(result.accuracy), tasks)
        for measured in (result.accuracy, result.untrained):
            assert ((measured >= 0) & (measured <= 1) | np.isnan(measured)).all()
    for table in (summary(results), gains(results), so_far(results)):
        if table is not None:
            assert table.to_csv()


def run() -> Target:
    def read(folder: Path, name: str) -> None:
        about, results = read_run(folder)
        check_results(results)
        assert {result.config.method for result in results} <= set(about["methods"])

    return Target(a_run(), read)


def resume() -> Target:
    """A run that was stopped, up to where it would train again."""
    files = {name: content for name, content in a_run().items() if not name.endswith(("accuracy.json", "dynamics.csv"))}
    start, _, _ = files["run.json"].decode().rpartition(',\n  "finished"')
    files["run.json"] = (start + "\n}\n").encode()
    datasets = [few()]

    def read(folder: Path, name: str) -> None:
        with patch.object(runs, "run_on", lambda configs, *_: []):
            assert resume_methods(folder, datasets) == []

    return Target(files, read)


def sheet() -> Target:
    source = ROOT / "results" / "split-mnist" / "sensitivity.json"
    content = source.read_bytes()

    def read(folder: Path, name: str) -> None:
        found = read_sheet(folder / name)
        check_results(list(found.entries.values()))
        assert read_reproduction(folder).missing

    return Target({"split-mnist/sensitivity.json": content}, read)


def selection() -> Target:
    def read(folder: Path, name: str) -> None:
        for table in selection_tables(folder):
            assert table.to_markdown()

    return Target({"selection.json": (ROOT / "results" / "selection.json").read_bytes()}, read)


def page() -> Target:
    """The page of a run, which shows all that its files say. A figure of the same numbers and words is drawn once."""
    drawn: dict[tuple[str, ...], str] = {}

    def draw(drawing: Drawing, prefix: str) -> str:
        shown = (prefix, drawing.name, drawing.title, drawing.caption, repr(drawing.rows))
        if shown not in drawn:
            if len(drawn) == FIGURES:
                drawn.clear()
            drawn[shown] = to_svg(drawing, prefix)
        return drawn[shown]

    def read(folder: Path, name: str) -> None:
        with patch.object(blocks, "to_svg", draw):
            text = make_page(folder)
        assert "<script" not in text
        assert not {*map(chr, range(32)), "\x7f"} & set(text) - {"\n", "\t"}
        assert text.encode()

    return Target(a_run(), read)


# --- what is typed


def command() -> Target:
    """Settings and conditions as they are typed, and a config.toml to run, up to where the data would be loaded."""
    typed = {
        "epochs.set": "epochs=3",
        "eta.set": "eta=0.5",
        "hidden.set": "hidden=[3, 4]",
        "alpha.set": "alpha=uniform",
        "learn_eta.set": "learn_eta=false",
        "max_samples.set": "max_samples=null",
        "strength.where": "strength>=0.5",
        "method.where": "method!=si",
        "hidden.where": "hidden = [256, 256]",
        "max_samples.where": "max_samples=none",
    }
    configs = {"config.toml": preset("split-mnist", "dhp+si", dataset="mnist-small").to_toml()}

    def read(folder: Path, name: str) -> None:
        path = folder / name
        text = os.fsdecode(path.read_bytes())
        if path.suffix == ".where":
            condition = parse_condition(text)
            assert condition.value is None or isinstance(condition.value, int | float | str)
            return
        if path.suffix == ".set":
            made = configs_of("split-mnist", "si,dhp+si", parse_setting(text))
        else:
            made = configs_of(str(path), None, {"epochs": 1})
        runs.check_options(made, Setting("cpu", "float32"))
        for found in made:
            assert from_dict(tomllib.loads(found.to_toml())) == found

    return Target({name: text.encode() for name, text in (typed | configs).items()}, read)


def index() -> Target:
    """An index that came with its runs, half of the time with the checksum that belongs to its damage."""
    files = {f"one/{name}": content for name, content in a_run().items() if not name.endswith("dynamics.csv")}
    files |= {name.replace("one/", "deep/two/"): content for name, content in files.items()}

    def listed(folder: Path) -> list[dict[str, object]]:
        return select(Index(folder), settings=tuple(KINDS))

    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(folder) / name).write_bytes(content)
        expected = listed(Path(folder))
        files[INDEX] = (Path(folder) / INDEX).read_bytes()

    def read(folder: Path, name: str) -> None:
        assert listed(folder) == expected
        assert listed(folder) == expected, "with the index that was made anew"

    return Target(files, read, damaged=(INDEX,))


# --- tensors


def checkpoint() -> Target:
    configs = [config.replace(batch_size=4) for config in small_configs("dhp+si")]
    datasets = [few()]

    class Enough(Exception):
        pass

    with tempfile.TemporaryDirectory() as folder:
        folder_of = CheckpointFolder(Path(folder), 0)
        path = folder_of.of_stack(0).path

        def stop(progress: Progress) -> None:
            if progress.share > 0.3:  # in the middle of an epoch
                raise Enough

        with suppress(Enough):
            run_on(configs, datasets, Setting("cpu", checkpoints=folder_of), stop)
        content = path.read_bytes()
    learners = [build_learner(configs[0], t, (1, 28, 28), 10, torch.device("cpu"), torch.float32) for t in (0, 1)]
    batches = Batches((0, 1), build_streams(configs[0], (0, 1), datasets), configs[0].seed, torch.float32)

    def read(folder: Path, name: str) -> None:
        labelled = {str(c): config for c, config in enumerate(configs)}
        (plan,) = plan_stacks(labelled, None)
        kept, _ = Checkpoints(folder / name).read(labelled, plan)
        assert kept is not None
        place = kept.restore(learners, plan.keys)
        check_position(place, learners, batches, configs[0])
        outcomes = kept.outcomes
        whole = (place.task, place.epoch, place.piece)
        assert all(type(number) is int and number >= 0 for number in whole), whole
        assert 0 <= place.part <= 1
        assert place.task <= configs[0].num_tasks
        (result,) = gather(
            configs,
            {(int(label), t): outcome for (label, t), outcome in outcomes.items()},
            [{"name": "x", "origin": "structure", "train": 1, "test": 1}],
        )
        check_results([result])

    return Target({path.name: content}, read)


def model() -> Target:
    def fresh() -> tuple[Network, engram.OnlineEWC]:
        torch.manual_seed(0)
        features = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
        made = Network(features, engram.DHPSoftmax(4, 3))
        return made, engram.OnlineEWC(made, strength=1)

    made, penalty = fresh()
    penalty.consolidate([(torch.randn(6, 3), torch.arange(6) % 3)])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        engram.save_model(path, made, penalty, about={"classes": ["a", "b", "c"]})
        content = path.read_bytes()

    def read(folder: Path, name: str) -> None:
        made, penalty = fresh()
        before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
        try:
            about = engram.load_model(folder / name, made, penalty)
        except engram.InputError:
            assert all(torch.equal(tensor, before[name]) for name, tensor in made.state_dict().items())
            assert not penalty.terms
            raise
        assert isinstance(about, dict)

    return Target({"model.safetensors": content}, read)


TARGETS: dict[str, Callable[[], Target]] = {
    make.__name__: make
    for make in (
        *(idx, cifar, archive, mat, config, command, run, resume, sheet, selection, page, index, checkpoint, model),
    )
}
