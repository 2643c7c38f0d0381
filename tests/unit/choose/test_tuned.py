"""Files that `cupyattn tune` writes: which are used, and which are left out with a word."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from cupyattn.choose import card, old_names, tuned
from cupyattn.choose.card import Card
from cupyattn.choose.fit import text_of
from cupyattn.core.device import NO_GPU, DeviceProps

PROPS = dataclasses.replace(
    NO_GPU, index=0, name="NVIDIA RTX 6000 (Ada)", arch="sm_89", num_sms=142
)
FILE = "nvidia-rtx-6000-ada.json"
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CUPYATTN_TUNED", "1")
    forget()
    return tmp_path / "cache" / "cards"


def forget() -> None:
    """As in a process of its own."""
    tuned._find.cache_clear()
    card.known.cache_clear()


def own() -> Card:
    made = dataclasses.replace(card.packaged(PROPS), state_rate=12340.0, source="rows at c0ffee")
    return dataclasses.replace(made, scaled_from="")


def found(props: DeviceProps = PROPS) -> card.Known:
    forget()
    return card.known(props)


def test_a_tuned_card_goes_before_those_of_the_package(folder: Path) -> None:
    assert found().file is None and found().card.scaled_from
    path = tuned.write(PROPS.name, text_of(own()))
    assert path == folder / FILE and path.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        known, file = found()
    assert file == path and known.state_rate == 12340.0 and not known.scaled_from
    assert known.source == "rows at c0ffee"
    assert known.tiles.keys() == own().tiles.keys()
    # A second one replaces it.
    tuned.write(PROPS.name, text_of(dataclasses.replace(own(), state_rate=54320.0)))
    assert found().card.state_rate == 54320.0 and [*folder.iterdir()] == [path]


def test_a_card_of_old_names_is_read_by_todays(folder: Path) -> None:
    """What `cupyattn tune` wrote before tiles were named by what they are."""
    data = json.loads(text_of(own()))
    old = {today: then for then, today in old_names._TILES.items()} | {
        "q192_persistent": "broad",
        "lean80": "lean",
    }
    is_lean64 = ("lean64", "paged", [64, 64])
    fields = {today: then for then, today in old_names._FIELDS.items()}
    for kind, times in data["decode"].items():
        data["decode"][kind] = {fields.get(x, x): us for x, us in times.items()}
    assert "least_share" in data["decode"]["cluster"]
    for index, row in enumerate(data["tiles"]):
        if (row["tile"], row["keys"], row["dims"]) == is_lean64:
            row["tile"] = "lean"
        is_later = row["tile"] == "q192_persistent" and max(row["dims"]) > 80
        row["tile"] = row["tile"] if is_later else old.get(row["tile"], row["tile"])
        data["tiles"][index] = {fields.get(name, name): value for name, value in row.items()}
    tuned.write(PROPS.name, json.dumps(data))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        known = found().card
    today = card.read(text_of(own()), "own")
    assert (known.tiles, known.decode) == (today.tiles, today.decode)


def test_a_measured_card_of_the_package_gives_way_too() -> None:
    props = dataclasses.replace(NO_GPU, index=0, name="NVIDIA H200")
    assert not found(props).card.scaled_from
    made = dataclasses.replace(card.packaged(props), name=props.name, state_rate=12340.0)
    tuned.write(props.name, text_of(made))
    assert found(props).card.state_rate == 12340.0


def test_it_is_of_this_card_alone_and_of_no_plan_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tuned.write(PROPS.name, text_of(own()))
    assert found(dataclasses.replace(PROPS, name="NVIDIA L40S")).file is None
    assert found(dataclasses.replace(PROPS, index=-1)).file is None
    assert found(dataclasses.replace(PROPS, index=3)).file is not None
    monkeypatch.setenv("CUPYATTN_TUNED", "0")
    assert found().file is None


def test_it_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tuned.write(PROPS.name, text_of(own()))
    assert found().file == path
    path.unlink()
    assert card.known(PROPS).file == path
    assert card.known(dataclasses.replace(PROPS, index=1)).file == path


Change = Callable[[Path], object]


def _changed(edit: Callable[[dict], object]) -> Change:
    def change(path: Path) -> None:
        data = json.loads(path.read_text())
        edit(data)
        path.write_text(json.dumps(data))

    return change


FAULTS: dict[str, tuple[Change, str]] = {
    "no JSON": (lambda path: path.write_text("{"), "no file of a card's times"),
    "no text": (lambda path: path.write_bytes(b"\xff\xfe"), "no file of a card's times"),
    "too deep": (lambda path: path.write_text("[" * 10**5), "no file of a card's times"),
    "an older form": (_changed(lambda x: x.pop("rates")), "KeyError: 'rates'"),
    "a number that is none": (
        _changed(lambda x: x["rates"].update(states="fast")),
        "could not convert",
    ),
    "a newer form": (
        _changed(lambda x: x["decode"]["cluster"].update(colour=1.0)),
        "unexpected keyword",
    ),
    "another card": (
        _changed(lambda x: x["card"].update(name="NVIDIA L40S")),
        "it holds the times of NVIDIA L40S (sm_89), not of NVIDIA RTX 6000 (Ada) (sm_89)",
    ),
    "another architecture": (
        _changed(lambda x: x["card"].update(arch="sm_80")),
        "it holds the times of NVIDIA RTX 6000 (Ada) (sm_80)",
    ),
    "writable by all": (lambda path: path.chmod(0o666), "other users may write it (mode 666)"),
    "a folder that all may write": (
        lambda path: path.parent.chmod(0o777),
        "other users may write it (mode 777)",
    ),
    "a link": (
        lambda path: path.symlink_to(path.rename(path.with_suffix(".other"))),
        "Too many levels of symbolic links",
    ),
    "a link to a folder": (
        lambda path: path.parent.symlink_to(path.parent.rename(path.parent.with_name("other"))),
        "Not a directory",
    ),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "is not a plain file"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "is not a plain file"),
}


def _is_left_out(path: Path, reason: str) -> None:
    forget()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert card.known(PROPS) == card.Known(card.packaged(PROPS))
        card.known(dataclasses.replace(PROPS, index=1))
    (warning,) = said
    text = str(warning.message)
    assert text.startswith(f"cupyattn: {path}: ") and reason in text, text
    assert text.endswith("; delete it, or write it anew with `cupyattn tune`")


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_used_is_left_out_with_one_warning(fault: str) -> None:
    path = tuned.write(PROPS.name, text_of(own()))
    change, reason = FAULTS[fault]
    change(path)
    _is_left_out(path, reason)


@needs_root
@pytest.mark.parametrize("up", [0, 1, 2])
def test_what_another_user_wrote_is_left_out(up: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tuned.write(PROPS.name, text_of(own()))
    os.chown([path, *path.parents][up], 65534, 65534)
    _is_left_out(path, "it belongs to user 65534")
    monkeypatch.setenv("CUPYATTN_CACHE_SHARED", "1")
    assert found().file == path


def test_a_folder_that_is_none_is_left_to_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", "relative")
    assert found().file is None


def test_nothing_of_cupy_is_imported_to_find_a_card() -> None:
    tuned.write(PROPS.name, text_of(own()))
    code = f"""if True:
        import dataclasses, sys
        from cupyattn.choose import card
        from cupyattn.core.device import NO_GPU
        props = dataclasses.replace(NO_GPU, index=0, name={PROPS.name!r}, arch="sm_89")
        assert card.known(props).file is not None
        assert not {{"cupy", "cupy_backends"}} & set(sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


CARDS = {
    "NVIDIA A100-SXM4-80GB": ("sm_80", 108, 2039, 1410),
    "NVIDIA A100-PCIE-40GB": ("sm_80", 108, 1555, 1410),
    "NVIDIA GeForce RTX 3090": ("sm_86", 82, 936, 1695),
    "NVIDIA L40S": ("sm_89", 142, 864, 2520),
    "NVIDIA B200": ("sm_100a", 148, 8000, 1965),
    "NVIDIA GeForce RTX 5090": ("sm_120a", 170, 1792, 2407),
    "NVIDIA H100 PCIe": ("sm_90a", 114, 2039, 1755),
    "NVIDIA GH200 480GB": ("sm_90a", 132, 4023, 1980),
}


@pytest.mark.parametrize("name", CARDS)
def test_cards_that_nobody_measured_are_scaled(name: str) -> None:
    arch, num_sms, memory_rate, sm_clock = CARDS[name]
    props = dataclasses.replace(
        PROPS, name=name, arch=arch, num_sms=num_sms, memory_rate=memory_rate, sm_clock=sm_clock
    )
    made = card.card_of(props)
    assert made.name == name and made.arch == arch and not made.source
    (base,) = (x for x in card.shipped() if x.name == made.scaled_from)
    memory, clock = memory_rate / base.memory_rate, sm_clock / base.sm_clock
    assert made.key_rate == pytest.approx(memory * base.key_rate)
    for key, timed in made.tiles.items():
        assert timed.times.key_tile == pytest.approx(base.tiles[key].times.key_tile / clock)
    # One that does not tell its rates is taken to have those of its architecture's file.
    if arch != "sm_90a":
        untold = card.card_of(dataclasses.replace(props, name="?", memory_rate=0.0, sm_clock=0.0))
        (like,) = (x for x in card.unmeasured() if x.arch == arch)
        assert untold.key_rate == like.key_rate and untold.scaled_from == like.scaled_from


def test_every_architecture_has_a_file() -> None:
    from cupyattn.core.device import ARCHS

    assert {x.arch for x in (*card.shipped(), *card.unmeasured())} == set(ARCHS)
    for path in card.FOLDER.glob("sm_*.json"):
        data = json.loads(path.read_text())
        assert data.keys() == {"card", "measured", "like"} and data["measured"] is None
        assert data["card"]["arch"] == path.stem
