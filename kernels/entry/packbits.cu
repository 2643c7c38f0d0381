// Packs bytes into bits, 1 for any nonzero byte; segments start on byte boundaries.
#include "cupyattn/params/packbits.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  static constexpr int kThreads = 256;
};
#endif

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    cupyattn_packbits(const __grid_constant__ cupyattn::PackbitsParams params) {
  using cupyattn::int64_t;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * Config::kThreads + threadIdx.x;
  if (index >= params.num_packed) return;

  // Find the segment of this byte, then the bits it holds.
  int64_t first, end;
  if (params.packed_indptr == nullptr) {
    const int64_t length = params.num_bits / params.num_segments;
    const int64_t bytes = params.num_packed / params.num_segments;
    const int64_t segment = index / bytes;
    first = segment * length + 8 * (index - segment * bytes);  // mutate: bool-rows-share-bytes
    end = (segment + 1) * length;
  } else {
    int low = 0, high = params.num_segments;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      // mutate: byte-of-last-segment
      (params.packed_indptr[middle] <= index ? low : high) = middle;
    }
    first = params.bit_indptr[low] + 8 * (index - params.packed_indptr[low]);
    end = params.bit_indptr[low + 1];
  }
  const int count = static_cast<int>(end - first < 8 ? end - first : 8);
  int64_t row = first / params.row_length;
  int64_t column = first % params.row_length;
  unsigned int byte = 0;
  for (int bit = 0; bit < count; ++bit) {
    const unsigned int value = params.bits[row * params.row_stride + column] != 0;
    byte |= value << (params.little_endian ? bit : 7 - bit);  // mutate: bit-order-inverted
    if (++column == params.row_length) {
      column = 0;
      ++row;
    }
  }
  params.packed[index] = static_cast<unsigned char>(byte);
}
