"""CUPYATTN_DUMP: calls in files, and `cupyattn replay`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import fake_gpu

import cupyattn
from cupyattn import array, cli, flash_mla
from cupyattn.core import observed
from cupyattn.errors import ArgumentError, PlanError
from cupyattn.flash_attn import flash_attn_with_kvcache
from cupyattn.observation import calls, encoding, replay

RANDOM = np.random.default_rng(5)
prefill = observed.watched(cupyattn.single_prefill_with_kv_cache)


def normal(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(dtype)


def saved(folder: Path) -> list[Path]:
    return sorted(x for x in folder.glob("*.json") if not x.name.endswith(".result.json"))


def replayed(path: Path) -> replay.Replay:
    """A call that gives again, bit for bit, what was recorded."""
    result = replay.replay(path, "cpu")
    assert not result.reference.error
    (run,) = result.runs
    differences = result.differences[run.where]
    assert len(differences) == len(run.arrays) > 0
    assert all(x.largest == 0 and not x.unlike for x in differences)
    return result


def test_a_call_is_saved_and_runs_again(folder: Path) -> None:
    q, k = normal(4, 8, 64), normal(9, 2, 64)
    # Other strides, from behind, and one row for all.
    k, v = k[::-1], np.broadcast_to(normal(1, 2, 64), (9, 2, 64))
    prefill(q, k, v, causal=True, window_left=5, sm_scale=0.3, return_lse=True)
    (path,) = saved(folder)
    facts = json.loads(path.read_text())
    (step,) = facts["steps"]
    assert step["name"] == "cupyattn.single_prefill_with_kv_cache"
    assert dict(step["positional"])["k"]["strides"] == [-128, 64, 1]
    with np.load(path.with_suffix(".npz")) as arrays:
        assert arrays["0.v"].shape == (1, 2, 64)
    assert set(replayed(path).reference.arrays) == {"output[0]", "output[1]"}


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_dtypes_and_frameworks(folder: Path, dtype: Any, framework: str) -> None:
    q, k = normal(4, 8, 64, dtype=dtype), normal(9, 2, 64, dtype=dtype)
    if framework == "torch":
        torch = pytest.importorskip("torch")
        carrier = np.dtype(f"i{q.itemsize}")
        name = np.dtype(dtype).name
        q, k = (torch.from_numpy(x.view(carrier)).view(getattr(torch, name)) for x in (q, k))
    prefill(q, k, k)
    (path,) = saved(folder)
    replayed(path)


@pytest.fixture
def public_wrapper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """BatchDecodeWithPagedKVCacheWrapper, whose calls are observed."""
    cls = cupyattn.BatchDecodeWithPagedKVCacheWrapper
    for name in ("__init__", "plan", "run"):
        monkeypatch.setattr(cls, name, observed.watched(getattr(cls, name)))
    return cls


def plan_of(wrapper: Any) -> None:
    offsets, pages = np.array([0, 1, 3], np.int32), np.array([0, 7, 5], np.int32)
    wrapper.plan(offsets, pages, np.array([3, 16], np.int32), 8, 2, 64, 16)


def test_a_run_has_its_plan_with_it(folder: Path, public_wrapper: Any) -> None:
    wrapper = public_wrapper(np.zeros(1 << 20, np.uint8))
    plan_of(wrapper)
    wrapper.run(normal(2, 8, 64), normal(9, 2, 16, 2, 64), return_lse=True)
    (path,) = saved(folder)
    steps = [x["function"].rpartition(".")[2] for x in json.loads(path.read_text())["steps"]]
    assert steps == ["__init__", "plan", "run"]
    # A workspace holds nothing.
    with np.load(path.with_suffix(".npz")) as arrays:
        assert not any("workspace" in key for key in arrays)
    replayed(path)


def test_a_workspace_on_a_device_by_name(folder: Path, public_wrapper: Any) -> None:
    """Such as "cuda:0": it is made where the call is run again."""
    wrapper = public_wrapper("cpu")
    plan_of(wrapper)
    wrapper.run(normal(2, 8, 64), normal(9, 2, 16, 2, 64))
    (path,) = saved(folder)
    text = path.read_text()
    assert text.count('"device": "cpu"') > 3
    path.write_text(text.replace('"device": "cpu"', '"device": "cuda:0"'))
    replayed(path)


def test_of_large_pools_the_pages_in_use_are_saved(
    folder: Path, public_wrapper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "_MAX_WHOLE_POOL", 1 << 10)
    wrapper = public_wrapper(np.zeros(1 << 20, np.uint8))
    plan_of(wrapper)
    wrapper.run(normal(2, 8, 64), normal(9, 2, 16, 2, 64))
    k, v = normal(9, 16, 2, 64), normal(9, 16, 2, 64)
    table = np.array([[4, -1], [2, 8]], np.int32)
    lengths = np.array([3, 20], np.int32)
    attend = observed.watched(flash_attn_with_kvcache)
    attend(normal(2, 1, 8, 64), k, v, cache_seqlens=lengths, block_table=table)
    run, call = saved(folder)
    with np.load(run.with_suffix(".npz")) as arrays:
        assert arrays["2.paged_kv_cache.pages"].tolist() == [0, 5, 7]
        assert arrays["2.paged_kv_cache"].shape == (3, 2, 16, 2, 64)
    with np.load(call.with_suffix(".npz")) as arrays:
        assert arrays["0.k_cache.pages"].tolist() == [2, 4, 8]
    replayed(run)
    replayed(call)


def test_what_a_call_writes_is_compared(folder: Path) -> None:
    append = observed.watched(cupyattn.append_paged_kv_cache)
    ints = (np.array(x, np.int32) for x in ([0, 0], [0, 1], [2], [0, 1], [2]))
    requests, positions, *tables = ints
    k, pages = normal(2, 2, 64), np.zeros((3, 2, 16, 2, 64), np.float16)
    append(k, k, requests, positions, pages, *tables)
    (path,) = saved(folder)
    result = replayed(path)
    assert result.reference.arrays["paged_kv_cache"][2, 0, 1, 0, 0] == k[1, 0, 0]
    with np.load(path.with_suffix(".npz")) as arrays:
        assert not arrays["0.paged_kv_cache"].any()  # as it was before


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_arrays_of_one_memory_stay_there(folder: Path, framework: str) -> None:
    cache, q = normal(9, 2, 16, 2, 64), normal(2, 1, 8, 64)
    out = np.zeros((2, 1, 8, 64), np.float16)
    if framework == "torch":
        torch = pytest.importorskip("torch")
        cache, q, out = map(torch.from_numpy, (cache, q, out))
    lengths, table = np.array([3, 20], np.int32), np.array([[4, 0], [2, 8]], np.int32)
    attend = observed.watched(flash_attn_with_kvcache)
    # Keys and values alternate, and the output follows the queries.
    attend(q, cache[:, 0], cache[:, 1], cache_seqlens=lengths, block_table=table, out=out)
    (path,) = saved(folder)
    replayed(path)
    (step,) = json.loads(path.read_text())["steps"]
    arguments = dict(step["positional"])
    (number, begin, size), k = arguments["v_cache"]["memory"], arguments["k_cache"]["memory"]
    assert [number, 0, size] == k and begin == 2 * 16 * 2 * 64
    decoder = encoding.Decoder(step, replay.SavedCall(path)._arrays, [], lambda device: "cpu")
    k_again, v_again = (decoder.decode(arguments[name]) for name in ("k_cache", "v_cache"))
    assert (np.asarray(k_again) == np.asarray(cache[:, 0])).all()
    assert (np.asarray(v_again) == np.asarray(cache[:, 1])).all()
    if framework == "torch":
        assert v_again.data_ptr() - k_again.data_ptr() == begin


def test_records_of_the_package(folder: Path) -> None:
    call = observed.watched(flash_mla.flash_mla_with_kvcache)
    lengths, table = np.array([3], np.int32), np.array([[1]], np.int32)
    metadata, _ = flash_mla.get_mla_metadata()
    call(normal(1, 1, 16, 576), normal(2, 64, 1, 576), table, lengths, 512, metadata)
    (path,) = saved(folder)
    replayed(path)
    encoder = encoding.Encoder(1 << 20, lambda x: None)
    record = cupyattn.quantize_qkv(normal(4, 8, 64), normal(4, 2, 64), normal(4, 2, 64))
    decoder = encoding.Decoder({}, {}, [], lambda device: "cpu")
    about = encoder.encode("x", record._replace(**dict.fromkeys(record._fields)), "x")
    assert isinstance(decoder.decode(about), cupyattn.QuantizedQKV)
    for odd in (
        {"record": "Popen", "module": "subprocess", "fields": []},
        {"record": "Path", "module": "cupyattn.jit.store", "fields": []},
        {"record": "X", "module": "cupyattn.no.such", "fields": []},
    ):
        with pytest.raises(ArgumentError):
            decoder.decode(odd)


def test_arguments_keep_their_order(folder: Path) -> None:
    """Older releases had another, which the call itself tells by what it is given."""
    q, k = normal(4, 8, 64), normal(9, 2, 64)
    prefill(q, k, k, None, None, True, "NHD")
    (path,) = saved(folder)
    replayed(path)
    prefill(q, k, k, sm_scale=np.array(0.5), o_dtype=np.float32)  # no dtype of arrays here
    replayed(next(x for x in saved(folder) if x != path))


# --- limits ---


def test_files_are_never_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    q = normal(1, 2, 64)
    prefill(q, q, q)
    (first,) = saved(folder)
    text = first.read_bytes(), first.with_suffix(".npz").read_bytes()
    # A process of the same number, in another container.
    monkeypatch.setattr(calls, "_numbers", iter([int(first.stem.rpartition("-")[2])]))
    prefill(2 * q, q, q)
    assert (first.read_bytes(), first.with_suffix(".npz").read_bytes()) == text
    assert {x.stem for x in saved(folder)} == {first.stem, f"{first.stem}-2"}


def test_so_many_calls(asks: Callable[..., None], tmp_path: Path) -> None:
    asks(DUMP=str(tmp_path), DUMP_CALLS="2")
    q = normal(1, 2, 64)
    for _ in range(3):
        prefill(q, q, q)
    assert len(saved(tmp_path)) == 2


def test_calls_by_name(asks: Callable[..., None], tmp_path: Path) -> None:
    asks(DUMP=str(tmp_path), DUMP_NAMES="*decode*, dot_product_attention")
    q = normal(1, 2, 64)
    prefill(q, q, q)
    observed.watched(cupyattn.single_decode_with_kv_cache)(q[0], q, q)
    observed.watched(cupyattn.dot_product_attention)(q, q, q)
    names = [x.name.partition("-")[0] for x in saved(tmp_path)]
    assert names == ["dot_product_attention", "single_decode_with_kv_cache"]


@pytest.mark.parametrize("names", ["serving.*", "*.run, cupyattn.distributed.RankWrapper.run"])
def test_names_of_calls_that_are_never_saved(
    asks: Callable[..., None], tmp_path: Path, names: str
) -> None:
    asks(DUMP=str(tmp_path), DUMP_NAMES=names)
    q = normal(1, 2, 64)
    with pytest.raises(ArgumentError, match=r"CUPYATTN_DUMP_NAMES: .*serving.* are not saved"):
        prefill(q, q, q)


def test_a_backend_s_calls_are_said_not_to_be_saved(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def forward() -> int:
        return 7

    forward.__module__, forward.__qualname__ = "cupyattn.serving.backend", "forward"
    for _ in range(2):
        assert observed.watched(forward)() == 7
    (said,) = [x for x in caplog.messages if "is not saved" in x]
    assert said.startswith("cupyattn: cupyattn.serving.forward is not saved")
    assert saved(folder) == []


def test_calls_that_are_too_large(
    asks: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asks(DUMP=str(tmp_path), DUMP_LIMIT_MIB="1")
    q = normal(1, 2, 64)
    prefill(q, normal(5000, 2, 64), normal(5000, 2, 64))
    assert saved(tmp_path) == []
    assert "is not saved: more than 1 MiB; raise CUPYATTN_DUMP_LIMIT_MIB" in caplog.text


def test_a_folder_that_cannot_be(asks: Callable[..., None], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    q, out = normal(1, 2, 64), np.zeros((1, 2, 64), np.float16)
    for name in (file, file / "below"):
        asks(DUMP=str(name))
        with pytest.raises(ArgumentError, match="CUPYATTN_DUMP: "):
            prefill(q, q, q, out=out)
    asks(DUMP=str(tmp_path), DUMP_CALLS="some")
    with pytest.raises(ArgumentError, match="CUPYATTN_DUMP_CALLS: got 'some'"):
        prefill(q, q, q, out=out)
    assert not out.any()


# --- a stand-in GPU ---


def test_calls_on_a_gpu(folder: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make = fake_gpu.maker("torch", monkeypatch)

    def to_host(v: array.ArrayView) -> np.ndarray:
        part = v.owner.as_strided(v.shape, v.strides)
        elements: np.ndarray = part.view(v.owner.new_empty(0).short().dtype).numpy()
        return elements.view(v.dtype.numpy)

    monkeypatch.setattr(array, "to_host", to_host)
    decode = observed.watched(cupyattn.single_decode_with_kv_cache)
    decode(make(8, 64), make(400, 2, 64), make(400, 2, 64))
    (path,) = saved(folder)
    (step,) = json.loads(path.read_text())["steps"]
    assert dict(step["positional"])["q"]["device"] == "cuda:0"
    result = json.loads(path.with_suffix(".result.json").read_text())
    ((launch, _),) = result["launches"]
    assert launch.startswith("decode_sm80, ")
    with pytest.raises(ArgumentError):
        decode(make(8, 64), make(400, 3, 64), make(400, 3, 64))
    (refused,) = (x for x in saved(folder) if x != path)
    device = json.loads(refused.with_suffix(".result.json").read_text())["device"]
    assert device == result["device"] != "cpu"
    refused.unlink()
    gpu.is_capturing = True  # nothing can be read then
    decode(make(8, 64), make(400, 2, 64), make(400, 2, 64))
    assert saved(folder) == [path]


def test_a_plan_that_a_capture_refuses(
    folder: Path, gpu: Any, public_wrapper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is read or saved, and the plan before it stays that of later runs."""
    wrapper = public_wrapper(np.zeros(1 << 20, np.uint8))
    plan_of(wrapper)

    @functools.wraps(public_wrapper.plan.__wrapped__)
    def refused(*args: Any) -> None:
        raise PlanError("plan(): call it before the capture")

    with monkeypatch.context() as patch:
        make = fake_gpu.maker("torch", patch)
        patch.setattr(array, "to_host", lambda v: pytest.fail("a capture cannot be read"))
        gpu.is_capturing, offsets = True, make(3, dtype="int32")
        with pytest.raises(PlanError, match="before the capture"):
            observed.watched(refused)(wrapper, offsets, offsets, offsets, 8, 2, 64, 16)
    assert not saved(folder)
    wrapper.run(normal(2, 8, 64), normal(9, 2, 16, 2, 64))
    (path,) = saved(folder)
    replayed(path)


