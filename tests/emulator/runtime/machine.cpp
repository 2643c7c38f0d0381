// Runs launches: starts blocks, switches between their threads, and notices when none can go on.
#include "machine.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <numeric>

#include "emulator/cuda.h"

uint3 threadIdx, blockIdx, blockDim, gridDim;

extern "C" void emulator_call_kernel(const void* params);
extern "C" const char* emulator_kernel_name();

namespace emulator {

Machine machine;

uint64_t next_random() {
  machine.random ^= machine.random << 13;
  machine.random ^= machine.random >> 7;
  machine.random ^= machine.random << 17;
  return machine.random;
}

namespace {

constexpr size_t kStackBytes = EMULATOR_STACK_BYTES;

// The lane to run next of those that are ready: the lowest, or with a seed any.
int choose_lane(uint32_t ready) {
  if (machine.request.seed == 0) return __builtin_ctz(ready);
  const int turn = static_cast<int>(next_random() % kLanes);
  const uint32_t turned = ready >> turn | (turn == 0 ? 0u : ready << (kLanes - turn));
  return (__builtin_ctz(turned) + turn) % kLanes;
}

// The thread to run next, or null. A warp goes on for as long as it can; with a seed another one
// may come in between at any point where a thread stops.
Thread* choose_thread(int warp) {
  const bool moves = machine.request.seed != 0 && next_random() % 16 == 0;
  const int first = moves ? static_cast<int>(next_random() % machine.num_warps) : warp;
  for (int i = 0; i < machine.num_warps; ++i) {
    Warp& candidate = machine.warps[(first + i) % machine.num_warps];
    if (candidate.ready != 0) {
      return &machine.threads[candidate.index * kLanes + choose_lane(candidate.ready)];
    }
  }
  return nullptr;
}

void enter(Thread& thread) {
  machine.current = &thread;
  const unsigned int index = static_cast<unsigned int>(thread.index);
  threadIdx.x = index % blockDim.x;
  threadIdx.y = index / blockDim.x % blockDim.y;
  threadIdx.z = index / blockDim.x / blockDim.y;
}

const char* base_name(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash == nullptr ? path : slash + 1;
}

bool is_same_place(const Where& a, const Where& b) {
  return a.line() == b.line() && a.column() == b.column() && a.file_name() == b.file_name() &&
         a.function_name() == b.function_name();
}

[[noreturn]] void fail_stuck() {
  char text[1500];
  int length = 0, shown = 0, first = -1;
  const Thread* previous = nullptr;
  for (const Thread& thread : machine.threads) {
    if (thread.index >= machine.num_threads) break;
    const bool is_same =
        previous != nullptr && previous->state == thread.state &&
        (thread.state == State::over || is_same_place(previous->where, thread.where));
    previous = &thread;
    if (is_same) continue;
    if (thread.state != State::over && first < 0) first = thread.index;
    if (++shown > 12) continue;
    if (thread.state == State::over) {
      length += snprintf(text + length, sizeof text - length, "\n  from thread %d on: has returned",
                         thread.index);
    } else {
      length += snprintf(
          text + length, sizeof text - length, "\n  from thread %d on: %s at %s:%u", thread.index,
          thread.state == State::waits_for_warp    ? "waits for its warp"
          : thread.state == State::waits_for_block ? "waits for a barrier"
                                                   : "waits for its cluster",
          base_name(thread.where.file_name()), thread.where.line());
    }
  }
  machine.current = &machine.threads[first];
  fail(machine.current->code, "no thread can go on; some wait for others that will not come:%s",
       text);
}

// Gives the processor to whoever can go on; returns when this thread can.
void leave(bool is_over) {
  Thread& self = *machine.current;
  Thread* next = choose_thread(self.index / kLanes);
  if (next == &self) return;
  const bool is_done = std::max(machine.num_over, machine.num_waiting) == machine.num_threads;
  if (next == nullptr && !is_done) fail_stuck();
  if (next == nullptr) {
    switch_fiber(self.fiber, machine.main, is_over);
  } else {
    enter(*next);
    switch_fiber(self.fiber, next->fiber, is_over);
  }
}

void thread_main() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
  emulator_call_kernel(machine.request.params);
  Thread& self = *machine.current;
  self.state = State::over;
  machine.warp().ready &= ~(1u << machine.lane());
  ++machine.num_over;
  leave(true);
  __builtin_unreachable();
}

}  // namespace

