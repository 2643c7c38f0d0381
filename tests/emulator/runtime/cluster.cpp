// Clusters: one block of a cluster runs at a time, until all its threads wait for the others. What
// the machine knows of a block that waits is kept here, its shared memory too.
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "machine.h"

namespace emulator {

namespace {

struct Block {
  uint3 index;
  bool has_begun = false, is_over = false;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Barrier barriers[kNumBarriers];
  int num_over = 0;
  std::vector<unsigned char> bytes;
  Shadow shadow;
  std::vector<Copies> copies;
  uint32_t phase_began[kMaxWarps] = {};  // each warp's clock when the cluster met last
};

std::vector<Block> blocks;
int present = 0;

// Puts a block into the machine, or takes it out.
void exchange(Block& block) {
  std::swap(machine.threads, block.threads);
  std::swap(machine.warps, block.warps);
  std::swap(machine.barriers, block.barriers);
  std::swap(machine.num_over, block.num_over);
  std::swap(shadow, block.shadow);
  std::swap(copies, block.copies);
  block.bytes.resize(shared_window.bytes);
  std::swap_ranges(block.bytes.begin(), block.bytes.end(), shared_window.begin);
}

// All threads of the cluster have come: what each did before is before what any does next.
void meet(Block& block) {
  bool all[kMaxWarps];
  std::fill(all, all + kMaxWarps, true);
  std::swap(machine.warps, block.warps);
  join_clocks(all, all);
  for (const Warp& warp : machine.warps) {
    block.phase_began[warp.index] = warp.clock[warp.index];
  }
  std::swap(machine.warps, block.warps);
}

void run(Block& block) {
  exchange(block);
  if (block.has_begun) {
    blockIdx = block.index;
    machine.num_waiting = 0;
    for (Warp& warp : machine.warps) wake(warp, ~0u);
  } else {
    make_stacks(machine.num_threads);
    machine.warps.resize(machine.num_warps);
    begin_block(block.index);
    block.has_begun = true;
  }
  run_threads();
  block.is_over = machine.num_over == machine.num_threads;
  exchange(block);
}

void release(Block& block) {
  std::swap(machine.threads, block.threads);
  release_stacks();
  std::swap(machine.threads, block.threads);
}

// The block of a rank, whose shared memory is not in the window unless it is the present one.
Block& block_of(int rank, void* code) {
  if (rank < 0 || rank >= static_cast<int>(blocks.size())) {
    fail(code, "block %d of a cluster of %zu", rank, blocks.size());
  }
  Block& block = blocks[rank];
  if (!block.has_begun || block.is_over) {
    fail(code, "shared memory of block %d of the cluster, which %s", rank,
         block.is_over ? "has ended" : "has not begun");
  }
  return block;
}

}  // namespace

void run_cluster(uint3 first) {
  const int size = static_cast<int>(machine.request.cluster);
  cluster_phase = 0;
  if (size == 1) {
    begin_block(first);
    run_threads();
    return;
  }
  blocks.clear();
  blocks.resize(size);
  std::vector<int> order(size);
  std::iota(order.begin(), order.end(), 0);
  for (int rank : order) blocks[rank].index = uint3{first.x + rank, first.y, first.z};
  const auto ended = [](const Block& block) { return block.is_over; };
  while (!machine.has_failed && !std::all_of(blocks.begin(), blocks.end(), ended)) {
    if (machine.request.seed != 0) {
      for (int i = size; i > 1; --i) std::swap(order[i - 1], order[next_random() % i]);
    }
    for (int rank : order) {
      present = rank;
      if (!machine.has_failed) run(blocks[rank]);
    }
    const auto count = std::count_if(blocks.begin(), blocks.end(), ended);
    if (!machine.has_failed && count != 0 && count != size) {
      snprintf(machine.report->message, sizeof machine.report->message,
               "%d blocks of a cluster wait for others, which have ended",
               size - static_cast<int>(count));
      machine.has_failed = true;
    }
    if (machine.has_failed) break;
    for (Block& block : blocks) meet(block);
    ++cluster_phase;
  }
  for (Block& block : blocks) release(block);
  blocks.clear();
}

// --- what kernels ask of clusters ---

int cluster_size() { return static_cast<int>(machine.request.cluster); }
int cluster_rank() { return static_cast<int>(blockIdx.x % machine.request.cluster); }
int cluster_index() { return static_cast<int>(blockIdx.x / machine.request.cluster); }

// A thread arrives and waits in one, for nobody is told before all wait.
void cluster_wait(Where where) {
  if (machine.request.cluster == 1) {
    block_sync(where);
    return;
  }
  ++machine.num_waiting;
  stop(State::waits_for_cluster, where, EMULATOR_CALLER);
}

Floats4 load_cluster(uint32_t address, int rank, int num_bytes) {
  check_shared(address, num_bytes, num_bytes, EMULATOR_CALLER);
  Floats4 loaded{};
  if (machine.request.cluster == 1 || rank == present) {
    read_shared(address, num_bytes, false, EMULATOR_CALLER);
    memcpy(loaded.value, shared_window.begin + address, num_bytes);
    return loaded;
  }
  Block& block = block_of(rank, EMULATOR_CALLER);
  for (uint32_t i = address; EMULATOR_CHECKED && i < address + num_bytes; ++i) {
    const uint32_t record = block.shadow.written[i];
    const int warp = writing_thread(record) / kLanes;
    if (record == 0 || block.shadow.copying[i] != 0) {
      fail(EMULATOR_CALLER, "reads byte %u of block %d of the cluster, which was never written", i,
           rank);
    }
    if (write_time(record) >= block.phase_began[warp] + (block.phase_began[warp] == 0)) {
      fail_with(EMULATOR_CALLER, block.shadow.written_by_code[i],
                "reads byte %u of block %d of the cluster, written since the cluster met", i, rank);
    }
    block.shadow.read_by_others[i] = cluster_phase + 1;
  }
  memcpy(loaded.value, block.bytes.data() + address, num_bytes);
  return loaded;
}

}  // namespace emulator
