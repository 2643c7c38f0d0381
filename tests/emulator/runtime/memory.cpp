// What may be touched, and when. Global memory: the launcher's list of ranges. Shared memory: who
// wrote each byte last, which warps have read it since, and whether a copy to it is in flight. An
// access must be ordered after those it depends on by a barrier of the warp or the block.
//
// Without EMULATOR_CHECKED plain loads and stores are not seen, so nothing can be said of writers:
// only bounds and copies in flight are checked, where a twin of ptx/ sees them.
#include <link.h>
#include <sched.h>
#include <string.h>
#include <time.h>

#include <algorithm>
#include <utility>

#include "emulator/cuda.h"
#include "machine.h"

alignas(1024) thread_local unsigned char shared_bytes[emulator::kMaxSharedBytes];

extern "C" void emulator_call_kernel(const void* params);

// Where the system's linker finds thread-local storage: a library's, and a place in it.
struct ThreadLocalPlace {
  unsigned long module, offset;
};
extern "C" void* __tls_get_addr(ThreadLocalPlace* place);

namespace emulator {

SharedWindow shared_window;
Shadow shadow;
std::vector<Copies> copies;
uint32_t cluster_phase = 0;

namespace {

constexpr int kPoison = 0xff;  // a NaN in every format
constexpr uint32_t kSeveralLanes = 32;

// A write: its time, whether it was atomic, its thread. A read: its time, its lane or several.
constexpr int kThreadBits = 10, kAtomicBit = 1 << kThreadBits, kWriteClockShift = kThreadBits + 1;
constexpr int kReadClockShift = 6;
constexpr uint32_t kLine = 128;  // bytes whose last read is kept, so that few are looked at

// Data segments of this library: tables of constants, and threadIdx and its like.
struct Segment {
  uintptr_t begin, end;
};
std::vector<Segment> segments;
uintptr_t module_base = 0;
ThreadLocalPlace window_place{};

int find_module(dl_phdr_info* info, size_t, void*) {
  const uintptr_t inside = reinterpret_cast<uintptr_t>(&emulator_call_kernel);
  bool is_ours = false;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr) & header = info->dlpi_phdr[i];
    const uintptr_t begin = info->dlpi_addr + header.p_vaddr;
    if (header.p_type == PT_LOAD && inside >= begin && inside < begin + header.p_memsz) {
      is_ours = true;
    }
  }
  if (!is_ours) return 0;
  module_base = info->dlpi_addr;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr) & header = info->dlpi_phdr[i];
    if (header.p_type == PT_LOAD) {
      const uintptr_t begin = info->dlpi_addr + header.p_vaddr;
      segments.push_back({begin, begin + header.p_memsz});
    } else if (header.p_type == PT_TLS) {
      window_place.module = info->dlpi_tls_modid;
      shared_window.bytes = header.p_memsz;
    }
  }
  return 1;
}

// The launch's dynamic shared memory, as offsets in the window; what lies outside it is static.
uint32_t dynamic_begin() { return static_cast<uint32_t>(shared_bytes - shared_window.begin); }
uint32_t dynamic_end() { return dynamic_begin() + machine.request.shared_bytes; }
uint32_t dynamic_limit() { return dynamic_begin() + kMaxSharedBytes; }

template <typename T>
void clear(std::vector<T>& records) {
  std::fill(records.begin(), records.begin() + dynamic_end(), T{});
  std::fill(records.begin() + dynamic_limit(), records.end(), T{});
}

[[noreturn]] void fail_access(const char* verb, uint32_t offset, int num_bytes, const char* what,
                              int other, uint64_t other_code, void* code) {
  fail_with(code, other_code, "%s %d bytes at %u of shared memory%s (thread %d, warp %d)", verb,
            num_bytes, offset, what, other, other / kLanes);
}

void check_copying(const char* verb, uint32_t offset, int num_bytes, void* code) {
  for (int i = 0; i < num_bytes; ++i) {
    const int owner = shadow.copying[offset + i];
    if (owner != 0) {
      fail_access(verb, offset, num_bytes, ", to which an asynchronous copy is still in flight",
                  owner - 1, 0, code);
    }
  }
}

}  // namespace

void find_segments() {
  // Each thread of the system that launches has a window of its own.
  static const unsigned char* known = nullptr;
  shared_bytes[0] = 0;  // thread-local storage is made when it is first touched
  if (known == shared_bytes) return;
  known = shared_bytes;
  segments.clear();
  dl_iterate_phdr(find_module, nullptr);
  // Not what `dlpi_tls_data` says: glibc (2.36) has null there, for one library in sixteen, while
  // another thread loads a library.
  shared_window.begin = static_cast<unsigned char*>(__tls_get_addr(&window_place));
}

