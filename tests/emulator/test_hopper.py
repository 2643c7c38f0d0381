"""Phases, boxes and descriptors of Hopper, against layouts worked out another way.

Nothing here shows that a proxy fence is where it must be, or that banks do not conflict.
"""

from __future__ import annotations

import struct

import ml_dtypes
import numpy as np
import pytest

from . import probe
from .library import EmulatorError

BF16 = np.dtype(ml_dtypes.bfloat16)
SPANS = {"none": 16, "32": 32, "64": 64, "128": 128}
SWIZZLES = {"none": 0, "32": 1, "64": 2, "128": 3}
LAYOUT_TYPES = {"none": 0, "128": 1, "64": 2, "32": 3}


def tensor_map(x: np.ndarray, box: tuple[int, ...], swizzle: str) -> np.ndarray:
    """emulator/hopper.h, TensorMap; dimensions of x and box outermost first."""
    rank = x.ndim
    strides = [*x.strides[-2::-1], *[0] * (5 - rank)]
    dims = [*x.shape[::-1], *[0] * (5 - rank)]
    boxes = [*box[::-1], *[0] * (5 - rank)]
    packed = struct.pack(
        "<5Q 10I 3I 36x",
        x.ctypes.data,
        *strides,
        *dims,
        *boxes,
        rank,
        x.itemsize,
        SWIZZLES[swizzle],
    )
    memory = np.zeros(256, np.uint8)
    start = -memory.ctypes.data % 64
    memory[start : start + 128] = np.frombuffer(packed, np.uint8)
    return memory[start : start + 128]


def run(
    which: int,
    numbers: tuple[int, ...],
    out: np.ndarray,
    *,
    image: np.ndarray | None = None,
    maps: tuple[np.ndarray, ...] = (),
    tensors: tuple[np.ndarray, ...] = (),
    threads: int = 128,
    seed: int = 0,
) -> None:
    empty = np.zeros(16, np.uint8)
    one, two = (*maps, empty, empty)[:2]
    arrays = [(empty if image is None else image, False), (out, True), (one, False), (two, False)]
    numbers = (which, *numbers, *[0] * (9 - len(numbers)))
    more = [(x, False) for x in tensors]
    probe.launch(
        "hopper", arrays, numbers, threads=threads, shared_bytes=65536, seed=seed, others=more
    )


