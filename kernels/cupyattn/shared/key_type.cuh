// The type of keys where it is not that of values: int8 keys are read beside fp8 values. And that of
// rows of Q in memory where it is not the one that is multiplied.
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn {

template <typename>
struct AnyTypeOfRows {
  using type = void;
};
// A Config that has DTypeK names it; those of other kernels have keys and values of DTypeKV.
template <typename Config, typename = void>
struct KeyType {
  using type = typename Config::DTypeKV;
};
template <typename Config>
struct KeyType<Config, typename AnyTypeOfRows<typename Config::DTypeK>::type> {
  using type = typename Config::DTypeK;
};

// Kernels that have DTypeRows read rows of Q of 8 bits, which become DTypeQ on the way.
template <typename Config, typename = void>
struct RowType {
  using type = typename Config::DTypeQ;
};
template <typename Config>
struct RowType<Config, typename AnyTypeOfRows<typename Config::DTypeRows>::type> {
  using type = typename Config::DTypeRows;
};

}  // namespace cupyattn