uint32_t write_time(uint32_t record) { return record >> kWriteClockShift; }
int writing_thread(uint32_t record) { return static_cast<int>(record & (kAtomicBit - 1)); }

// A return address is that of the next instruction, which may be of the next line: one less.
uint64_t code_offset(const void* code) {
  return code == nullptr ? 0 : reinterpret_cast<uintptr_t>(code) - module_base - 1;
}

void end_shared_memory() { shadow = Shadow{}; }

bool is_module_data(uintptr_t address) {
  return std::any_of(segments.begin(), segments.end(), [=](const Segment& segment) {
    return address >= segment.begin && address < segment.end;
  });
}

void begin_shared_memory() {
  shadow.copying.resize(shared_window.bytes);
  if (EMULATOR_CHECKED) {
    shadow.written.resize(shared_window.bytes);
    shadow.written_by_code.resize(shared_window.bytes);
    shadow.read_by_code.resize(shared_window.bytes);
    shadow.read_by_others.resize(shared_window.bytes);
  }
  memset(shared_window.begin, kPoison, dynamic_end());
  memset(shared_window.begin + dynamic_limit(), kPoison, shared_window.bytes - dynamic_limit());
  clear(shadow.copying);
  if (!EMULATOR_CHECKED) return;
  clear(shadow.written);
  clear(shadow.read_by_others);
  for (int w = 0; w < machine.num_warps; ++w) {
    shadow.read[w].resize(shared_window.bytes);
    clear(shadow.read[w]);
    shadow.read_last[w].assign(shared_window.bytes / kLine + 1, 0);
  }
}

void begin_copies() {
  copies.resize(std::max<size_t>(copies.size(), machine.num_threads));
  for (Copies& of_thread : copies) {
    of_thread.started.clear();
    of_thread.groups.clear();
  }
}

void check_shared(uint32_t offset, int num_bytes, int alignment, void* code) {
  if (offset + num_bytes > shared_window.bytes ||
      (offset + num_bytes > dynamic_end() && offset < dynamic_limit())) {
    fail(code, "%d bytes at %u are past the %u bytes of shared memory of this launch", num_bytes,
         offset, machine.request.shared_bytes);
  }
  if (offset % alignment != 0) {
    fail(code, "misaligned: %d bytes at %u of shared memory, not a multiple of %d", num_bytes,
         offset, alignment);
  }
}

void read_shared(uint32_t offset, int num_bytes, bool is_warps, void* code) {
  check_copying("reads", offset, num_bytes, code);
  if (!EMULATOR_CHECKED) return;
  const int thread = machine.current->index, warp = thread / kLanes;
  const uint32_t* clock = machine.warps[warp].clock;
  std::vector<uint32_t>& reads = shadow.read[warp];
  const uint32_t now = clock[warp] << kReadClockShift;
  const uint32_t lane = is_warps ? kSeveralLanes : thread % kLanes;
  uint32_t checked = 0;
  for (uint32_t i = offset; i < offset + num_bytes; ++i) {
    const uint32_t write = shadow.written[i];
    if (write == 0) {
      fail(code, "reads %d bytes at %u of shared memory; byte %u was never written", num_bytes,
           offset, i);
    }
    const int writer = write & (kAtomicBit - 1);
    if (write != checked && (writer != thread || is_warps) &&
        clock[writer / kLanes] <= write >> kWriteClockShift) {
      fail_access("reads", offset, num_bytes, " that were written with no barrier between", writer,
                  shadow.written_by_code[i], code);
    }
    checked = write;
    const uint32_t old = reads[i];
    const bool is_shared = old >= now && (old & 63) != lane;
    reads[i] = now | (is_shared ? kSeveralLanes : lane);
    shadow.read_by_code[i] = static_cast<uint32_t>(code_offset(code));
    shadow.read_last[warp][i / kLine] = now | kSeveralLanes;
  }
}

// Each warp's reads must be ordered before a write of the present thread, which may overwrite its own.
static void check_reads(uint32_t offset, int num_bytes, void* code) {
  const int thread = machine.current->index, warp = thread / kLanes;
  const uint32_t lane = thread % kLanes;
  for (int w = 0; w < machine.num_warps; ++w) {
    const uint32_t begin = machine.warps[warp].clock[w] << kReadClockShift;
    for (uint32_t i = offset; i < offset + num_bytes; ++i) {
      if (shadow.read_last[w][i / kLine] < begin) {
        i |= kLine - 1;  // nothing of the line
        continue;
      }
      const uint32_t read = shadow.read[w][i];
      if (read < begin || read == 0 || (w == warp && (read & 63) == lane)) continue;
      const int reader = w * kLanes + ((read & 63) == kSeveralLanes ? 0 : read & 63);
      fail_access("writes", offset, num_bytes, " that were read with no barrier between", reader,
                  shadow.read_by_code[i], code);
    }
  }
}

