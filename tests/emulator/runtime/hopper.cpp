// Barriers in shared memory, tensor copies and warpgroup products (emulator/hopper.h).
#include "emulator/hopper.h"

#include <string.h>

#include <algorithm>
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
// two 16-byte halves of k are the leading distance apart. MN-major: rows are of k, 8 and then a
// stride; a row's end goes on a leading distance further. (cute, mma_traits_sm90_gmma.hpp)
uint32_t MatrixDescriptor::element(int outer, int k, bool is_k_major) const {
  const uint32_t span = 16u << static_cast<uint32_t>(swizzle);
  const int in_row = static_cast<int>(span / 2);
  uint32_t offset;
  if (is_k_major) {
    const uint32_t along = swizzle == Swizzle::none ? k / 8 * leading + k % 8 * 2 : k * 2;
    offset = outer / 8 * stride + outer % 8 * span + along;
  } else if (swizzle == Swizzle::none) {
    offset = outer / 8 * stride + k / 8 * leading + k % 8 * span + outer % 8 * 2;
  } else {
    offset = outer / in_row * leading + k / 8 * stride + k % 8 * span + outer % in_row * 2;
  }
  return swizzled(start + offset, swizzle);
}

namespace {

constexpr int kGroupThreads = 128, kRows = 64, kDepth = 16;

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

float load(const MatrixDescriptor& matrix, int outer, int k, bool is_k_major,
           const FloatFormat& format, void* code) {
  const uint32_t address = matrix.element(outer, k, is_k_major);
  check_shared(address, 2, 2, code);
  read_shared(address, 2, true, code);
  uint16_t bits;
  memcpy(&bits, shared_window.begin + address, 2);
  return decode(bits, format);
}

void multiply(const Group& group, void* code) {
  const WarpgroupProduct& first = *group.products[0];
  const FloatFormat& format = first.is_bfloat16 ? kBfloat16 : kHalf;
  float a[kRows][kDepth], b[kDepth][256];
  if (first.a == nullptr) {
    const MatrixDescriptor matrix = MatrixDescriptor::decode(first.a_descriptor);
    for (int row = 0; row < kRows; ++row) {
      for (int k = 0; k < kDepth; ++k) {
        a[row][k] = load(matrix, row, k, first.is_a_k_major, format, code);
      }
    }
  } else {
    for (int thread = 0; thread < kGroupThreads; ++thread) {
      const int lane = thread % kLanes;
      for (int i = 0; i < 4; ++i) {
        const int row = thread / kLanes * 16 + lane / 4 + 8 * (i % 2);
        const int column = 2 * (lane % 4) + 8 * (i / 2);
        const uint32_t pair = group.products[thread]->a[i];
        a[row][column] = decode(pair & 0xffff, format);
        a[row][column + 1] = decode(pair >> 16, format);
      }
    }
  }
  const MatrixDescriptor matrix = MatrixDescriptor::decode(first.b_descriptor);
  for (int column = 0; column < first.n; ++column) {
    for (int k = 0; k < kDepth; ++k) {
      b[k][column] = load(matrix, column, k, first.is_b_k_major, format, code);
    }
  }
  // Thread and index of element (row, column) of the sum.
  const auto place = [&](int row, int column) -> float& {
    const int lane = row % 8 * 4 + column % 8 / 2;
    const int i = column / 8 * 4 + row / 8 % 2 * 2 + column % 2;
    return group.products[row / 16 * kLanes + lane]->d[i];
  };
  for (int row = 0; row < kRows; ++row) {
    float sum[256] = {};
    for (int column = 0; column < first.n && !first.is_first; ++column) {
      sum[column] = place(row, column);
    }
    for (int k = 0; k < kDepth; ++k) {
      for (int column = 0; column < first.n; ++column) sum[column] += a[row][k] * b[k][column];
    }
    for (int column = 0; column < first.n; ++column) place(row, column) = sum[column];
  }
}

}  // namespace

void warpgroup_multiply(const WarpgroupProduct& product, Where where) {
  void* code = EMULATOR_CALLER;
  const int thread = machine.current->index;
  Group& group = groups[thread / kGroupThreads];
  if (product.n < 8 || product.n > 256 || product.n % 8 != 0) {
    fail(code, "a product of %d columns; wanted a multiple of 8 up to 256", product.n);
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