def swizzled_rows(rows: np.ndarray, swizzle: str) -> np.ndarray:
    """Rows of one span of bytes [n, span]: chunk c of row r goes to chunk c XOR (r's part)."""
    span = SPANS[swizzle]
    chunks = rows.reshape(len(rows), span // 16, 16)
    placed = np.zeros_like(chunks)
    for r in range(len(rows)):
        # Rows of fewer than 128 bytes share the 128-byte lines that the pattern counts.
        line = r * span // 128 % 8
        for c in range(span // 16):
            placed[r, c ^ (line % (span // 16))] = chunks[r, c]
    return placed.reshape(rows.shape)


@pytest.mark.parametrize("swizzle", SPANS)
@pytest.mark.parametrize("at", [(0, 0), (8, 64), (-3, 16), (27, 200)])
def test_boxes(at: tuple[int, int], swizzle: str) -> None:
    x = np.random.default_rng(0).integers(0, 1 << 16, (40, 250)).astype(np.uint16)
    width = 64 if swizzle == "none" else SPANS[swizzle] // 2
    box = (24, width)
    out = np.zeros(24 * width // 2, np.float32)
    run(0, (at[1], at[0], 0, 0, out.nbytes), out, maps=(tensor_map(x, box, swizzle),), tensors=(x,))
    padded = np.zeros((200, 600), np.uint16)
    padded[50:90, 100:350] = x
    top, left = at[0] + 50, at[1] + 100
    expected = np.ascontiguousarray(padded[top : top + 24, left : left + width])
    rows = expected.view(np.uint8).reshape(24, -1)
    if swizzle != "none":
        rows = swizzled_rows(rows, swizzle)
    np.testing.assert_array_equal(out.view(np.uint8), rows.reshape(-1))


def test_a_box_of_three_dimensions() -> None:
    x = np.random.default_rng(1).integers(0, 1 << 16, (3, 20, 128)).astype(np.uint16)
    out = np.zeros(2 * 8 * 64 // 2, np.float32)
    at = (64, 15, 2)
    run(0, (*at, 0, out.nbytes), out, maps=(tensor_map(x, (2, 8, 64), "128"),), tensors=(x,))
    padded = np.zeros((8, 40, 256), np.uint16)
    padded[:3, :20, :128] = x
    rows = np.ascontiguousarray(padded[2:4, 15:23, 64:128]).view(np.uint8).reshape(16, 128)
    np.testing.assert_array_equal(out.view(np.uint8), swizzled_rows(rows, "128").reshape(-1))


def place(matrix: np.ndarray, is_k_major: bool, swizzle: str, start: int, image: np.ndarray) -> int:
    """Lay out [outer, 16] elements as cute's canonical layouts say; returns the descriptor.

    Rows of more elements, of any size, are steps beside each other; they need is_k_major.

    In units of 16 bytes, W the chunks of a swizzle's row:
      K-major   ((8, n), 2) : ((W, stride), 1), without a swizzle ((1, stride), leading)
      MN-major  ((W, n), (8, 2)) : ((1, leading), (W, stride)), without ((1, stride), (1, leading))
    """
    outer = len(matrix)
    width = SPANS[swizzle] // 16
    chunks: dict[int, np.ndarray] = {}
    if is_k_major:
        stride, leading = (8 * width, 1) if width > 1 else (8, outer)
        pieces = matrix.view(np.uint8).reshape(outer, -1, 16)
        for row, chunk in np.ndindex(pieces.shape[:2]):
            at = row % 8 * width + row // 8 * stride
            at += chunk * (1 if width > 1 else leading)
            chunks[at] = pieces[row, chunk]
    else:
        groups = outer // (8 * width)
        if width > 1:
            leading, stride = 16 * width, 8 * width
        else:
            stride, leading = 8, 8 * groups
        for k in range(16):
            for chunk in range(outer // 8):
                if width > 1:
                    at = chunk % width + chunk // width * leading + k % 8 * width + k // 8 * stride
                else:
                    at = chunk * stride + k % 8 + k // 8 * leading
                chunks[at] = matrix[8 * chunk : 8 * chunk + 8, k]
    bytes_ = np.zeros((max(chunks) // 8 + 1) * 128, np.uint8).reshape(-1, 16)
    for at, values in chunks.items():
        bytes_[at] = np.ascontiguousarray(values).view(np.uint8)
    rows = bytes_.reshape(-1, SPANS[swizzle])
    if width > 1:
        rows = swizzled_rows(rows, swizzle)
    image[start : start + rows.size] = rows.reshape(-1)
    return start >> 4 | leading << 16 | stride << 32 | LAYOUT_TYPES[swizzle] << 62


def halves(descriptor: int) -> tuple[int, int]:
    return struct.unpack("<ii", struct.pack("<Q", descriptor))


def accumulators(d: np.ndarray) -> np.ndarray:
    """[128, n / 2] of threads as a matrix [64, n] (PTX manual, "wgmma m64nNk16 D fragment")."""
    n = 2 * d.shape[1]
    matrix = np.full((64, n), np.nan, np.float32)
    for thread in range(128):
        for i in range(n // 2):
            row = 16 * (thread // 32) + thread % 32 // 4 + (8 if i % 4 >= 2 else 0)
            matrix[row, 8 * (i // 4) + 2 * (thread % 4) + i % 2] = d[thread, i]
    return matrix


@pytest.mark.parametrize("n", [8, 64, 128])
@pytest.mark.parametrize("swizzle", SPANS)
@pytest.mark.parametrize("b_k_major", [True, False])
@pytest.mark.parametrize("a_k_major", [True, False])
def test_products(a_k_major: bool, b_k_major: bool, swizzle: str, n: int) -> None:
    if not b_k_major and n * 2 < SPANS[swizzle]:
        pytest.skip("a row of the pattern holds more columns than the product has")
    rng = np.random.default_rng(2)
    is_bf16 = n != 64
    dtype = BF16 if is_bf16 else np.dtype(np.float16)
    a, b = (rng.integers(-8, 9, (rows, 16)).astype(dtype) for rows in (64, n))
    image = np.zeros(32768, np.uint8)
    a_descriptor = place(a, a_k_major, swizzle, 0, image)
    b_descriptor = place(b, b_k_major, swizzle, 8192, image)
    out = np.zeros((128, n // 2), np.float32)
    majors = a_k_major + 2 * b_k_major
    for is_first in (0, 1):
        numbers = (n, is_bf16, is_first, majors, 0, *halves(a_descriptor), *halves(b_descriptor))
        run(1, tuple(map(int, numbers)), out, image=image)
        expected = a.astype(np.float32) @ b.astype(np.float32).T + (1 - is_first)
        np.testing.assert_array_equal(accumulators(out), expected)


E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def fragments_of_8_bits(a: np.ndarray) -> np.ndarray:
    """[64, 32 n] as each thread's four registers of a step (PTX manual, "wgmma m64nNk32")."""
    steps = a.shape[1] // 32
    out = np.zeros((steps, 128, 16), np.uint8)
    for step, thread, i in np.ndindex(out.shape):
        row = 16 * (thread // 32) + thread % 32 // 4 + (8 if i // 4 % 2 else 0)
        out[step, thread, i] = a.view(np.uint8)[
            row, 32 * step + 4 * (thread % 4) + i % 4 + (16 if i >= 8 else 0)
        ]
    return out


def products_of_8_bits(
    a: np.ndarray, b: np.ndarray, *, by_registers: bool = False, start: int | None = None
) -> np.ndarray:
    """A B^T of [64, 32 n] and [64, 32 n]; n is 4 at most: lines of 128 bytes. `start` is added."""
    steps = a.shape[1] // 32
    image = np.zeros(32768 + 8192, np.uint8)
    padded = [np.pad(x.view(np.uint8), ((0, 0), (0, 128 - x.shape[1]))) for x in (a, b)]
    places = [place(x, True, "128", 8192 * i, image) for i, x in enumerate(padded)]
    fragments = fragments_of_8_bits(a).reshape(-1)
    image[32768 : 32768 + fragments.size] = fragments
    out = np.zeros((128, 32), np.float32)
    numbers = (steps, by_registers, start is not None, start or 0, 0)
    which = 3 if a.dtype == E4M3 else 4
    run(which, (*map(int, numbers), *halves(places[0]), *halves(places[1])), out, image=image)
    return accumulators(out if a.dtype == E4M3 else out.view(np.int32))


@pytest.mark.parametrize("start", [None, 5])
@pytest.mark.parametrize("by_registers", [False, True])
def test_products_of_int8_are_exact(by_registers: bool, start: int | None) -> None:
    rng = np.random.default_rng(5)
    a, b = rng.integers(-128, 128, (2, 64, 128)).astype(np.int8)
    a[:2], b[:2] = -128, ((-128,), (127,))
    got = products_of_8_bits(a, b, by_registers=by_registers, start=start)
    expected = a.astype(np.int32) @ b.astype(np.int32).T + (start or 0)
    np.testing.assert_array_equal(got, expected)


def cut_sum(a: np.ndarray, b: np.ndarray, so_far: float) -> float:
    """One step of Hopper's e4m3 sums, in Python's integers.

    Products of 32 pairs and the sum so far, each as an integer and a power of two; each loses what
    is below 2^-13 of the power of the largest, and so does their sum.
    """
    from fractions import Fraction

    def power_of(x: float, smallest: int) -> int:
        return max(int(np.frexp(x)[1]) - 1, smallest)

    terms = [
        (Fraction(float(x)) * Fraction(float(y)), power_of(x, -6) + power_of(y, -6))
        for x, y in zip(a, b, strict=True)
        if x and y
    ]
    if so_far:
        terms.append((Fraction(so_far), power_of(so_far, -126)))
    if not terms:
        return 0.0
    unit = Fraction(2) ** (max(power for _, power in terms) - 13)
    total = sum(int(value / unit) for value, _ in terms) * unit
    if not total:
        return 0.0
    unit = Fraction(2) ** (int(np.frexp(float(total))[1]) - 1 - 13)
    return float(int(total / unit) * unit)


@pytest.mark.parametrize("start", [None, 3, -70000])
@pytest.mark.parametrize("by_registers", [False, True])
def test_sums_of_e4m3_are_cut_as_hopper_does(by_registers: bool, start: int | None) -> None:
    rng = np.random.default_rng(6)
    codes = rng.integers(0, 256, (2, 64, 128)).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    codes[:, :8] &= 0x87  # subnormals
    codes[:, 8:10] = 0
    a, b = codes.view(E4M3)
    got = products_of_8_bits(a, b, by_registers=by_registers, start=start)
    for row, column in rng.integers(0, 64, (300, 2)):
        expected = 0.0 if start is None else float(start)
        for step in range(4):
            where = slice(32 * step, 32 * step + 32)
            expected = cut_sum(
                a[row, where].astype(np.float32), b[column, where].astype(np.float32), expected
            )
        assert got[row, column] == expected, (row, column)


def test_sums_of_e4m3_lose_what_is_small() -> None:
    """What 14 bits cost: ones are lost beside 2^14, and halves cut beside 2^13 + 1."""
    a, b = np.zeros((64, 64), E4M3), np.ones((64, 64), E4M3)
    a[0, 0], b[:, 0] = 64, 256
    a[0, 32:] = 1  # the second step has 32 ones
    a[1, 0], a[1, 32:] = 32, 0.5
    a[2, :] = 1
    got = products_of_8_bits(a, b)
    assert got[0, 0] == 2**14
    assert got[1, 0] == 2**13
    assert got[2, 0] == 256 + 63


def test_e4m3_nan_stays() -> None:
    a, b = np.ones((64, 32), E4M3), np.ones((64, 32), E4M3)
    a[3, 5], b[7, 9] = np.nan, np.nan
    got = products_of_8_bits(a, b)
    expected = np.full((64, 64), 32.0)
    expected[3], expected[:, 7] = np.nan, np.nan
    np.testing.assert_array_equal(got, expected)


def test_a_wrong_descriptor_gives_a_wrong_product() -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-8, 9, (rows, 16)).astype(BF16) for rows in (64, 64))
    image = np.zeros(32768, np.uint8)
    right = place(a, True, "128", 0, image), place(b, True, "128", 8192, image)
    expected = a.astype(np.float32) @ b.astype(np.float32).T
    wrong = [right, (right[0], right[1] ^ 3 << 62), (right[0] + (1 << 32), right[1])]
    wrong += [(right[0], right[1] + 2)]
    for index, (a_descriptor, b_descriptor) in enumerate(wrong):
        out = np.zeros((128, 32), np.float32)
        numbers = (64, 1, 1, 3, 0, *halves(a_descriptor), *halves(b_descriptor))
        run(1, numbers, out, image=image)
        assert np.array_equal(accumulators(out), expected) == (index == 0)


def pipeline(mistake: int = 0, tiles: int = 5, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(4)
    a, b = (rng.integers(-4, 5, (rows, 64 * tiles)).astype(BF16) for rows in (64, 32))
    maps = tensor_map(a, (64, 64), "128"), tensor_map(b, (32, 64), "128")
    out = np.zeros((128, 16), np.float32)
    run(2, (tiles, mistake), out, maps=maps, tensors=(a, b), threads=160, seed=seed)
    return accumulators(out), a.astype(np.float32) @ b.astype(np.float32).T


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tiles", [1, 2, 3, 5, 8])
def test_a_ring_with_a_producer(tiles: int, seed: int) -> None:
    got, expected = pipeline(tiles=tiles, seed=seed)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (1, "no thread can go on"),  # waits for the wrong parity
        (2, "no thread can go on"),  # expects bytes that never come
        (3, "still in flight|never written"),  # does not wait for the copy
        (4, "no thread can go on"),  # never frees a stage
        (5, "more arrivals|no barrier between|still in flight"),  # does not wait for a free stage
    ],
)
def test_mistakes_of_a_ring(mistake: int, message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        pipeline(mistake)