void stop(State state, Where where, void* code) {
  Thread& self = *machine.current;
  self.state = state;
  self.where = where;
  self.code = code;
  machine.warp().ready &= ~(1u << machine.lane());
  leave(false);
}

void wake(Warp& warp, uint32_t lanes) {
  warp.ready |= lanes;
  for (int lane = 0; lane < kLanes; ++lane) {
    if ((lanes >> lane) & 1) machine.threads[warp.index * kLanes + lane].state = State::ready;
  }
}

void give_way() {
  Thread& self = *machine.current;
  for (int i = 1; i < machine.num_threads; ++i) {
    Thread& other = machine.threads[(self.index + i) % machine.num_threads];
    if (other.state != State::ready) continue;
    enter(other);
    switch_fiber(self.fiber, other.fiber, false);
    return;
  }
}

void make_stacks(int count) {
  const size_t old = machine.threads.size();
  if (old >= static_cast<size_t>(count)) return;
  machine.threads.resize(count);
  for (size_t i = old; i < machine.threads.size(); ++i) {
    Thread& thread = machine.threads[i];
    thread.index = static_cast<int>(i);
    thread.fiber.stack_bytes = kStackBytes;
    thread.fiber.stack =
        static_cast<char*>(mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (thread.fiber.stack == MAP_FAILED) {
      perror("the stack of an emulated thread");
      abort();
    }
    // The lowest page catches a stack that is too short.
    mprotect(thread.fiber.stack, 4096, PROT_NONE);
  }
}

void release_stacks() {
  for (const Thread& thread : machine.threads) {
    munmap(thread.fiber.stack, thread.fiber.stack_bytes);
  }
  machine.threads.clear();
}

void begin_block(uint3 index) {
  blockIdx = index;
  begin_shared_memory();
  begin_copies();
  begin_hopper();
  for (Barrier& barrier : machine.barriers) barrier = Barrier{};
  for (int w = 0; w < machine.num_warps; ++w) {
    Warp& warp = machine.warps[w];
    warp = Warp{};
    warp.index = w;
    warp.ready = ~0u;
    // Time starts at 1: 0 in the records of memory is "never".
    for (int other = 0; other < kMaxWarps; ++other) warp.clock[other] = other == w ? 1 : 0;
  }
  for (int t = 0; t < machine.num_threads; ++t) {
    machine.threads[t].state = State::ready;
    prepare(machine.threads[t].fiber, thread_main);
  }
  machine.num_over = machine.num_waiting = 0;
}

void run_threads() {
  Thread* first = choose_thread(0);
  enter(*first);
  switch_fiber(machine.main, first->fiber, false);
}

namespace {

void poison_guards([[maybe_unused]] bool is_poison) {
#if defined(__SANITIZE_ADDRESS__)
  for (uint64_t i = 0; i < machine.request.num_guards; ++i) {
    const Range& guard = machine.request.guards[i];
    const void* begin = reinterpret_cast<const void*>(guard.begin);
    if (is_poison) {
      __asan_poison_memory_region(begin, guard.end - guard.begin);
    } else {
      __asan_unpoison_memory_region(begin, guard.end - guard.begin);
    }
  }
#endif
}

// Follows frame pointers up the present fiber's stack, from the frame that returns to `code` on.
void find_callers(void* code, uint64_t (&callers)[8]) {
  const Fiber& fiber = machine.current->fiber;
  const auto is_inside = [&](void** frame) {
    const uintptr_t offset = reinterpret_cast<char*>(frame) - fiber.stack;
    return offset < fiber.stack_bytes - 2 * sizeof(void*) && offset % sizeof(void*) == 0;
  };
  int count = -1;
  void** frame = static_cast<void**>(__builtin_frame_address(0));
  while (is_inside(frame) && count < 8 && frame[1] != nullptr) {
    if (count >= 0) callers[count] = code_offset(frame[1]);
    if (count >= 0 || frame[1] == code) ++count;
    void** next = static_cast<void**>(frame[0]);
    if (next <= frame) break;
    frame = next;
  }
}

[[noreturn]] void fail_v(void* code, uint64_t other, const char* format, va_list arguments) {
  Report& report = *machine.report;
  vsnprintf(report.message, sizeof report.message, format, arguments);
  report.code_offset = code_offset(code);
  report.other_code_offset = other;
  find_callers(code, report.callers);
  report.block[0] = blockIdx.x;
  report.block[1] = blockIdx.y;
  report.block[2] = blockIdx.z;
  report.thread = machine.current->index;
  machine.has_failed = true;
  // The fibers' stacks are left as they are: nothing on them needs to be undone.
  switch_fiber(machine.current->fiber, machine.main, true);
  __builtin_unreachable();
}

}  // namespace

void fail(void* code, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fail_v(code, 0, format, arguments);
}

void fail_with(void* code, uint64_t other_code_offset, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fail_v(code, other_code_offset, format, arguments);
}

// --- meeting points ---

void join_clocks(const bool (&joins)[kMaxWarps], const bool (&learns)[kMaxWarps]) {
  uint32_t joined[kMaxWarps] = {};
  for (int w = 0; w < machine.num_warps; ++w) {
    if (!joins[w]) continue;
    ++machine.warps[w].clock[w];
    for (int u = 0; u < machine.num_warps; ++u) {
      joined[u] = std::max(joined[u], machine.warps[w].clock[u]);
    }
  }
  for (int w = 0; w < machine.num_warps; ++w) {
    if (learns[w]) memcpy(machine.warps[w].clock, joined, sizeof joined);
  }
}

void meet_warp(Collective collective, void* arguments, Where where, void* code) {
  Warp& warp = machine.warp();
  if (warp.arrived == 0) {
    warp.collective = collective;
    warp.where = where;
  } else if (warp.collective != collective || !is_same_place(warp.where, where)) {
    fail(code, "lanes of a warp have parted: this one is at %s:%u, lanes %#x wait at %s:%u",
         base_name(where.file_name()), where.line(), warp.arrived,
         base_name(warp.where.file_name()), warp.where.line());
  }
  warp.arguments[machine.lane()] = arguments;
  warp.arrived |= 1u << machine.lane();
  if (warp.arrived != ~0u) {
    stop(State::waits_for_warp, where, code);
    return;
  }
  warp.arrived = 0;
  collective(warp);
  wake(warp, ~0u);
}

namespace {

// All of the barrier's warps have come.
void complete(Barrier& barrier) {
  bool learns[kMaxWarps];
  for (int w = 0; w < kMaxWarps; ++w) learns[w] = barrier.waiting[w] != 0;
  join_clocks(barrier.joins, learns);
  barrier.result = barrier.any;
  for (int w = 0; w < machine.num_warps; ++w) {
    if (barrier.waiting[w] != 0) wake(machine.warps[w], barrier.waiting[w]);
    barrier.waiting[w] = 0;
    barrier.joins[w] = false;
  }
  barrier.arrived = 0;
  barrier.num_waiting = 0;
  barrier.any = false;
}

// Aligned threads wait at the same instruction, so a barrier that has one has no others.
void check_place(Barrier& barrier, int index, Meeting how, Where where, void* code) {
  const bool is_aligned = how == Meeting::aligned;
  if (barrier.num_waiting++ == 0) {
    barrier.is_aligned = is_aligned;
    barrier.where = where;
  } else if ((is_aligned || barrier.is_aligned) && !is_same_place(barrier.where, where)) {
    fail(code, "barrier %d is waited for at different places: %s:%u and %s:%u", index,
         base_name(where.file_name()), where.line(), base_name(barrier.where.file_name()),
         barrier.where.line());
  }
}

}  // namespace

// Arrives at a barrier, and waits there if the thread does. Returns whether any thread that came
// had a true predicate.
bool meet_block(int index, int num_threads, bool predicate, Meeting how, Where where, void* code) {
  Barrier& barrier = machine.barriers[index];
  Warp& warp = machine.warp();
  if (barrier.arrived == 0) barrier.expected = num_threads;
  if (barrier.expected != num_threads) {
    fail(code, "barrier %d is waited for by %d threads here, by %d elsewhere", index, num_threads,
         barrier.expected);
  }
  if (warp.barrier_lanes == 0) {
    warp.barrier_where = where;
  } else if (!is_same_place(warp.barrier_where, where)) {
    fail(code, "lanes of a warp have come to different barriers: %s:%u and %s:%u",
         base_name(where.file_name()), where.line(), base_name(warp.barrier_where.file_name()),
         warp.barrier_where.line());
  }
  warp.barrier_lanes = (warp.barrier_lanes + 1) % kLanes;
  barrier.any |= predicate;
  barrier.joins[warp.index] = true;
  ++barrier.arrived;
  if (how != Meeting::arrives) {
    check_place(barrier, index, how, where, code);
    barrier.waiting[warp.index] |= 1u << machine.lane();
  }
  if (barrier.arrived == barrier.expected) {
    complete(barrier);
    return barrier.result;
  }
  if (how != Meeting::arrives) stop(State::waits_for_block, where, code);
  return barrier.result;
}

}  // namespace emulator