# --- calls that fail ---


def test_errors_are_saved_and_raised_again(folder: Path) -> None:
    q = normal(1, 2, 64)
    with pytest.raises(ArgumentError) as raised:
        prefill(q, q, q, sm_scale="large")
    (path,) = saved(folder)
    result = replay.replay(path, "cpu")
    assert result.reference.error == f"ArgumentError: {raised.value}" == result.runs[0].error


def test_a_plan_that_fails_is_saved(folder: Path, public_wrapper: Any) -> None:
    wrapper = public_wrapper(np.zeros(1 << 20, np.uint8))
    offsets = np.array([0, 2], np.int32)
    with pytest.raises(ArgumentError):
        wrapper.plan(offsets, offsets, offsets[1:], 8, 3, 64, 16)
    (path,) = saved(folder)
    assert "num_qo_heads" in replay.replay(path, "cpu").reference.error
    with pytest.raises(PlanError):
        wrapper.run(normal(1, 8, 64), normal(3, 2, 16, 2, 64))


def test_what_no_file_holds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    q = normal(1, 2, 64)
    with pytest.raises(ArgumentError):
        prefill(q, q, q, custom_mask=object())
    (path,) = saved(folder)
    assert cli.main(["replay", str(path)]) == 2
    assert "which no file holds; it cannot be run again" in capsys.readouterr().err


