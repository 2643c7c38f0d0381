// What the default Configs of the attention entries have in common. A compiler called by hand
// builds these; the JIT defines CUPYATTN_CONFIG and writes its own Config (cupyattn/jit/source.py).
#pragma once

#include "cupyattn/common/types.cuh"

struct DefaultConfig {
  using DTypeQ = bfloat16_t;
  using DTypeKV = bfloat16_t;
  using DTypeO = bfloat16_t;
  static constexpr int kHeadDimQK = 128, kHeadDimVO = 128, kWarps = 4;
  static constexpr bool kRope = false, kRotateKeys = false, kAlibi = false, kSoftCap = false;
  static constexpr bool kRowScales = false, kCustomMask = false;
  static constexpr int kMaskForm = 0;
  static constexpr bool kTransform = false;
  struct LogitsExpression {};
  static constexpr bool kAligned = true, kPaged = false, kOwnValuePages = false;
};