// The launch ahead of one that begins early (library.py): it runs when the first thread waits for
// it, so that what is read sooner is as that launch found it.
struct Previous {
  int (*launch)(const void* request, void* report);
  const void* request;
  void* report;
  int64_t has_failed;
};
extern "C" __attribute__((visibility("default"))) Previous emulator_previous;
Previous emulator_previous{};

extern "C" void emulator_await_previous() {
  const Previous ahead = emulator_previous;
  emulator_previous.launch = nullptr;
  if (ahead.launch != nullptr) {
    emulator_previous.has_failed = ahead.launch(ahead.request, ahead.report);
  }
}

// Runs a launch to its end; 0, or 1 with a report of what is wrong.
extern "C" __attribute__((visibility("default"))) int emulator_launch(
    const emulator::LaunchRequest* request, emulator::Report* report) {
  using namespace emulator;
  machine.request = *request;
  machine.report = report;
  machine.kernel = emulator_kernel_name();
  machine.has_failed = false;
  machine.random = request->seed * 0x9e3779b97f4a7c15ull + 1;
  memset(report, 0, sizeof *report);
  report->thread = -1;
  blockDim = uint3{request->block[0], request->block[1], request->block[2]};
  gridDim = uint3{request->grid[0], request->grid[1], request->grid[2]};
  machine.num_threads = static_cast<int>(blockDim.x * blockDim.y * blockDim.z);
  machine.num_warps = machine.num_threads / kLanes;
  if (machine.num_threads % kLanes != 0 || machine.num_threads > kMaxThreads ||
      machine.num_threads == 0 || request->shared_bytes > kMaxSharedBytes) {
    snprintf(report->message, sizeof report->message,
             "a block of %d threads with %u bytes of shared memory cannot be launched",
             machine.num_threads, request->shared_bytes);
    return 1;
  }
  find_segments();
  begin_global_memory();
  make_stacks(machine.num_threads);
  machine.warps.resize(machine.num_warps);
  const uint32_t cluster = static_cast<uint32_t>(request->cluster), width = gridDim.x / cluster;
  if (gridDim.x % cluster != 0) {
    snprintf(report->message, sizeof report->message,
             "a grid of %u blocks along x cannot be launched in clusters of %u", gridDim.x, cluster);
    return 1;
  }
  std::vector<uint32_t> order(static_cast<size_t>(width) * gridDim.y * gridDim.z);
  std::iota(order.begin(), order.end(), 0u);
  if (request->seed != 0) {
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[next_random() % i]);
  }
  poison_guards(true);
  for (const uint32_t index : order) {
    run_cluster(uint3{cluster * (index % width), index / width % gridDim.y,
                      index / width / gridDim.y});
    if (machine.has_failed) break;
  }
  poison_guards(false);
  end_shared_memory();
  release_stacks();
  return machine.has_failed ? 1 : 0;
}
