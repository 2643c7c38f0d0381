// The type of keys where it is not that of values: int8 keys are read beside fp8 values.
#pragma once

#include "cupyattn/common/types.cuh"

namespace cupyattn {

template <typename>
struct AnyTypeOfKeys {
  using type = void;
};
// A Config that has DTypeK names it; those of other kernels have keys and values of DTypeKV.
template <typename Config, typename = void>
struct KeyType {
  using type = typename Config::DTypeKV;
};
template <typename Config>
struct KeyType<Config, typename AnyTypeOfKeys<typename Config::DTypeK>::type> {
  using type = typename Config::DTypeK;
};

}  // namespace cupyattn
