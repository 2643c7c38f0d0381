// Constants of schedule/balance.py, where they are explained. tests/unit/schedule/test_balance.py
// compares them.
#pragma once

namespace cupyattn {

constexpr int kMaxWaves = 4;
constexpr double kMinGain = 0.95;
constexpr double kEven = 1.15;

}  // namespace cupyattn
