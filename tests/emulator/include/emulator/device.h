// What a kernel's threads may ask of the emulator: the operations behind the twins of ptx/*.cuh.
// Arguments and results go by value: a local variable whose address escapes would live in memory.
#pragma once

#include <stdint.h>

#include <source_location>

namespace emulator {

// The line of a kernel that called a twin: lanes of a warp must meet on the same one.
using Where = std::source_location;

struct Words4 {
  uint32_t word[4];
};
struct Floats4 {
  float value[4];
};

// --- shared memory; addresses count from its start, as the device's do ---
uint32_t shared_address(const void* pointer);
void store_shared_16(uint32_t destination, Words4 value);
uint32_t atomic_or_shared(uint32_t* word, uint32_t bits);
uint32_t atomic_add_shared(uint32_t* word, uint32_t addend);
Words4 ldmatrix_x4(uint32_t address, bool is_transposed, Where where);
void stmatrix_x4(uint32_t address, Words4 fragment, bool transposed, Where where);

// --- asynchronous copies: data lands at the wait of the thread that started them ---
// Copies so many bytes, of which it reads the first `num_read`; the others are zeros.
void cp_async(uint32_t destination, const void* source, int num_bytes, int num_read);
void cp_async_commit();
void cp_async_wait_group(int pending);

// --- a whole warp ---
Floats4 mma_m16n8k16(Floats4 c, Words4 a, uint32_t b0, uint32_t b1, bool is_bfloat16, Where where);
float shuffle(float value, int source_lane, Where where);
float shuffle_xor(float value, int lane_mask, Where where);
int shuffle_int(int value, int source_lane, Where where);
uint32_t warp_sum(uint32_t value, Where where);
uint32_t warp_max(uint32_t value, Where where);
bool warp_any(bool predicate, Where where);
void warp_sync(Where where);

// --- a whole block ---
void block_sync(Where where);
bool block_any(bool predicate, Where where);
// bar.sync and bar.arrive of `num_threads` threads, whole warps, on barriers 1 to 15.
void named_barrier_sync(int barrier, int num_threads, Where where);
void named_barrier_sync_unaligned(int barrier, int num_threads, Where where);
bool named_barrier_any(int barrier, int num_threads, bool predicate, Where where);
void named_barrier_arrive(int barrier, int num_threads, Where where);

// --- a cluster of blocks ---
int cluster_size();
int cluster_rank();
int cluster_index();
void cluster_wait(Where where);
Floats4 load_cluster(uint32_t address, int rank, int num_bytes);

// --- global memory ---
uint32_t atomic_inc_wrap(uint32_t* counter, uint32_t last);
void atomic_add(uint32_t* counter, uint32_t addend);
float load_l2(const float* pointer);
Floats4 load_l2_16(const void* pointer);

// --- memory of several ranks, which are threads of the system; a load lets others go on ---
void store_whole(void* pointer, Words4 value);
Words4 load_whole(const void* pointer);
uint64_t global_timer();

}  // namespace emulator
