// Brings the tables of a plan to the host, checked, and plans a decode by them.
#include "cupyattn/plan/read_tables.cuh"

#ifndef CUPYATTN_CONFIG
struct Config {
  static constexpr int kThreads = 512;
};
#endif

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1)
    cupyattn_read_tables(const __grid_constant__ cupyattn::ReadTablesParams params) {
  using Kernel = cupyattn::ReadTables<Config>;
  __shared__ typename Kernel::SharedMemory shared;
  Kernel(params, shared).run();
}
