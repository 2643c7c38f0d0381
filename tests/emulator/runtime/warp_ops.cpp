// What lanes and threads do together: the last one to come does the work of all.
#include <string.h>

#include "emulator/numbers.h"
#include "machine.h"

namespace emulator {

void meet_warp(Collective collective, void* arguments, Where where, void* code);
bool meet_block(int index, int num_threads, bool predicate, Meeting how, Where where, void* code);

namespace {

template <typename T>
T& argument(Warp& warp, int lane) {
  return *static_cast<T*>(warp.arguments[lane]);
}

struct Ldmatrix {
  uint32_t address;
  bool is_transposed;
  Words4 fragment;
  void* code;
};

// Lane 8 m + r gives the address of row r of matrix m; lane l gets elements 2 (l % 4) and the next
// of row l / 4, or of that column.
void run_ldmatrix(Warp& warp) {
  uint16_t rows[4][8][8];
  for (int lane = 0; lane < kLanes; ++lane) {
    const Ldmatrix& own = argument<Ldmatrix>(warp, lane);
    check_shared(own.address, 16, 16, own.code);
    read_shared(own.address, 16, true, own.code);
    memcpy(rows[lane / 8][lane % 8], shared_window.begin + own.address, 16);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    Ldmatrix& own = argument<Ldmatrix>(warp, lane);
    const int i = lane / 4, j = 2 * (lane % 4);
    for (int m = 0; m < 4; ++m) {
      const uint32_t low = own.is_transposed ? rows[m][j][i] : rows[m][i][j];
      const uint32_t high = own.is_transposed ? rows[m][j + 1][i] : rows[m][i][j + 1];
      own.fragment.word[m] = low | high << 16;
    }
  }
}

struct Stmatrix {
  uint32_t address;
  bool is_transposed;
  Words4 fragment;
  void* code;
};

// The other way.
void run_stmatrix(Warp& warp) {
  for (int lane = 0; lane < kLanes; ++lane) {
    const Stmatrix& own = argument<Stmatrix>(warp, lane);
    check_shared(own.address, 16, 16, own.code);
    write_shared(own.address, 16, false, own.code);
    const int line = lane % 8, m = lane / 8;
    for (int i = 0; i < 8; ++i) {
      // Element i of the line is element (row, column) of the matrix that lanes hold in pairs.
      const int row = own.is_transposed ? i : line, column = own.is_transposed ? line : i;
      const Stmatrix& owner = argument<Stmatrix>(warp, row * 4 + column / 2);
      const uint16_t bits = static_cast<uint16_t>(owner.fragment.word[m] >> (column % 2 * 16));
      memcpy(shared_window.begin + own.address + 2 * i, &bits, 2);
    }
  }
}

struct Mma {
  Floats4 c;
  Words4 a;
  uint32_t b[2];
};

const float* half_values() {
  static float* table = [] {
    float* made = new float[1 << 16];
    for (uint32_t i = 0; i < 1 << 16; ++i) made[i] = decode(i, kHalf);
    return made;
  }();
  return table;
}

template <bool kIsBfloat16>
void unpack(uint32_t pair, float& low, float& high) {
  if constexpr (kIsBfloat16) {
    low = __builtin_bit_cast(float, pair << 16);
    high = __builtin_bit_cast(float, pair & 0xffff0000u);
  } else {
    static const float* values = half_values();
    low = values[pair & 0xffff];
    high = values[pair >> 16];
  }
}

// Products are exact in float32; their sum is rounded after each, from k = 0 on, beginning with c.
// (The device adds several at a time and truncates: nothing may depend on the last bit.)
template <bool kIsBfloat16>
void run_mma(Warp& warp) {
  float a[16][16], b[16][8], c[16][8];
  for (int lane = 0; lane < kLanes; ++lane) {
    const Mma& own = argument<Mma>(warp, lane);
    const int group = lane / 4, pair = 2 * (lane % 4);
    for (int i = 0; i < 4; ++i) {
      const int row = group + 8 * (i % 2), column = pair + 8 * (i / 2);
      unpack<kIsBfloat16>(own.a.word[i], a[row][column], a[row][column + 1]);
      c[group + 8 * (i / 2)][pair + i % 2] = own.c.value[i];
    }
    for (int i = 0; i < 2; ++i) {
      unpack<kIsBfloat16>(own.b[i], b[pair + 8 * i][group], b[pair + 8 * i + 1][group]);
    }
  }
  for (int row = 0; row < 16; ++row) {
    float sum[8];
    memcpy(sum, c[row], sizeof sum);
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < 8; ++column) sum[column] += a[row][k] * b[k][column];
    }
    memcpy(c[row], sum, sizeof sum);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    Mma& own = argument<Mma>(warp, lane);
    for (int i = 0; i < 4; ++i) {
      own.c.value[i] = c[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
    }
  }
}

struct Exchange {
  uint32_t value;
  int source;
  uint32_t result;
};

void run_shuffle(Warp& warp) {
  for (int lane = 0; lane < kLanes; ++lane) {
    Exchange& own = argument<Exchange>(warp, lane);
    own.result = argument<Exchange>(warp, own.source & (kLanes - 1)).value;
  }
}

void run_max(Warp& warp) {
  uint32_t largest = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    const uint32_t value = argument<Exchange>(warp, lane).value;
    if (value > largest) largest = value;
  }
  for (int lane = 0; lane < kLanes; ++lane) argument<Exchange>(warp, lane).result = largest;
}

