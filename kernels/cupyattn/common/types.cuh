// Element types and the handful of constants every kernel uses. NVRTC gives no <cstdint>, so the
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

template <typename T>
struct is_fp8 {
  static constexpr bool value = sizeof(T) == 1;
};

template <typename A, typename B>
struct is_same {
  static constexpr bool value = false;
};
template <typename A>
struct is_same<A, A> {
  static constexpr bool value = true;
};

template <bool kCondition, typename A, typename B>
struct conditional {
  using type = A;
};
template <typename A, typename B>
struct conditional<false, A, B> {
  using type = B;
};

constexpr float kLog2e = 1.4426950408889634f;
constexpr int kWarpSize = 32;

}  // namespace cupyattn

using cupyattn::bfloat16_t;
using cupyattn::e4m3_t;
using cupyattn::e5m2_t;
using cupyattn::half_t;
