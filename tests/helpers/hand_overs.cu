// Threads hand numbers over to others by an mbarrier, as in prefill_sm90: can racecheck judge it?
#include "cupyattn/ptx/cp_async.cuh"
#include "cupyattn/ptx/mbarrier.cuh"

namespace cupyattn {

// Threads 0 to 63 write, 64 to 127 read. kOneArrives: after a barrier of theirs, for all who write.
// kIsEarly: they write once more after they have arrived, which is wrong.
template <bool kOneArrives, bool kIsEarly>
__device__ void hand_over(int* out, int count) {
  __shared__ int numbers[64];
  __shared__ uint64_t barriers[2];
  const uint32_t full = ptx::shared_address(&barriers[0]);
  const uint32_t empty = ptx::shared_address(&barriers[1]);
  const int thread = threadIdx.x;
  if (thread == 0) {
    ptx::mbarrier_init(full, kOneArrives ? 1 : 64);
    ptx::mbarrier_init(empty, 64);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  int sum = 0;
  for (int i = 0; i < count; ++i) {
    if (thread < 64) {
      ptx::mbarrier_wait_parity(empty, i % 2 ^ 1);
      numbers[thread] = i + thread;
      if (kOneArrives) ptx::named_barrier_sync(1, 64);
      if (thread == 0 || !kOneArrives) ptx::mbarrier_arrive(full);
      if (kIsEarly) numbers[thread] = i - thread;
    } else {
      ptx::mbarrier_wait_parity(full, i % 2);
      sum += numbers[127 - thread];
      ptx::mbarrier_arrive(empty);
    }
  }
  if (thread >= 64) out[thread] = sum;
}

// A warp copies and its copies arrive; two warps read first, and one of their threads arrives for them
// after a barrier of theirs, or, if kAllSweep, each; the last warp reads and says that all is free.
template <bool kAllSweep>
__device__ void hand_over_copies(const int* in, int* out, int count) {
  __shared__ int numbers[64];
  __shared__ uint64_t barriers[3];
  const uint32_t unchecked = ptx::shared_address(&barriers[0]);
  const uint32_t full = ptx::shared_address(&barriers[1]);
  const uint32_t empty = ptx::shared_address(&barriers[2]);
  const int thread = threadIdx.x;
  if (thread == 0) {
    ptx::mbarrier_init(unchecked, 32);
    ptx::mbarrier_init(full, kAllSweep ? 64 : 1);
    ptx::mbarrier_init(empty, 32);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  int sum = 0;
  for (int i = 0; i < count; ++i) {
    if (thread < 32) {
      ptx::mbarrier_wait_parity(empty, i % 2 ^ 1);
      ptx::cp_async_4(ptx::shared_address(&numbers[thread]), in + thread, true);
      ptx::cp_async_4(ptx::shared_address(&numbers[32 + thread]), in + 32 + thread, true);
      ptx::cp_async_mbarrier_arrive_noinc(unchecked);
    } else if (thread < 96) {
      ptx::mbarrier_wait_parity(unchecked, i % 2);
      sum += numbers[95 - thread];
      if (!kAllSweep) ptx::named_barrier_sync(1, 64);
      if (thread == 32 || kAllSweep) ptx::mbarrier_arrive(full);
    } else {
      ptx::mbarrier_wait_parity(full, i % 2);
      sum += numbers[thread - 96] + numbers[thread - 64];
      ptx::mbarrier_arrive(empty);
    }
  }
  if (thread >= 64) out[thread] = sum;
}

extern "C" __global__ void cupyattn_all_arrive(int* out, int count) {
  hand_over<false, false>(out, count);
}

extern "C" __global__ void cupyattn_one_arrives(int* out, int count) {
  hand_over<true, false>(out, count);
}

extern "C" __global__ void cupyattn_copies_arrive(int* out, int count) {
  hand_over_copies<true>(out, out, count);
}

extern "C" __global__ void cupyattn_one_arrives_for_readers(int* out, int count) {
  hand_over_copies<false>(out, out, count);
}

extern "C" __global__ void cupyattn_arrive_early(int* out, int count) {
  hand_over<false, true>(out, count);
}

}  // namespace cupyattn
