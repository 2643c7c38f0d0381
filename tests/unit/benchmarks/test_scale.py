"""The simulator of many GPUs: what it says of figures whose answer is known."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks import scale
from benchmarks.distributed.cases import DECODES, PROMPTS
from benchmarks.scale import Figures, Link

_DECODE, _PROMPT = DECODES[0], PROMPTS[0]
_PARTS = (1, 2, 4, 8, 16, 32)


_EXCHANGE, _GATHER = Link(5.0, 200.0), Link(10.0, 300.0)


def _rows(exchange=_EXCHANGE, gather=_GATHER):
    """Rows of kernels that divide evenly, and of messages over these links."""
    yield from (
        {"kind": "share", "case": case.name, "parts": n, "us": 3200.0 / n}
        for case in (*DECODES, *PROMPTS)
        for n in _PARTS
    )
    for kind, link in (("exchange", exchange), ("gather", gather)):
        for nbytes in (1e4, 1e6, 1e8):
            yield {"kind": kind, "case": kind, "sent_bytes": nbytes, "us": link.time(nbytes)}


def test_links_are_recovered_from_messages():
    link = Link(5.0, 200.0)
    found = scale.fitted([(n, link.time(n)) for n in (1e3, 1e5, 1e7)])
    assert found == pytest.approx(link)
    assert scale.fitted([(1e3, 7.0)]) == Link(7.0, math.inf)
    with pytest.raises(ValueError, match="without a message"):
        scale.fitted([])


def test_shares_between_measured_numbers_and_beyond():
    figures = Figures.of(_rows())
    for parts in (1, 2, 3, 6, 32, 100):
        assert figures.share(_DECODE.name, parts) == pytest.approx(3200.0 / parts)
    # A kernel does not get slower by having less to do.
    flat = Figures({"a": {1: 10.0, 2: 8.0, 4: 9.0}}, Link(0, 1), Link(0, 1), {})
    assert flat.share("a", 8) == pytest.approx(9.0)


def test_decode_pays_for_its_exchange_once():
    figures = Figures.of(_rows())
    assert scale.decode_step(_DECODE, 1, figures) == pytest.approx(3200.0)
    sent = _DECODE.state_bytes / 2
    wanted = 1600.0 + 5.0 + sent / 200e3
    assert scale.decode_step(_DECODE, 2, figures) == pytest.approx(wanted)
    two_hosts = scale.decode_step(_DECODE, 16, figures)
    assert two_hosts > 3200.0 / 16 + 5.0 + scale.NETWORK.latency_us


def test_further_gpus_divide_the_requests():
    figures = Figures.of(_rows())
    one = scale.decode_step(_DECODE, _DECODE.num_qo_heads, figures)
    assert scale.decode_step(_DECODE, 512, figures) == pytest.approx(one)  # one request
    many = DECODES[2]
    times = [scale.decode_step(many, n, figures) for n in (32, 64, 128)]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("gb_per_s", [1e-3, 1e9])
def test_prompts_wait_for_keys_only_where_links_are_slow(gb_per_s):
    figures = Figures.of(_rows(gather=Link(0.0, gb_per_s)))
    us = scale.prompt(_PROMPT, 2, figures)
    if gb_per_s > 1:
        assert us == pytest.approx(1600.0)
    else:
        assert us > _PROMPT.key_bytes / 2 / gb_per_s / 1e3


def test_the_best_measured_time_is_compared():
    rows = [*_rows()]
    rows += [
        {"kind": "decode", "case": _DECODE.name, "world": 2, "us": us} for us in (1700.0, 1650.0)
    ]
    found = [p for p in scale.points(Figures.of(rows), (1, 2)) if p.case == _DECODE.name]
    assert [p.measured for p in found] == [None, 1650.0]
    assert "1650.0" in scale.table(found)


def test_the_command_reads_a_folder(tmp_path, capsys):
    (tmp_path / "results.json").write_text(json.dumps({"rows": [*_rows()]}))
    assert scale.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.count(_DECODE.name) == len(scale.SIZES)


def test_a_prompt_takes_the_method_that_is_sooner():
    case = _PROMPT.name
    alone = {"kind": "share", "case": case, "parts": 1, "us": 3200.0}
    shares = [
        {"kind": "share", "case": case, "parts": 4, "us": us, "method": method}
        for method, us in (("gather", 800.0), ("overlap", 840.0))
    ]
    messages = [{"kind": "exchange", "sent_bytes": 1e6, "us": 9.0}]

    def foretold(us):
        sent = _PROMPT.key_bytes * 3 / 4
        gather = {"kind": "gather", "sent_bytes": sent, "us": us}
        return scale.prompt(_PROMPT, 4, Figures.of([alone, *shares, *messages, gather]))

    assert foretold(10.0) == pytest.approx(810.0)  # keys come first
    assert foretold(200.0) == pytest.approx(840.0)  # beside a fourth of the work: hidden
    assert foretold(500.0) == pytest.approx(840.0 + 500.0 - 210.0)
