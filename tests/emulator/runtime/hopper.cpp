// Barriers in shared memory, tensor copies and warpgroup products (emulator/hopper.h).
#include "emulator/hopper.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <cstdlib>
#include <map>

#include "emulator/numbers.h"
#include "machine.h"

namespace emulator {

namespace {

struct Arrived {
  uint32_t offset;
  std::vector<unsigned char> bytes;
  bool is_counted;  // by the bytes that the barrier expects
};

struct MBarrier {
  int count = 0, pending = 0;
  int64_t expected_bytes = 0;  // less those that have come
  int late_arrivals = 0;       // when `copies` land
  uint32_t phase = 0;
  std::vector<Arrived> copies;  // in flight; they land when somebody waits
  uint32_t waiting[kMaxWarps] = {};
  uint32_t clock[kMaxWarps] = {};
};
std::map<uint32_t, MBarrier> barriers;

// Stores in flight: they read shared memory when their thread waits.
struct Store {
  int thread;
  uint32_t source, num_bytes;
  TensorMap map;
  int coordinates[5];
};
std::vector<Store> stores;

MBarrier& find(uint32_t address, void* code) {
  check_shared(address, 8, 8, code);
  const auto found = barriers.find(address);
  if (found == barriers.end()) fail(code, "the mbarrier at %u was not initialised", address);
  return found->second;
}

// A thread that waits already is one that needs what has come.
void wake_all(MBarrier& barrier) {
  for (int w = 0; w < machine.num_warps; ++w) {
    if (barrier.waiting[w] != 0) wake(machine.warps[w], barrier.waiting[w]);
    barrier.waiting[w] = 0;
  }
}

void finish_phase(MBarrier& barrier) {
  if (barrier.pending != 0 || barrier.expected_bytes != 0) return;
  barrier.pending = barrier.count;
  barrier.phase ^= 1;
  wake_all(barrier);
}

// Whoever waits for the barrier sees what the present warp has done.
void set_time(MBarrier& barrier) {
  Warp& warp = machine.warp();
  ++warp.clock[warp.index];
  for (int w = 0; w < machine.num_warps; ++w) {
    barrier.clock[w] = std::max(barrier.clock[w], warp.clock[w]);
  }
}

void arrive(MBarrier& barrier, int num_bytes, void* code) {
  if (barrier.pending == 0) fail(code, "more arrivals than the mbarrier's %d", barrier.count);
  set_time(barrier);
  barrier.expected_bytes += num_bytes;
  --barrier.pending;
  finish_phase(barrier);
}

// The latest time at which copies may land: somebody needs them.
void land_copies(MBarrier& barrier, void* code) {
  for (const Arrived& copy : barrier.copies) {
    const int size = static_cast<int>(copy.bytes.size());
    land_shared_copy(copy.offset, size, code);
    memcpy(shared_window.begin + copy.offset, copy.bytes.data(), size);
    if (copy.is_counted) barrier.expected_bytes -= size;
  }
  const bool had_copies = !barrier.copies.empty() || barrier.late_arrivals != 0;
  barrier.copies.clear();
  if (barrier.late_arrivals > barrier.pending) {
    fail(code, "more arrivals than the mbarrier's %d", barrier.count);
  }
  barrier.pending -= barrier.late_arrivals;
  barrier.late_arrivals = 0;
  if (had_copies) {
    // Whoever waits sees what was copied: the copy's time is the present one of this warp.
    Warp& warp = machine.warp();
    barrier.clock[warp.index] = std::max(barrier.clock[warp.index], ++warp.clock[warp.index]);
    finish_phase(barrier);
  }
}

}  // namespace

void mbarrier_init(uint32_t address, int count) {
  check_shared(address, 8, 8, EMULATOR_CALLER);
  write_shared(address, 8, true, EMULATOR_CALLER);
  MBarrier& barrier = barriers[address] = MBarrier{};
  barrier.count = barrier.pending = count;
}

void mbarrier_arrive(uint32_t address) {
  arrive(find(address, EMULATOR_CALLER), 0, EMULATOR_CALLER);
}

void mbarrier_arrive_expect_tx(uint32_t address, int num_bytes) {
  arrive(find(address, EMULATOR_CALLER), num_bytes, EMULATOR_CALLER);
}

void mbarrier_expect_tx(uint32_t address, int num_bytes) {
  find(address, EMULATOR_CALLER).expected_bytes += num_bytes;
}

void mbarrier_wait_parity(uint32_t address, int parity, Where where) {
  MBarrier& barrier = find(address, EMULATOR_CALLER);
  land_copies(barrier, EMULATOR_CALLER);
  while (barrier.phase == static_cast<uint32_t>(parity)) {
    barrier.waiting[machine.current->index / kLanes] |= 1u << machine.lane();
    stop(State::waits_for_block, where, EMULATOR_CALLER);
    land_copies(barrier, EMULATOR_CALLER);
  }
  Warp& warp = machine.warp();
  for (int w = 0; w < machine.num_warps; ++w) {
    if (w != warp.index) warp.clock[w] = std::max(warp.clock[w], barrier.clock[w]);
  }
}

// The bytes from a row of a box in shared memory to the next: those of the swizzle's pattern, of
// which shorter rows leave the rest as it is.
static uint32_t row_pitch(const TensorMap& map) {
  const uint32_t span = 16u << static_cast<uint32_t>(map.swizzle);
  return map.swizzle == Swizzle::none ? map.box[0] * map.element_bytes : span;
}

// The bytes of shared memory that hold a box: fails unless that from `place` on may.
static uint32_t check_box(uint32_t place, const TensorMap& map, void* code) {
  uint32_t rows = 1;
  for (uint32_t i = 1; i < map.rank; ++i) rows *= map.box[i];
  const uint32_t row_bytes = map.box[0] * map.element_bytes;
  const uint32_t pitch = row_pitch(map), num_bytes = rows * pitch;
  if (map.swizzle != Swizzle::none && (row_bytes > pitch || place % (8 * pitch) != 0)) {
    fail(code, "a box with rows of %u bytes goes to %u; wanted up to %u bytes, on a multiple of %u",
         row_bytes, place, pitch, 8 * pitch);
  }
  if (row_bytes % 16 != 0 || place % 128 != 0) {
    fail(code, "misaligned: a box with rows of %u bytes goes to %u", row_bytes, place);
  }
  check_shared(place, static_cast<int>(num_bytes), 16, code);
  return num_bytes;
}

// Calls body(address, offset in the box as it lies in shared memory) for each element that is in
// the tensor.
template <typename Body>
static void each_element(uint32_t place, const TensorMap& map, const int (&coordinates)[5],
                         uint32_t num_bytes, Body&& body) {
  const uint32_t pitch = row_pitch(map), rows = num_bytes / pitch;
  for (uint32_t index = 0; index < rows * map.box[0]; ++index) {
    const uint32_t offset = index / map.box[0] * pitch + index % map.box[0] * map.element_bytes;
    uint64_t address = map.address;
    bool exists = true;
    uint32_t rest = index;
    for (uint32_t i = 0; i < map.rank; ++i) {
      const int64_t at = coordinates[i] + static_cast<int64_t>(rest % map.box[i]);
      rest /= map.box[i];
      exists = exists && at >= 0 && at < map.dims[i];
      address += at * (i == 0 ? map.element_bytes : map.strides[i - 1]);
    }
    if (!exists) continue;
    body(reinterpret_cast<void*>(address),
         swizzled(place + offset, map.swizzle) - place);
  }
}

void tensor_copy(uint32_t destination, const TensorMap& map, const int (&coordinates)[5],
                 uint32_t address) {
  void* code = EMULATOR_CALLER;
  MBarrier& barrier = find(address, code);
  const uint32_t num_bytes = check_box(destination, map, code);
  std::vector<unsigned char> bytes(num_bytes);
  each_element(destination, map, coordinates, num_bytes, [&](void* element, uint32_t offset) {
    check_global(element, map.element_bytes, false, code);
    memcpy(&bytes[offset], element, map.element_bytes);
  });
  const uint32_t pitch = row_pitch(map), row_bytes = map.box[0] * map.element_bytes;
  const uint32_t piece = row_bytes == pitch ? num_bytes : 16;
  for (uint32_t offset = 0; offset < num_bytes; offset += piece) {
    // A shorter row is chunks of 16 bytes wherever the pattern puts them.
    const uint32_t at = swizzled(destination + offset, map.swizzle) - destination;
    if (offset % pitch >= row_bytes && piece == 16) continue;
    const uint32_t from = piece == 16 ? at : 0;
    start_copy(destination + from, static_cast<int>(piece), code);
    barrier.copies.push_back(Arrived{
        destination + from,
        std::vector<unsigned char>(bytes.begin() + from, bytes.begin() + from + piece), true});
  }
  wake_all(barrier);
}

void cp_async_mbarrier_arrive_noinc(uint32_t address) {
  MBarrier& barrier = find(address, EMULATOR_CALLER);
  for (const Copy& copy : take_copies()) {
    const unsigned char* end = copy.bytes + copy.num_bytes;
    barrier.copies.push_back(
        Arrived{copy.offset, std::vector<unsigned char>(copy.bytes, end), false});
  }
  set_time(barrier);
  ++barrier.late_arrivals;
  wake_all(barrier);
}

void tensor_store(uint32_t source, const TensorMap& map, const int (&coordinates)[5]) {
  void* code = EMULATOR_CALLER;
  const uint32_t num_bytes = check_box(source, map, code);
  read_shared(source, static_cast<int>(num_bytes), false, code);
  Store store{machine.current->index, source, num_bytes, map, {}};
  for (int i = 0; i < 5; ++i) store.coordinates[i] = coordinates[i];
  stores.push_back(store);
}

// The latest time at which a store may read: its thread needs the place.
void bulk_wait_read() {
  void* code = EMULATOR_CALLER;
  for (const Store& store : stores) {
    if (store.thread != machine.current->index) continue;
    const unsigned char* bytes = shared_window.begin + store.source;
    each_element(store.source, store.map, store.coordinates, store.num_bytes,
                 [&](void* element, uint32_t offset) {
                   check_global(element, store.map.element_bytes, true, code);
                   memcpy(element, bytes + offset, store.map.element_bytes);
                 });
  }
  const int thread = machine.current->index;
  stores.erase(std::remove_if(stores.begin(), stores.end(),
                              [=](const Store& store) { return store.thread == thread; }),
               stores.end());
}

// --- wgmma ---

MatrixDescriptor MatrixDescriptor::decode(uint64_t bits) {
  const auto field = [bits](int shift) {
    return static_cast<uint32_t>(bits >> shift & 0x3fff) << 4;
  };
  constexpr Swizzle kLayouts[] = {Swizzle::none, Swizzle::bytes_128, Swizzle::bytes_64,
                                  Swizzle::bytes_32};
  return {field(0), field(16), field(32), kLayouts[bits >> 62]};
}

// K-major: rows of the pattern are 8 of M or N, groups of 8 a stride apart; without a swizzle the
// two 16-byte halves of k are the leading distance apart. MN-major, of 16 bits only: rows are of k,
// 8 and then a stride; a row's end goes on a leading distance further. (cute,
// mma_traits_sm90_gmma.hpp)
uint32_t MatrixDescriptor::element(int outer, int k, bool is_k_major, int element_bytes) const {
  const uint32_t span = 16u << static_cast<uint32_t>(swizzle);
  const int in_row = static_cast<int>(span / 2);
  const int in_chunk = 16 / element_bytes;
  uint32_t offset;
  if (is_k_major) {
    const uint32_t along = swizzle == Swizzle::none
                               ? k / in_chunk * leading + k % in_chunk * element_bytes
                               : k * element_bytes;
    offset = outer / 8 * stride + outer % 8 * span + along;
  } else if (swizzle == Swizzle::none) {
    offset = outer / 8 * stride + k / 8 * leading + k % 8 * span + outer % 8 * 2;
  } else {
    offset = outer / in_row * leading + k / 8 * stride + k % 8 * span + outer % in_row * 2;
  }
  return swizzled(start + offset, swizzle);
}

namespace {

constexpr int kGroupThreads = 128, kRows = 64, kMaxColumns = 256;

struct Group {
  int arrived = 0;
  Where where;
  const WarpgroupProduct* products[kGroupThreads];
  uint32_t waiting[kGroupThreads / kLanes] = {};
  // The places of waits since the last product, and how many of them each thread has passed.
  std::vector<Where> waits;
  size_t passed[kGroupThreads] = {};
};
Group groups[kMaxThreads / kGroupThreads];

// The bits of the element (outer, k) of an operand in shared memory.
uint32_t load(const MatrixDescriptor& matrix, int outer, int k, bool is_k_major, int element_bytes,
              void* code) {
  const uint32_t address = matrix.element(outer, k, is_k_major, element_bytes);
  check_shared(address, element_bytes, element_bytes, code);
  read_shared(address, element_bytes, true, code);
  uint32_t bits = 0;
  memcpy(&bits, shared_window.begin + address, element_bytes);
  return bits;
}

// The operands of a product as bits: 32 bytes of k in a row of A or column of B.
template <typename Element>
struct OperandBits {
  static constexpr int kBytes = sizeof(Element), kDepth = 32 / kBytes;
  Element a[kRows][kDepth], b[kDepth][kMaxColumns];

