"""Registries list names without importing what they name, and import it when it is used."""

import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from engram.common.errors import InputError
from engram.common.registry import BENCHMARKS, HEADS, PENALTIES, Registry


@pytest.fixture
def registry() -> Registry:
    return Registry("tool", "engram.common", "tools.engram")


def test_registered_function_is_found_with_its_facts(registry: Registry) -> None:
    @registry.register("hammer", weight=2)
    def make_hammer() -> str:
        return "hammer"

    assert registry.names() == ("hammer",)
    assert "hammer" in registry
    assert registry["hammer"].make is make_hammer
    assert registry.facts("hammer") == {"weight": 2}


@pytest.mark.parametrize("settings", ["length", {"length": "length"}])
def test_settings_of_the_same_names_may_be_words(registry: Registry, settings: object) -> None:
    registry.register("saw", settings=settings)(print)
    assert registry.facts("saw")["settings"] == {"length": "length"}


def test_unknown_name_is_refused_with_the_choices(registry: Registry) -> None:
    registry.register("hammer")(print)
    with pytest.raises(InputError, match=r"^there is no tool 'hamer' \(did you mean hammer\?\), only hammer$"):
        registry["hamer"]


def test_name_may_end_in_two_plus_signs(registry: Registry) -> None:
    registry.register("der++")(print)
    assert "der++" in registry


@pytest.mark.parametrize("name", ["", "Hammer", "a+b", "a b", "-a", "a_b", "a+", "a++b", "++", "a+++"])
def test_bad_names_are_refused(registry: Registry, name: str) -> None:
    with pytest.raises(InputError, match="lower-case letters"):
        registry.register(name)


def test_second_registration_of_a_name_is_refused(registry: Registry) -> None:
    registry.register("hammer")(print)
    registry.register("hammer")(print)  # the same one again, as when its module is reloaded
    with pytest.raises(InputError, match=r"the tool hammer is registered twice, by builtins\.print and builtins\.len"):
        registry.register("hammer")(len)


def entry_point(folder: Path, name: str, module: str) -> None:
    information = folder / f"{name}-0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (information / "entry_points.txt").write_text(f"[engram.penalties]\n{name} = {module}\n")


def test_entry_points_are_listed_and_imported_when_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    entry_point(tmp_path, "late", "late_penalty")
    entry_point(tmp_path, "absent", "absent_penalty")
    entry_point(tmp_path, "empty", "empty_penalty")
    (tmp_path / "empty_penalty.py").write_text("")
    registry = Registry("penalty", "engram.penalties", "engram.penalties")
    monkeypatch.setattr("engram.common.registry.PENALTIES", registry)
    (tmp_path / "late_penalty.py").write_text(
        "from engram.common.registry import PENALTIES\n\n@PENALTIES.register('late', number=1)\ndef make(): pass\n"
    )
    assert {"late", "absent", "empty"} <= set(registry.names())
    assert "late_penalty" not in sys.modules
    assert registry.facts("late") == {"number": 1}
    assert "late_penalty" in sys.modules
    with pytest.raises(InputError, match="the penalty absent cannot be imported from absent_penalty: No module named"):
        registry["absent"]
    with pytest.raises(InputError, match="the module empty_penalty does not register the penalty empty"):
        registry["empty"]


def test_entry_points_that_are_ignored_are_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = PENALTIES.facts("si")  # read before the other package is there, whatever test came first
    monkeypatch.syspath_prepend(tmp_path)
    entry_point(tmp_path, "Late_One", "late_penalty")
    entry_point(tmp_path, "si", "second_si")
    registry = Registry("penalty", "engram.penalties", "engram.penalties")
    for _ in range(2):
        assert "Late_One" not in registry.names()
    assert registry.facts("si") == own
    assert sorted(caplog.messages) == [
        "the penalty 'Late_One' of late_penalty is ignored: a name has lower-case letters, digits and dashes",
        "the penalty 'si' of second_si is ignored: engram.penalties.si has that name already",
    ]


@pytest.mark.parametrize("registry", [HEADS, PENALTIES, BENCHMARKS], ids=lambda registry: registry.kind)
def test_facts_in_the_text_are_those_that_are_registered(registry: Registry) -> None:
    for name, source in registry._read_room().items():
        assert source.facts == registry[name].facts
        assert registry[name].make.__module__ == source.module


@pytest.mark.parametrize("registry", [HEADS, PENALTIES, BENCHMARKS], ids=lambda registry: registry.kind)
def test_every_registration_of_the_package_is_found_in_its_text(registry: Registry) -> None:
    """A decorator that is indented, or names the registry otherwise, would be missed until its file is imported."""
    for module in pkgutil.iter_modules(import_module(registry.room).__path__, f"{registry.room}."):
        import_module(module.name)
    own = {name for name, there in registry._registered.items() if there.make.__module__.startswith("engram.")}
    assert own == set(registry._read_room())


def test_listing_names_imports_no_torch() -> None:
    program = (
        "import sys\n"
        "from engram.common.registry import BENCHMARKS, HEADS, PENALTIES\n"
        "for registry in (BENCHMARKS, HEADS, PENALTIES):\n"
        "    names = registry.names()\n"
        "    facts = [registry.facts(name) for name in names]\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
