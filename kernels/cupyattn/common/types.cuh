// Element types, type traits and constants that every kernel uses. NVRTC has no <cstdint>, so the
// fixed-width names are declared here, inside the namespace, where they cannot collide.
#pragma once

namespace cupyattn {

using int8_t = signed char;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;

struct half_t {
  uint16_t bits;
};
struct bfloat16_t {
  uint16_t bits;
};
struct e4m3_t {
  uint8_t bits;
};
struct e5m2_t {
  uint8_t bits;
};

struct alignas(16) Vector16 {
  uint32_t word[4];
};

// A tensor as the copy engine sees it: the driver's CUtensorMap, encoded by
// launch/driver/tensor_map.py.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

template <typename T>
constexpr bool is_fp8 = sizeof(T) == 1;

template <typename A, typename B>
constexpr bool is_same = false;
template <typename A>
constexpr bool is_same<A, A> = true;

template <bool kCondition>
struct Choice {
  template <typename A, typename B>
  using type = A;
};
template <>
struct Choice<false> {
  template <typename A, typename B>
  using type = B;
};
template <bool kCondition, typename A, typename B>
using conditional = typename Choice<kCondition>::template type<A, B>;

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr int kWarpSize = 32;

}  // namespace cupyattn

using cupyattn::bfloat16_t;
using cupyattn::e4m3_t;
using cupyattn::e5m2_t;
using cupyattn::half_t;