  OperandBits(const Group& group, void* code) {
    const WarpgroupProduct& first = *group.products[0];
    if (first.a == nullptr) {
      const MatrixDescriptor matrix = MatrixDescriptor::decode(first.a_descriptor);
      for (int row = 0; row < kRows; ++row) {
        for (int k = 0; k < kDepth; ++k) {
          const uint32_t bits = load(matrix, row, k, first.is_a_k_major, kBytes, code);
          a[row][k] = static_cast<Element>(bits);
        }
      }
    } else {
      take_fragments(group);
    }
    const MatrixDescriptor matrix = MatrixDescriptor::decode(first.b_descriptor);
    for (int column = 0; column < first.n; ++column) {
      for (int k = 0; k < kDepth; ++k) {
        const uint32_t bits = load(matrix, column, k, first.is_b_k_major, kBytes, code);
        b[k][column] = static_cast<Element>(bits);
      }
    }
  }

  // A register has 4 bytes of a row: word lane % 4 of the first or second 16 bytes of k.
  void take_fragments(const Group& group) {
    for (int thread = 0; thread < kGroupThreads; ++thread) {
      const int lane = thread % kLanes;
      for (int i = 0; i < 4; ++i) {
        const int row = thread / kLanes * 16 + lane / 4 + 8 * (i % 2);
        const int first_byte = 4 * (lane % 4) + 16 * (i / 2);
        memcpy(&a[row][first_byte / kBytes], &group.products[thread]->a[i], 4);
      }
    }
  }
};

// Element (row, column) of the sum, as the thread whose it is has it.
template <typename Sum>
Sum& sum_at(const Group& group, int row, int column) {
  const int lane = row % 8 * 4 + column % 8 / 2;
  const int i = column / 8 * 4 + row / 8 % 2 * 2 + column % 2;
  return static_cast<Sum*>(group.products[row / 16 * kLanes + lane]->d)[i];
}

// Sums in float32, term by term.
void multiply_16(const Group& group, void* code) {
  using Bits = OperandBits<uint16_t>;
  const WarpgroupProduct& first = *group.products[0];
  const FloatFormat& format = first.operands == Operands::bfloat16 ? kBfloat16 : kHalf;
  const Bits bits(group, code);
  float b[Bits::kDepth][kMaxColumns];
  for (int k = 0; k < Bits::kDepth; ++k) {
    for (int column = 0; column < first.n; ++column) b[k][column] = decode(bits.b[k][column], format);
  }
  for (int row = 0; row < kRows; ++row) {
    float sum[kMaxColumns] = {};
    for (int column = 0; column < first.n && !first.is_first; ++column) {
      sum[column] = sum_at<float>(group, row, column);
    }
    for (int k = 0; k < Bits::kDepth; ++k) {
      const float a = decode(bits.a[row][k], format);
      for (int column = 0; column < first.n; ++column) sum[column] += a * b[k][column];
    }
    for (int column = 0; column < first.n; ++column) {
      sum_at<float>(group, row, column) = sum[column];
    }
  }
}

// Sums are exact, modulo 2^32.
void multiply_int8(const Group& group, void* code) {
  using Bits = OperandBits<int8_t>;
  const WarpgroupProduct& first = *group.products[0];
  const Bits bits(group, code);
  for (int row = 0; row < kRows; ++row) {
    uint32_t sum[kMaxColumns] = {};
    for (int column = 0; column < first.n && !first.is_first; ++column) {
      sum[column] = sum_at<uint32_t>(group, row, column);
    }
    for (int k = 0; k < Bits::kDepth; ++k) {
      const int a = bits.a[row][k];
      for (int column = 0; column < first.n; ++column) {
        sum[column] += static_cast<uint32_t>(a * bits.b[k][column]);
      }
    }
    for (int column = 0; column < first.n; ++column) {
      sum_at<uint32_t>(group, row, column) = sum[column];
    }
  }
}

// e4m3 on Hopper: 32 products and the sum so far are aligned to the largest exponent of them, each
// is cut to 13 bits behind the point of that one, and their sum keeps 14 bits. All cuts are towards
// zero. A product's exponent is that of its factors, so it may be one less than its value's.
// (arXiv 2511.10909 and 2512.07004, which compared such models with the machine bit by bit)
class CutSums {
 public:
  static constexpr int kFractionBits = 13;