# --- the command ---


def test_replay_prints_what_it_compares(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefill(normal(4, 8, 64), normal(9, 2, 64), normal(9, 2, 64))
    (path,) = saved(folder)
    # As if a kernel had been wrong.
    wrong = path.with_suffix(".result.npz")
    with np.load(wrong) as arrays:
        elements = arrays["result"].view(np.float16)
    elements[2, 5, 7] += 1
    wrong.unlink()
    np.savez(wrong, result=elements.view(np.uint16))
    assert cli.main(["replay", "--device", "cpu", str(path)]) == 0
    out = capsys.readouterr().out
    assert "call       cupyattn.single_prefill_with_kv_cache" in out
    assert "  q: numpy float16 [4, 8, 64] on cpu, strides [512, 64, 1]" in out
    assert "recorded on the CPU" in out and " at [2, 5, 7] (" in out
    assert cli.main(["replay", "--device", "cpu", "--json", str(path)]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    (difference,) = run["differences"]
    assert difference["at"] == [2, 5, 7] and difference["largest"] == pytest.approx(1, abs=0.01)


def test_files_that_are_no_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, message in (
        ("{", "is not a saved call"),
        ("[]", "is not a saved call"),
        ('{"schema": 99, "cupyattn": "9.9"}', "use the release that saved it, 9.9"),
        (None, "cannot be read"),
    ):
        path = tmp_path / "call.json"
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        assert cli.main(["replay", str(path)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "step",
    [
        {"module": "os", "function": "system", "class": None},
        {"module": "cupyattn.core.log", "function": "logger", "class": None},
        {"module": "cupyattn.jit.cache", "function": "clear", "class": None},
        {"module": "x", "function": "Popen.__init__", "class": "subprocess:Popen"},
    ],
)
def test_files_name_public_calls_alone(tmp_path: Path, step: dict[str, Any]) -> None:
    path = tmp_path / "call.json"
    step |= {"name": "x", "positional": [["command", "true"]], "by_name": {}}
    path.write_text(json.dumps({"schema": 1, "steps": [step]}))
    np.savez(path.with_suffix(".npz"))
    with pytest.raises(ArgumentError, match="is no public call"):
        replay.replay(path, "cpu")
