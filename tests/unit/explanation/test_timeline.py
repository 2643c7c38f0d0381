"""Blocks that are dealt to SMs, and the picture of them."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from cupyattn.explanation import picture
from cupyattn.explanation.timeline import Bars, LaunchBlocks, deal


def launch(times: list[float], per_sm: int = 1, **fields: object) -> LaunchBlocks:
    return LaunchBlocks("a", np.array(times), per_sm)._replace(**fields)


def overlaps(bars: list[Bars]) -> bool:
    """Whether two blocks ever have the same place of an SM."""
    found = []
    for bar in bars:
        for x in zip(bar.sm, bar.at, bar.begin, bar.end, strict=True):
            found.append((*map(float, x), bar.share))
    for i, (sm, at, begin, end, share) in enumerate(found):
        for other, place, start, stop, size in found[:i]:
            is_apart = at + share <= place + 1e-9 or place + size <= at + 1e-9
            if sm == other and not is_apart and begin < stop - 1e-9 and start < end - 1e-9:
                return True
    return False


def test_each_block_takes_the_first_free_sm() -> None:
    dealt = deal([launch([5, 3, 1, 1, 1])], 2)
    (bars,) = dealt.bars
    start = bars.begin[0]
    assert (bars.begin - start).tolist() == [0, 0, 3, 4, 5] and bars.sm.tolist()[:4] == [0, 1, 1, 1]
    assert dealt.end == start + 6 and dealt.merge is None


def test_times_are_in_proportion_to_the_estimate() -> None:
    plain, scaled = deal([launch([5, 3], has_merge=True)], 2), None
    scaled = deal([launch([5, 3], has_merge=True)], 2, 100.0)
    assert scaled.end == 100 and plain.merge is not None and scaled.merge is not None
    assert scaled.merge / 100 == pytest.approx(plain.merge / plain.end)
    assert scaled.bars[0].end.max() == scaled.merge


def test_persistent_blocks_leave_sms_to_a_launch_beside() -> None:
    rng = np.random.default_rng(3)
    first = launch([4.0] * 6, max_blocks=3)
    second = launch(rng.uniform(1, 3, 40).tolist(), 2, is_beside=True)
    dealt = deal([first, second], 5)
    chunks, decodes = dealt.bars
    assert set(chunks.sm) == {0, 1, 2} and set(decodes.sm) == {0, 1, 2, 3, 4}
    assert decodes.begin.min() == chunks.begin.min() and not overlaps(dealt.bars)
    behind = deal([first, second._replace(is_beside=False)], 5)
    assert behind.bars[1].begin.min() == behind.bars[0].end.max()


def test_blocks_of_several_sizes_share_sms() -> None:
    rng = np.random.default_rng(5)
    launches = [
        launch(rng.uniform(1, 9, 17).tolist(), per_sm, is_beside=True) for per_sm in (3, 2, 1)
    ]
    dealt = deal(launches, 4)
    assert not overlaps(dealt.bars)
    assert [bar.share for bar in dealt.bars] == pytest.approx([1 / 3, 1 / 2, 1])


@pytest.mark.parametrize("count", [1, 300, 30000])
def test_the_picture_is_svg_with_a_bar_for_each_block(count: int) -> None:
    launches = [launch([2.0] * count, 2), launch([1.0], is_beside=True, has_merge=True)]
    text = picture.draw(launches, 132, 50.0, "a < b")
    root = ElementTree.fromstring(text)
    bars = [x.get("d") for x in root if x.tag.endswith("path")]
    assert len(bars) == 2 and bars[0] is not None
    assert bars[0].count("M") == (count if count < 12000 else 264)
    assert "merge of partial results" in text and "a &lt; b" in text and "50.0 estimated" in text
    numbers = [float(x) for x in re.findall(r"M([\d.]+)", bars[0])]
    assert all(70 <= x <= 1070 for x in numbers)


def test_without_an_estimate_the_picture_says_so() -> None:
    assert "nothing is estimated" in picture.draw([launch([1.0])], 2, None, "t")
    assert "nothing is launched" in picture.draw([], 2, None, "t")