  CutSums(const Group& group, void* code) : group_(group), bits_(group, code) {
    for (int code_ = 0; code_ < 256; ++code_) {
      const uint32_t magnitude = code_ & 0x7f;
      values_[code_] = decode(code_, kE4m3);
      exponents_[code_] = magnitude == 0 ? kNone : std::max<int>(magnitude >> 3, 1) - kE4m3.bias();
    }
    for (int k = 0; k < kDepth; ++k) {
      for (int column = 0; column < num_columns(); ++column) {
        b_[k][column] = values_[bits_.b[k][column]];
        b_exponents_[k][column] = exponents_[bits_.b[k][column]];
      }
    }
  }

  void multiply_row(int row) {
    const int n = num_columns();
    float sum[kMaxColumns] = {};
    int exponent[kMaxColumns];
    for (int column = 0; column < n; ++column) {
      if (!group_.products[0]->is_first) sum[column] = sum_at<float>(group_, row, column);
      exponent[column] = sum[column] == 0.0f || !isfinite(sum[column]) ? kNone : ilogb(sum[column]);
    }
    for (int k = 0; k < kDepth; ++k) {
      const int a_exponent = exponents_[bits_.a[row][k]];
      for (int column = 0; column < n; ++column) {
        const int both = a_exponent + b_exponents_[k][column];
        exponent[column] = std::max(exponent[column], both);
      }
    }
    for (int column = 0; column < n; ++column) {
      sum_at<float>(group_, row, column) = add_cut(row, column, sum[column], exponent[column]);
    }
  }

