"""One table of element types: name, DLPack code, C++ type, NumPy type, size.

`parse` turns whatever a caller may use to name a dtype (string, NumPy, torch or JAX dtype object)
into a row of the table without importing the framework it comes from.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from ..errors import ArgumentError


@dataclass(frozen=True, eq=False)
class DType:
    """One element type. `code` and `bits` are DLPack's (DLDataTypeCode, bits per element).

    The rows of the table are the only instances: they compare and hash by identity.
    """

    name: str
    code: int
    bits: int
    cpp: str
    numpy: np.dtype
    itemsize: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "itemsize", self.bits // 8)

    @property
    def is_fp8(self) -> bool:
        return self.name.startswith("float8")

    @property
    def is_float16(self) -> bool:
        """True for the two 16-bit float types, which the matrix units take directly."""
        return self.name in ("float16", "bfloat16")

    @property
    def is_8bit_query(self) -> bool:
        """True for 8-bit queries that are multiplied as they are, with keys of 8 bits."""
        return self.name in ("float8_e4m3fn", "int8")

    @property
    def of_keys(self) -> DType | None:
        """The dtype of keys beside 8-bit queries of this one; None for other queries."""
        return self if self.is_8bit_query else None

    @property
    def of_values(self) -> DType:
        """The dtype of values beside queries of this one, unless the caller names another."""
        return float8_e4m3fn if self.is_8bit_query else self

    @property
    def of_output(self) -> DType:
        """The dtype of the output for queries of this one, unless the caller names another."""
        return bfloat16 if self.is_8bit_query else self

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return parse, (self.name,)


_INT, _UINT, _FLOAT, _BFLOAT, _BOOL = 0, 1, 2, 4, 6
_FLOAT8_E4M3FN, _FLOAT8_E5M2 = 10, 12

float16 = DType("float16", _FLOAT, 16, "half_t", np.dtype(np.float16))
bfloat16 = DType("bfloat16", _BFLOAT, 16, "bfloat16_t", np.dtype(ml_dtypes.bfloat16))
float32 = DType("float32", _FLOAT, 32, "float", np.dtype(np.float32))
float8_e4m3fn = DType(
    "float8_e4m3fn", _FLOAT8_E4M3FN, 8, "e4m3_t", np.dtype(ml_dtypes.float8_e4m3fn)
)
float8_e5m2 = DType("float8_e5m2", _FLOAT8_E5M2, 8, "e5m2_t", np.dtype(ml_dtypes.float8_e5m2))
bool_ = DType("bool", _BOOL, 8, "bool", np.dtype(np.bool_))
int8 = DType("int8", _INT, 8, "int8_t", np.dtype(np.int8))
uint8 = DType("uint8", _UINT, 8, "uint8_t", np.dtype(np.uint8))
uint16 = DType("uint16", _UINT, 16, "uint16_t", np.dtype(np.uint16))
uint32 = DType("uint32", _UINT, 32, "uint32_t", np.dtype(np.uint32))
uint64 = DType("uint64", _UINT, 64, "uint64_t", np.dtype(np.uint64))
int32 = DType("int32", _INT, 32, "int32_t", np.dtype(np.int32))
int64 = DType("int64", _INT, 64, "int64_t", np.dtype(np.int64))

ALL = (
    float16,
    bfloat16,
    float32,
    float8_e4m3fn,
    float8_e5m2,
    bool_,
    int8,
    uint8,
    uint16,
    uint32,
    uint64,
    int32,
    int64,
)

BY_NAME = {d.name: d for d in ALL}
BY_DLPACK = {(d.code, d.bits): d for d in ALL}
BY_NUMPY = {d.numpy: d for d in ALL}

_ALIASES = {
    "half": float16,
    "fp16": float16,
    "bf16": bfloat16,
    "fp32": float32,
    "float": float32,
    "e4m3": float8_e4m3fn,
    "fp8_e4m3": float8_e4m3fn,
    "float8_e4m3": float8_e4m3fn,
    "e5m2": float8_e5m2,
    "fp8_e5m2": float8_e5m2,
    "bool_": bool_,
}


def parse(x: object, name: str = "dtype") -> DType:
    """The table row for a dtype named by string, NumPy, torch or JAX dtype object.

    Raises ArgumentError naming the argument if the dtype is unknown.
    """
    if isinstance(x, DType):
        return x
    if isinstance(x, str):
        key = x.removeprefix("torch.").removeprefix("jnp.")
        dtype = BY_NAME.get(key) or _ALIASES.get(key)
        if dtype is not None:
            return dtype
    elif type(x).__module__ == "torch":
        dtype = BY_NAME.get(str(x).removeprefix("torch."))
        if dtype is not None:
            return dtype
    elif isinstance(x, (type, np.dtype)) or (hasattr(x, "dtype") and not hasattr(x, "shape")):
        try:
            dtype = BY_NUMPY.get(np.dtype(x))  # type: ignore[call-overload]
        except Exception:  # other libraries' dtypes raise what they like
            dtype = None
        if dtype is not None:
            return dtype
    known = ", ".join(BY_NAME)
    text = f"an array, {type(x).__name__}" if hasattr(x, "shape") else repr(x)
    raise ArgumentError(f"{name}: unknown dtype {text}; known dtypes are {known}")
