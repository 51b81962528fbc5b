"""Streams of datasets of PyTorch, of folders of images and of data frames."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import engram
from builders import refusal
from engram import streams

Image = pytest.importorskip("PIL.Image")
INPUTS = torch.arange(80.0).reshape(40, 2)
LABELS = torch.arange(40) % 4


class Listed(Dataset):
    """A dataset of whatever it is given."""

    def __init__(self, *samples: object):
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, n: int) -> object:
        return self.samples[n]


class Streamed(IterableDataset):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        return zip(INPUTS, LABELS.tolist(), strict=True)


def rows(*samples: engram.streams.Samples) -> list[int]:
    """Which rows of INPUTS these samples are, sorted."""
    return sorted(int(x) // 2 for part in samples for x in part.inputs[:, 0])


# --- datasets


def test_one_dataset_is_split_by_its_classes() -> None:
    stream = streams.from_dataset(TensorDataset(INPUTS, LABELS))
    assert [(task.name, task.classes) for task in stream] == [("0/1", (0, 1)), ("2/3", (2, 3))]
    for task in stream:
        assert task.test.targets.bincount(minlength=4).tolist().count(2) == 2, "a fifth of each class"
        assert rows(task.train, task.test) == [n for n in range(40) if n % 4 in task.classes]
        assert all(LABELS[int(x) // 2] == y for x, y in zip(task.train.inputs[:, 0], task.train.targets, strict=True))
    alone = streams.from_dataset(TensorDataset(INPUTS, LABELS), classes_per_task=4)
    assert len(alone) == 1


def test_held_out_samples_depend_on_the_seed_alone() -> None:
    dataset = TensorDataset(INPUTS, LABELS)
    held = [rows(streams.from_dataset(dataset, seed=seed)[0].test) for seed in (0, 0, 1)]
    assert held[0] == held[1] != held[2]
    assert len(streams.from_dataset(dataset, test_fraction=0.5)[0].test) == 10


def test_test_dataset_is_used_as_it_is() -> None:
    stream = streams.from_dataset(TensorDataset(INPUTS, LABELS), TensorDataset(INPUTS[:8], LABELS[:8]))
    assert rows(stream[0].train) == [n for n in range(40) if n % 4 < 2]
    assert rows(stream[0].test) == [0, 1, 4, 5]


def test_a_list_of_datasets_is_a_task_each() -> None:
    first, second = TensorDataset(INPUTS[:20], LABELS[:20]), TensorDataset(INPUTS[20:], LABELS[20:])
    stream = streams.from_dataset([first, second])
    assert [task.classes for task in stream] == [(0, 1, 2, 3)] * 2
    assert [rows(task.train, task.test) for task in stream] == [list(range(20)), list(range(20, 40))]
    given = streams.from_dataset([first, second], [second, first])
    assert [rows(task.test) for task in given] == [list(range(20, 40)), list(range(20))]


def test_samples_say_their_tasks() -> None:
    tasks = ["winter" if n % 3 else "summer" for n in range(40)]
    stream = streams.from_dataset(TensorDataset(INPUTS, LABELS), tasks=tasks)
    assert [task.name for task in stream] == ["summer", "winter"]
    assert rows(stream[0].train, stream[0].test) == list(range(0, 40, 3))
    assert stream.num_classes == 4


def test_datasets_without_numbers_of_arrays_and_of_images() -> None:
    streamed, listed = streams.from_dataset(Streamed()), streams.from_dataset(TensorDataset(INPUTS, LABELS))
    assert torch.equal(streamed[1].train.inputs, listed[1].train.inputs)
    arrays = Listed(*((np.full(3, n, dtype=np.float64), np.int64(n % 2)) for n in range(6)))
    assert streams.from_dataset(arrays).input_shape == (3,)
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    images = streams.from_dataset(Listed(*((Image.fromarray(pixels), n % 2) for n in range(4))))
    assert torch.equal(images[0].train.inputs[0], torch.from_numpy(pixels).permute(2, 0, 1))
    grey = streams.from_dataset(Listed(*((Image.fromarray(pixels[..., 0]), n % 2) for n in range(4))))
    assert grey.input_shape == (1, 2, 4)


@pytest.mark.parametrize(
    ("arguments", "options", "sentence"),
    [
        ((3,), {}, "must be a dataset of PyTorch, not a int"),
        ((Listed(),), {}, "is empty"),
        ((Listed({"image": 1}),), {}, r"must be \(input, label\), not a dict"),
        ((Listed((1, 2, 3)),), {}, "not a tuple of 3"),
        ((Listed((torch.ones(2), 0), (torch.ones(3), 0)),), {}, "sample 1 is torch.float32 of shape"),
        ((Listed((torch.ones(2), 0), (torch.ones(2).byte(), 0)),), {}, "sample 1 is torch.uint8"),
        ((Listed(("a cat", 0)),), {}, "must hold numbers, not str"),
        ((Listed((torch.ones(2), "cat")),), {}, "whole number from 0, not 'cat'"),
        ((Listed((torch.ones(2), -1)),), {}, "whole number from 0, not -1"),
        ((Listed((torch.ones(2), torch.tensor(0.5))),), {}, "whole number from 0"),
        ((Listed((torch.ones(2), 0), (torch.ones(2), 1)),), {}, "class 0 has a single sample"),
        ((TensorDataset(INPUTS, LABELS),), {"test_fraction": 1.5}, "between 0 and 1, not 1.5"),
        ((TensorDataset(INPUTS, LABELS),), {"classes_per_task": 0}, "at least one class"),
        ((TensorDataset(INPUTS, LABELS),), {"tasks": [1, 2]}, "40 samples but 2 tasks"),
        ((TensorDataset(INPUTS, LABELS),) * 2, {"tasks": LABELS.tolist()}, "not test samples"),
        ((TensorDataset(INPUTS, LABELS),), {"tasks": LABELS.tolist(), "classes_per_task": 2}, "has no effect"),
        (([TensorDataset(INPUTS, LABELS)],), {"classes_per_task": 2}, "no effect on a list of 1 datasets"),
        (([TensorDataset(INPUTS, LABELS)],), {"tasks": [0] * 40}, "no effect on a list of 1 datasets"),
        (([TensorDataset(INPUTS, LABELS)], TensorDataset(INPUTS, LABELS)), {}, "a list of 1 test datasets"),
        (([],), {}, "at least one task"),
    ],
)
def test_bad_datasets_are_refused(arguments: tuple, options: dict, sentence: str) -> None:
    refusal(streams.from_dataset, *arguments, **options)
    with pytest.raises(engram.InputError, match=sentence):
        streams.from_dataset(*arguments, **options)


# --- folders


def save_images(folder: Path, classes: str, count: int = 5, size: tuple[int, int] = (6, 4), mode: str = "RGB") -> Path:
    """Images whose red (or grey) is 10 times the place of their class in the alphabet, plus their number."""
    for name in classes:
        (folder / name).mkdir(parents=True)
        for n in range(count):
            shade = 10 * (ord(name) - ord("a")) + n
            Image.new(mode, size, (shade, 1, 2) if mode == "RGB" else shade).save(folder / name / f"{n}.png")
    return folder


def test_a_folder_is_split_by_its_classes(tmp_path: Path) -> None:
    folder = save_images(tmp_path / "pets", "dbac")
    (folder / "a" / "notes.txt").write_text("not an image")
    (folder / ".hidden").mkdir()
    stream = streams.from_folder(folder)
    assert [task.name for task in stream] == ["a/b", "c/d"]
    assert stream.input_shape == (3, 4, 6)
    for task in stream:
        for samples, count in ((task.train, 4), (task.test, 1)):
            assert torch.equal(samples.inputs[:, 0, 0, 0] // 10, samples.targets), "the label of its folder"
            assert samples.targets.bincount()[list(task.classes)].tolist() == [count, count]
    assert stream[0].train.inputs.dtype == torch.uint8


def test_folders_are_tasks_that_share_the_names_of_classes(tmp_path: Path) -> None:
    one, other = save_images(tmp_path / "one", "ab"), save_images(tmp_path / "other", "bc")
    stream = streams.from_folder([one, other], [other, one])
    assert [task.name for task in stream] == ["one", "other"]
    assert stream.num_classes == 3
    assert [sorted(set(task.train.labels.tolist())) for task in stream] == [[0, 1], [1, 2]]
    assert torch.equal(stream[0].test.inputs, stream[1].train.inputs)


def test_images_are_resized_grey_and_upright(tmp_path: Path) -> None:
    folder = save_images(tmp_path / "pets", "ab", size=(6, 4))
    assert streams.from_folder(folder, size=8, colour=False).input_shape == (1, 8, 8)
    assert streams.from_folder(folder, size=(2, 3)).input_shape == (3, 2, 3)
    turned = Image.new("RGB", (4, 6))
    exif = turned.getexif()
    exif[0x0112] = 6  # stored on its side
    turned.save(folder / "a" / "9.jpg", exif=exif)
    assert streams.from_folder(folder).input_shape == (3, 4, 6)


def test_bad_folders_are_refused(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in refusal(streams.from_folder, tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    assert "holds no folders" in refusal(streams.from_folder, tmp_path / "empty")
    (tmp_path / "empty" / "a").mkdir()
    assert "holds no images (.bmp" in refusal(streams.from_folder, tmp_path / "empty")
    save_images(tmp_path / "parent" / "train", "ab")
    assert f"give {tmp_path}/parent/train" in refusal(streams.from_folder, tmp_path / "parent")
    folder = save_images(tmp_path / "pets", "ab")
    assert "has the class 'c'" in refusal(streams.from_folder, folder, save_images(tmp_path / "test", "ac"))
    assert "1 training folders but 2 test folders" in refusal(streams.from_folder, [folder], [folder, folder])
    assert "no effect on a list of 1 folders" in refusal(streams.from_folder, [folder], classes_per_task=2)
    assert "size must be (height, width)" in refusal(streams.from_folder, folder, size=0)
    Image.new("RGB", (3, 3)).save(folder / "b" / "9.png")
    assert "has 3 by 3 pixels, and" in refusal(streams.from_folder, folder)
    Image.new("I;16", (6, 4)).save(folder / "b" / "9.png")
    assert "more than 8 bits (I;16)" in refusal(streams.from_folder, folder)
    (folder / "b" / "9.png").write_bytes(b"\x89PNG and then nothing")
    assert "9.png cannot be read as an image" in refusal(streams.from_folder, folder)
    whole = (folder / "b" / "0.png").read_bytes()
    (folder / "b" / "9.png").write_bytes(whole[:-20])
    assert "9.png cannot be read as an image" in refusal(streams.from_folder, folder)


# --- data frames


@pytest.fixture
def pandas():  # type: ignore[no-untyped-def]
    return pytest.importorskip("pandas")


def make_frame(pandas, count: int = 40):  # type: ignore[no-untyped-def]
    names = ["cat", "bat", "owl", "dog"]
    columns = {"x": np.arange(count) * 2.0, "kind": [names[n % 4] for n in range(count)], "y": np.arange(count)}
    return pandas.DataFrame(columns | {"year": [2020 - n % 2 for n in range(count)]})


def test_a_frame_is_split_by_its_sorted_labels(pandas) -> None:
    stream = streams.from_dataframe(make_frame(pandas).drop(columns="year"), "kind")
    assert [task.name for task in stream] == ["bat/cat", "dog/owl"]
    assert stream.input_shape == (2,)
    task = stream[0]
    assert rows(task.train, task.test) == [n for n in range(40) if n % 4 < 2]
    assert all((int(x) // 2) % 4 == 1 - y for (x, _), y in zip(task.train.inputs, task.train.targets, strict=True))
    assert torch.equal(task.train.inputs[:, 1] * 2, task.train.inputs[:, 0])


def test_a_column_names_the_tasks(pandas) -> None:
    frame = make_frame(pandas)
    stream = streams.from_dataframe(frame, "kind", frame[:8], task="year", columns=["x"])
    assert [task.name for task in stream] == ["2020", "2019"], "as they are first found"
    assert stream.input_shape == (1,)
    assert [task.classes for task in stream] == [(0, 1, 2, 3)] * 2
    assert [rows(task.train) for task in stream] == [list(range(0, 40, 2)), list(range(1, 40, 2))]
    assert [rows(task.test) for task in stream] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    whole = frame.assign(kind=[n % 2 for n in range(40)], flag=frame["y"] > 3, rare=frame["y"].astype("Int64"))
    assert streams.from_dataframe(whole, "kind", task="year").input_shape == (4,)


def test_bad_frames_are_refused(pandas) -> None:
    frame = make_frame(pandas)
    numbers = frame[["x", "y"]]

    def refused(changed: object, label: str = "kind", *test: object, **options: object) -> str:
        return refusal(streams.from_dataframe, changed, label, *test, **options)

    assert "a DataFrame of pandas, not a list" in refused([1, 2])
    assert "a DataFrame of pandas, not a list" in refused(frame, "kind", [1])
    assert "no column named 'knid' (did you mean kind?)" in refused(frame, "knid")
    assert "no column named 'yaer' (did you mean year?)" in refused(frame, task="yaer")
    assert "2 columns named 'y'" in refused(pandas.concat([frame, frame[["y"]]], axis=1))
    assert "'city' holds text, such as 'Rome'" in refused(frame.assign(city="Rome"))
    assert "'born' holds datetime64" in refused(frame.assign(born=pandas.Timestamp(0)))
    assert "'x' has 1 missing values" in refused(frame.assign(x=frame["x"].where(frame["x"] > 0)))
    assert "'x' has 1 missing values" in refused(frame.assign(x=frame["y"].astype("Int64").where(frame["x"] > 0)))
    assert "the label column 'kind' has 10 missing" in refused(
        frame.assign(kind=frame["kind"].where(frame["kind"] != "cat"))
    )
    assert "the task column 'year' has 20 missing" in refused(
        frame.assign(year=frame["year"].where(frame["year"] > 2019)), task="year"
    )
    assert "'x' holds 0.5, but labels are" in refused(numbers.assign(x=numbers["x"] + 0.5), "x")
    assert "mixes words and numbers" in refused(frame.assign(kind=["a", 1] * 20))
    assert "no columns of inputs" in refused(frame[["kind"]])
    assert "the test frame has the class 'gnu'" in refused(frame, "kind", frame.assign(kind="gnu"))
    assert "have the task 7, which" in refused(frame, "kind", frame.assign(year=7), task="year")
    assert "classes_per_task has no effect" in refused(frame, task="year", classes_per_task=2)
    assert "NaN or infinity" in refused(frame.assign(x=np.inf))


# --- all of them


def test_engram_runs_on_them(pandas, tmp_path: Path) -> None:
    config = engram.preset("custom", "dhp+si", strength=1.0, epochs=1, trials=1, hidden=[8])
    folder = save_images(tmp_path / "pets", "abcd")
    made = [streams.from_dataset(TensorDataset(INPUTS, LABELS)), streams.from_folder(folder)]
    made.append(streams.from_dataframe(make_frame(pandas), "kind", task="year"))
    for stream in made:
        assert engram.run(config, stream=stream).accuracy.shape == (1, 2, 2)