void write_shared(uint32_t offset, int num_bytes, bool is_atomic, void* code) {
  check_copying("writes", offset, num_bytes, code);
  if (!EMULATOR_CHECKED) return;
  const int thread = machine.current->index, warp = thread / kLanes;
  const uint32_t* clock = machine.warps[warp].clock;
  const uint32_t record = clock[warp] << kWriteClockShift | (is_atomic ? kAtomicBit : 0) | thread;
  const uint32_t place = static_cast<uint32_t>(code_offset(code));
  uint32_t checked = 0;
  for (uint32_t i = offset; i < offset + num_bytes; ++i) {
    const uint32_t write = shadow.written[i];
    const int writer = write & (kAtomicBit - 1);
    const bool both_atomic = is_atomic && (write & kAtomicBit);
    if (write != checked && writer != thread && !both_atomic &&
        clock[writer / kLanes] <= write >> kWriteClockShift) {
      fail_access("writes", offset, num_bytes, " that were written with no barrier between", writer,
                  shadow.written_by_code[i], code);
    }
    checked = write;
    if (shadow.read_by_others[i] == cluster_phase + 1) {
      fail(code, "writes %d bytes at %u of shared memory, which another block of the cluster reads",
           num_bytes, offset);
    }
    shadow.written[i] = record;
    shadow.written_by_code[i] = place;
  }
  check_reads(offset, num_bytes, code);
}

// From its start to its end a copy may write at any time: to begin with it writes what it should
// not, so that nobody can use the old bytes by luck.
void start_copy(uint32_t offset, int num_bytes, void* code) {
  write_shared(offset, num_bytes, false, code);
  memset(shared_window.begin + offset, kPoison, num_bytes);
  for (int i = 0; i < num_bytes; ++i) {
    shadow.copying[offset + i] = static_cast<uint16_t>(machine.current->index + 1);
  }
}

void land_copy(uint32_t offset, int num_bytes, void* code) {
  for (int i = 0; i < num_bytes; ++i) shadow.copying[offset + i] = 0;
  write_shared(offset, num_bytes, false, code);
}

// A copy that any thread may wait for was ordered when it started; it lands in that thread's name.
void land_shared_copy(uint32_t offset, int num_bytes, void* code) {
  const int thread = machine.current->index, warp = thread / kLanes;
  for (uint32_t i = offset; i < offset + num_bytes; ++i) {
    shadow.copying[i] = 0;
    if (!EMULATOR_CHECKED) continue;
    shadow.written[i] = machine.warps[warp].clock[warp] << kWriteClockShift | thread;
    shadow.written_by_code[i] = static_cast<uint32_t>(code_offset(code));
  }
}

namespace {

const Range* last_range = nullptr;  // that an access of this launch was in

}  // namespace

void begin_global_memory() { last_range = nullptr; }

void check_global(const void* pointer, size_t num_bytes, bool is_write, void* code) {
  const uint64_t begin = reinterpret_cast<uint64_t>(pointer), end = begin + num_bytes;
  const Range* ranges = machine.request.ranges;
  const Range* range_end = ranges + machine.request.num_ranges;
  const Range* found = last_range;
  if (found == nullptr || begin < found->begin || begin >= found->end) {
    found = std::upper_bound(ranges, range_end, begin,
                             [](uint64_t address, const Range& r) { return address < r.begin; });
    if (found != ranges) --found;
    last_range = found;
  }
  const char* verb = is_write ? "writes" : "reads";
  if (found >= range_end || begin < found->begin || end > found->end) {
    const long long past =
        found < range_end && begin >= found->end ? static_cast<long long>(begin - found->end) : -1;
    fail(code, "%s %zu bytes of global memory at %#llx, which is no array of this call%s%lld", verb,
         num_bytes, static_cast<unsigned long long>(begin),
         past < 0 ? "; wanted addresses inside one; code " : "; bytes past the one before: ", past);
  }
  if (is_write && !found->is_writable) {
    fail(code, "writes %zu bytes to an input, %llu bytes from its start", num_bytes,
         static_cast<unsigned long long>(begin - found->begin));
  }
}

// --- what kernels ask of shared memory ---

uint32_t shared_address(const void* pointer) {
  const unsigned char* byte = static_cast<const unsigned char*>(pointer);
  if (byte < shared_window.begin || byte >= shared_window.begin + shared_window.bytes) {
    fail(EMULATOR_CALLER, "an address that is not in shared memory is taken for one that is");
  }
  return static_cast<uint32_t>(byte - shared_window.begin);
}

void store_shared_16(uint32_t destination, Words4 value) {
  check_shared(destination, 16, 16, EMULATOR_CALLER);
  write_shared(destination, 16, false, EMULATOR_CALLER);
  memcpy(shared_window.begin + destination, value.word, 16);
}