 private:
  using Bits = OperandBits<uint8_t>;
  static constexpr int kDepth = Bits::kDepth, kNone = -1000;

  int num_columns() const { return group_.products[0]->n; }

  // In units of the last bit that is kept; a product has less than 4, the sum 2, of 2^13 of them.
  float add_cut(int row, int column, float sum, int exponent) const {
    if (exponent < kNone / 2) return sum;
    // What is not finite, as a float has it.
    float plain = sum;
    for (int k = 0; k < kDepth; ++k) plain += values_[bits_.a[row][k]] * b_[k][column];
    if (!isfinite(plain)) return plain;
    const double units = ldexp(1.0, kFractionBits - exponent);
    int total = static_cast<int>(sum * units);
    for (int k = 0; k < kDepth; ++k) {
      total += static_cast<int>(values_[bits_.a[row][k]] * b_[k][column] * units);
    }
    const int bits = 32 - __builtin_clz(std::abs(total) | 1);
    const int lost = std::max(0, bits - 1 - kFractionBits);
    return ldexpf(static_cast<float>(total / (1 << lost) * (1 << lost)), exponent - kFractionBits);
  }

  const Group& group_;
  const Bits bits_;
  float values_[256], b_[kDepth][kMaxColumns];
  int exponents_[256], b_exponents_[kDepth][kMaxColumns];
};

void multiply(const Group& group, void* code) {
  switch (group.products[0]->operands) {
    case Operands::half:
    case Operands::bfloat16: return multiply_16(group, code);
    case Operands::int8: return multiply_int8(group, code);
    case Operands::e4m3: break;
  }
  CutSums sums(group, code);
  for (int row = 0; row < kRows; ++row) sums.multiply_row(row);
}

}  // namespace

void warpgroup_multiply(const WarpgroupProduct& product, Where where) {
  void* code = EMULATOR_CALLER;
  const int thread = machine.current->index;
  Group& group = groups[thread / kGroupThreads];
  if (product.n < 8 || product.n > 256 || product.n % 8 != 0) {
    fail(code, "a product of %d columns; wanted a multiple of 8 up to 256", product.n);
  }
  const bool has_8_bits = product.operands == Operands::e4m3 || product.operands == Operands::int8;
  if (has_8_bits && !(product.is_a_k_major && product.is_b_k_major)) {
    fail(code, "operands of 8 bits are not K-major");
  }
  if (group.arrived == 0) group.where = where;
  if (group.where.line() != where.line() || group.where.file_name() != where.file_name()) {
    fail(code, "threads of a warpgroup have parted: lines %u and %u", where.line(),
         group.where.line());
  }
  const WarpgroupProduct*& first = group.products[0];
  group.products[thread % kGroupThreads] = &product;
  if (++group.arrived < kGroupThreads) {
    group.waiting[thread % kGroupThreads / kLanes] |= 1u << machine.lane();
    stop(State::waits_for_block, where, code);
    return;
  }
  for (const WarpgroupProduct* other : group.products) {
    if (other->b_descriptor != first->b_descriptor || other->n != first->n ||
        other->operands != first->operands ||
        (other->a == nullptr && other->a_descriptor != first->a_descriptor)) {
      fail(code, "threads of a warpgroup give different descriptors");
    }
  }
  for (const size_t passed : group.passed) {
    if (passed != group.waits.size()) {
      const size_t missed = std::min(passed, group.waits.size() - 1);
      fail(code, "warps of a warpgroup have parted: some do not wait at line %u",
           group.waits[missed].line());
    }
  }
  group.waits.clear();
  std::fill_n(group.passed, kGroupThreads, 0);
  multiply(group, code);
  group.arrived = 0;
  for (int w = 0; w < kGroupThreads / kLanes; ++w) {
    const int index = thread / kGroupThreads * (kGroupThreads / kLanes) + w;
    if (group.waiting[w] != 0) wake(machine.warps[index], group.waiting[w]);
    group.waiting[w] = 0;
  }
}

void warpgroup_wait(Where where) {
  const int thread = machine.current->index;
  Group& group = groups[thread / kGroupThreads];
  const size_t index = group.passed[thread % kGroupThreads]++;
  if (index == group.waits.size()) group.waits.push_back(where);
  const Where& other = group.waits[index];
  if (other.line() != where.line() || other.file_name() != where.file_name()) {
    fail(EMULATOR_CALLER, "warps of a warpgroup wait at different places: lines %u and %u",
         where.line(), other.line());
  }
  warp_sync(where);
}

void set_max_registers(int count, Where where) {
  if (count % 8 != 0 || count < 24 || count > 256) {
    fail(EMULATOR_CALLER, "setmaxnreg %d; wanted a multiple of 8 from 24 to 256", count);
  }
  // Every warp executes it as one.
  warp_any(true, where);
}

void begin_hopper() {
  barriers.clear();
  stores.clear();
  for (Group& group : groups) group = Group{};
}

}  // namespace emulator
