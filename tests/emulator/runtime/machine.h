// The machine that runs a launch: blocks one after another, their threads as fibers, and the state
// that warps and blocks share. One launch at a time, on the system thread that asks for it.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

#include "emulator/cuda.h"
#include "emulator/device.h"
#include "fiber.h"

namespace emulator {

constexpr int kLanes = 32;
constexpr int kMaxThreads = 1024;
constexpr int kMaxWarps = kMaxThreads / kLanes;
constexpr int kNumBarriers = 16;
constexpr int kMaxSharedBytes = 227 * 1024;

// A stretch of global memory that the kernel may touch. The launcher sorts them by address.
struct Range {
  uint64_t begin, end;
  uint64_t is_writable;
};

struct LaunchRequest {
  const void* params;
  uint32_t grid[3], block[3];
  uint32_t shared_bytes;
  uint32_t num_ranges;
  const Range* ranges;
  const Range* guards;  // memory around those that nothing else lies in
  uint64_t num_guards;
  uint64_t seed;     // 0: blocks, warps and lanes in order
  uint64_t cluster;  // blocks of a cluster, along x
};

// What went wrong, and where: offsets are addresses in this library, for addr2line; 0: none.
struct Report {
  char message[2048];
  uint64_t code_offset, other_code_offset;
  uint64_t callers[8];  // of the function of code_offset, innermost first
  uint32_t block[3];
  int32_t thread;  // -1: no single one
};

enum class State : uint8_t { ready, waits_for_warp, waits_for_block, waits_for_cluster, over };

struct Thread {
  Fiber fiber;
  State state = State::over;
  int index = 0;
  Where where;  // of what it waits for
  void* code = nullptr;
};

// What the lanes of a warp do together, once all have come. `arguments[lane]` are in and out.
struct Warp;
using Collective = void (*)(Warp& warp);

struct Warp {
  int index = 0;
  uint32_t ready = 0;  // lanes that can run
  uint32_t arrived = 0;
  Collective collective = nullptr;
  Where where;
  void* arguments[kLanes];
  int barrier_lanes = 0;  // that have come to the barrier of `barrier_where`
  Where barrier_where;
  // Happens-before. clock[w] of another warp: its accesses before that time are visible here. Its
  // own clock counts its synchronisations.
  uint32_t clock[kMaxWarps];
};

// How a thread comes to a barrier: it waits where all others do that wait, or anywhere, or it only
// arrives.
enum class Meeting { aligned, unaligned, arrives };

struct Barrier {
  int expected = 0, arrived = 0;
  int num_waiting = 0;
  bool is_aligned = false;  // of the first that waits, as the next
  Where where;
  bool any = false, result = false;
  uint32_t waiting[kMaxWarps] = {};  // lanes
  bool joins[kMaxWarps] = {};
};

struct Machine {
  LaunchRequest request;
  Report* report = nullptr;
  const char* kernel = "";
  int num_threads = 0, num_warps = 0;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Barrier barriers[kNumBarriers];
  Thread* current = nullptr;
  Fiber main;
  int num_over = 0;
  int num_waiting = 0;  // threads that wait for their cluster
  bool has_failed = false;
  uint64_t random = 0;

  Warp& warp() { return warps[current->index / kLanes]; }
  int lane() const { return current->index % kLanes; }
};

extern Machine machine;

// Ends the launch with a message; `code` is the return address of who is to blame.
[[noreturn]] void fail(void* code, const char* format, ...) __attribute__((format(printf, 2, 3)));
[[noreturn]] void fail_with(void* code, uint64_t other_code_offset, const char* format, ...)
    __attribute__((format(printf, 3, 4)));
uint64_t code_offset(const void* code);

// Gives way to other threads until somebody wakes this one.
void stop(State state, Where where, void* code);
void wake(Warp& warp, uint32_t lanes);
// Lets the other threads that can run go on first.
void give_way();
void make_stacks(int count);
void release_stacks();
void begin_block(uint3 index);
// Runs the block that the machine holds, until all its threads are over or wait for their cluster.
void run_threads();
// What each warp did before is before what any does next.
void join_clocks(const bool (&joins)[kMaxWarps], const bool (&learns)[kMaxWarps]);
uint64_t next_random();

// --- cluster.cpp ---
// Runs the blocks whose places along x begin with that of `first`.
void run_cluster(uint3 first);

// --- hopper.cpp ---
void begin_hopper();

// --- memory.cpp ---
struct SharedWindow {
  unsigned char* begin = nullptr;
  size_t bytes = 0;
};
extern SharedWindow shared_window;
void find_segments();
void begin_shared_memory();
// Between launches a library holds little: a test process has hundreds of them.
void end_shared_memory();
// A launch has ranges of its own.
void begin_global_memory();
void check_global(const void* pointer, size_t num_bytes, bool is_write, void* code);
// An access by the present thread; by the whole warp, if `is_warps`.
void read_shared(uint32_t offset, int num_bytes, bool is_warps, void* code);
void write_shared(uint32_t offset, int num_bytes, bool is_atomic, void* code);
void start_copy(uint32_t offset, int num_bytes, void* code);
void land_copy(uint32_t offset, int num_bytes, void* code);
void land_shared_copy(uint32_t offset, int num_bytes, void* code);
void check_shared(uint32_t offset, int num_bytes, int alignment, void* code);
// A copy by cp.async. Those of this thread in flight become the caller's to land.
struct Copy {
  uint32_t offset;
  int num_bytes;
  unsigned char bytes[16];
};
std::vector<Copy> take_copies();
// A thread's copies in flight are forgotten when a block begins.
void begin_copies();
// What is known of a block's shared memory: one entry a byte of the window. 0 is "never", for clocks
// start at 1.
struct Shadow {
  std::vector<uint16_t> copying;  // thread + 1
  std::vector<uint32_t> written, written_by_code, read_by_code;
  std::vector<uint32_t> read[kMaxWarps];
  std::vector<uint32_t> read_last[kMaxWarps];  // the latest of each line of bytes
  std::vector<uint32_t> read_by_others;  // the phase of the cluster, + 1
};
struct Copies {
  std::vector<Copy> started;
  std::vector<size_t> groups;  // the end of each in `started`
};
extern Shadow shadow;
extern std::vector<Copies> copies;
// How often the cluster of the present block has met.
extern uint32_t cluster_phase;
// The time and the thread of a write.
uint32_t write_time(uint32_t record);
int writing_thread(uint32_t record);
bool is_module_data(uintptr_t address);

}  // namespace emulator

#define EMULATOR_CALLER __builtin_return_address(0)