uint32_t atomic_or_shared(uint32_t* word, uint32_t bits) {
  const uint32_t offset = shared_address(word);
  check_shared(offset, 4, 4, EMULATOR_CALLER);
  write_shared(offset, 4, true, EMULATOR_CALLER);
  const uint32_t old = *word;
  *word |= bits;
  return old;
}

uint32_t atomic_add_shared(uint32_t* word, uint32_t addend) {
  const uint32_t offset = shared_address(word);
  check_shared(offset, 4, 4, EMULATOR_CALLER);
  write_shared(offset, 4, true, EMULATOR_CALLER);
  const uint32_t old = *word;
  *word += addend;
  return old;
}

void cp_async(uint32_t destination, const void* source, int num_bytes, int num_read) {
  check_shared(destination, num_bytes, num_bytes, EMULATOR_CALLER);
  Copy copy{destination, num_bytes, {}};
  if (num_read > 0) {
    if (reinterpret_cast<uintptr_t>(source) % num_bytes != 0) {
      fail(EMULATOR_CALLER, "misaligned: copies %d bytes from global address %p", num_bytes,
           source);
    }
    check_global(source, num_read, false, EMULATOR_CALLER);
    memcpy(copy.bytes, source, num_read);
  }
  start_copy(destination, num_bytes, EMULATOR_CALLER);
  copies[machine.current->index].started.push_back(copy);
}

void cp_async_commit() {
  Copies& own = copies[machine.current->index];
  own.groups.push_back(own.started.size());
}

void cp_async_wait_group(int pending) {
  Copies& own = copies[machine.current->index];
  if (own.groups.size() <= static_cast<size_t>(pending)) return;
  const size_t landed = own.groups.size() - pending;
  const size_t count = own.groups[landed - 1];
  for (size_t i = 0; i < count; ++i) {
    const Copy& copy = own.started[i];
    land_copy(copy.offset, copy.num_bytes, EMULATOR_CALLER);
    memcpy(shared_window.begin + copy.offset, copy.bytes, copy.num_bytes);
  }
  own.started.erase(own.started.begin(), own.started.begin() + count);
  own.groups.erase(own.groups.begin(), own.groups.begin() + landed);
  for (size_t& end : own.groups) end -= count;
}

std::vector<Copy> take_copies() {
  Copies& own = copies[machine.current->index];
  own.groups.clear();
  return std::exchange(own.started, {});
}

uint32_t atomic_inc_wrap(uint32_t* counter, uint32_t last) {
  check_global(counter, 4, true, EMULATOR_CALLER);
  const uint32_t old = *counter;
  *counter = old >= last ? 0 : old + 1;
  return old;
}

void atomic_add(uint32_t* counter, uint32_t addend) {
  check_global(counter, 4, true, EMULATOR_CALLER);
  *counter += addend;
}

float load_l2(const float* pointer) {
  check_global(pointer, 4, false, EMULATOR_CALLER);
  return *pointer;
}

Floats4 load_l2_16(const void* pointer) {
  check_global(pointer, 16, false, EMULATOR_CALLER);
  if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) {
    fail(EMULATOR_CALLER, "misaligned: loads 16 bytes from global address %p", pointer);
  }
  Floats4 loaded;
  memcpy(loaded.value, pointer, 16);
  return loaded;
}

namespace {

void check_whole(const void* pointer, bool is_write, void* caller) {
  check_global(pointer, 16, is_write, caller);
  if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) {
    fail(caller, "misaligned: 16 bytes as a whole at global address %p", pointer);
  }
}

}  // namespace

// The host moves eight bytes as a whole. The last word of the sixteen says whether they are there,
// so its half is stored last and loaded first.
void store_whole(void* pointer, Words4 value) {
  check_whole(pointer, true, EMULATOR_CALLER);
  uint64_t halves[2];
  memcpy(halves, value.word, 16);
  __atomic_store_n(static_cast<uint64_t*>(pointer), halves[0], __ATOMIC_RELAXED);
  __atomic_store_n(static_cast<uint64_t*>(pointer) + 1, halves[1], __ATOMIC_RELEASE);
}

Words4 load_whole(const void* pointer) {
  check_whole(pointer, false, EMULATOR_CALLER);
  // Who waits for words of another rank looks again and again: others of its block do the same
  // meanwhile, and so do other ranks.
  give_way();
  sched_yield();
  uint64_t halves[2];
  halves[1] = __atomic_load_n(static_cast<const uint64_t*>(pointer) + 1, __ATOMIC_ACQUIRE);
  halves[0] = __atomic_load_n(static_cast<const uint64_t*>(pointer), __ATOMIC_RELAXED);
  Words4 loaded;
  memcpy(loaded.word, halves, 16);
  return loaded;
}

uint64_t global_timer() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace emulator