void run_sum(Warp& warp) {
  uint32_t sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += argument<Exchange>(warp, lane).value;
  for (int lane = 0; lane < kLanes; ++lane) argument<Exchange>(warp, lane).result = sum;
}

void run_any(Warp& warp) {
  uint32_t any = 0;
  for (int lane = 0; lane < kLanes; ++lane) any |= argument<Exchange>(warp, lane).value;
  for (int lane = 0; lane < kLanes; ++lane) argument<Exchange>(warp, lane).result = any;
}

// Of all that lanes do together this alone orders their memory accesses.
void run_sync(Warp& warp) { ++warp.clock[warp.index]; }

uint32_t exchange(Collective collective, uint32_t value, int source, Where where, void* code) {
  Exchange own{value, source, 0};
  meet_warp(collective, &own, where, code);
  return own.result;
}

}  // namespace

Words4 ldmatrix_x4(uint32_t address, bool is_transposed, Where where) {
  Ldmatrix own{address, is_transposed, {}, EMULATOR_CALLER};
  meet_warp(run_ldmatrix, &own, where, EMULATOR_CALLER);
  return own.fragment;
}

void stmatrix_x4(uint32_t address, Words4 fragment, bool transposed, Where where) {
  Stmatrix own{address, transposed, fragment, EMULATOR_CALLER};
  meet_warp(run_stmatrix, &own, where, EMULATOR_CALLER);
}

Floats4 mma_m16n8k16(Floats4 c, Words4 a, uint32_t b0, uint32_t b1, bool is_bfloat16, Where where) {
  Mma own{c, a, {b0, b1}};
  meet_warp(is_bfloat16 ? run_mma<true> : run_mma<false>, &own, where, EMULATOR_CALLER);
  return own.c;
}

float shuffle(float value, int source_lane, Where where) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  return __builtin_bit_cast(float,
                            exchange(run_shuffle, bits, source_lane, where, EMULATOR_CALLER));
}

float shuffle_xor(float value, int lane_mask, Where where) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const int source = machine.lane() ^ lane_mask;
  return __builtin_bit_cast(float, exchange(run_shuffle, bits, source, where, EMULATOR_CALLER));
}

int shuffle_int(int value, int source_lane, Where where) {
  const uint32_t bits = static_cast<uint32_t>(value);
  return static_cast<int>(exchange(run_shuffle, bits, source_lane, where, EMULATOR_CALLER));
}

uint32_t warp_sum(uint32_t value, Where where) {
  return exchange(run_sum, value, 0, where, EMULATOR_CALLER);
}

uint32_t warp_max(uint32_t value, Where where) {
  return exchange(run_max, value, 0, where, EMULATOR_CALLER);
}

bool warp_any(bool predicate, Where where) {
  return exchange(run_any, predicate, 0, where, EMULATOR_CALLER) != 0;
}

void warp_sync(Where where) { meet_warp(run_sync, nullptr, where, EMULATOR_CALLER); }

void block_sync(Where where) {
  meet_block(0, machine.num_threads, false, Meeting::aligned, where, EMULATOR_CALLER);
}

bool block_any(bool predicate, Where where) {
  return meet_block(0, machine.num_threads, predicate, Meeting::aligned, where, EMULATOR_CALLER);
}

void named_barrier_sync(int barrier, int num_threads, Where where) {
  meet_block(barrier, num_threads, false, Meeting::aligned, where, EMULATOR_CALLER);
}

void named_barrier_sync_unaligned(int barrier, int num_threads, Where where) {
  meet_block(barrier, num_threads, false, Meeting::unaligned, where, EMULATOR_CALLER);
}

bool named_barrier_any(int barrier, int num_threads, bool predicate, Where where) {
  return meet_block(barrier, num_threads, predicate, Meeting::aligned, where, EMULATOR_CALLER);
}

void named_barrier_arrive(int barrier, int num_threads, Where where) {
  meet_block(barrier, num_threads, false, Meeting::arrives, where, EMULATOR_CALLER);
}

}  // namespace emulator
