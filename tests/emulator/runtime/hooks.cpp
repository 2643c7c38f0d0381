// The calls that a compiler puts before every load and store under -fsanitize=thread, and at every
// mistake it can see under -fsanitize=undefined, answered here instead of by its own libraries.
// So each access of a kernel is checked, by plain C++ too, and the kernel's source stays as it is.
#include <stddef.h>
#include <stdint.h>

#include "machine.h"

namespace emulator {
namespace {

__attribute__((noinline)) void check_elsewhere(uintptr_t address, size_t num_bytes,
                                               size_t alignment, bool is_write, void* code) {
  if (machine.current == nullptr) return;
  const uintptr_t shared = reinterpret_cast<uintptr_t>(shared_window.begin);
  if (address - shared < shared_window.bytes) {
    const uint32_t offset = static_cast<uint32_t>(address - shared);
    const int size = static_cast<int>(num_bytes);
    check_shared(offset, size, static_cast<int>(alignment), code);
    if (is_write) {
      write_shared(offset, size, false, code);
    } else {
      read_shared(offset, size, false, code);
    }
    return;
  }
  if (!is_write && is_module_data(address)) return;
  if (address % alignment != 0) {
    fail(code, "misaligned: %s %zu bytes of global memory at %#zx", is_write ? "writes" : "reads",
         num_bytes, static_cast<size_t>(address));
  }
  check_global(reinterpret_cast<const void*>(address), num_bytes, is_write, code);
}

inline void check(void* pointer, size_t num_bytes, size_t alignment, bool is_write, void* code) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  const Fiber& fiber = machine.current->fiber;
  if (address - reinterpret_cast<uintptr_t>(fiber.stack) < fiber.stack_bytes) return;
  check_elsewhere(address, num_bytes, alignment, is_write, code);
}

}  // namespace
}  // namespace emulator

#define ACCESS(name, size, alignment, is_write)                           \
  extern "C" void __tsan_##name(void* pointer) {                          \
    emulator::check(pointer, size, alignment, is_write, EMULATOR_CALLER); \
  }
#define ACCESSES(size)                         \
  ACCESS(read##size, size, size, false)        \
  ACCESS(write##size, size, size, true)        \
  ACCESS(unaligned_read##size, size, 1, false) \
  ACCESS(unaligned_write##size, size, 1, true)
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)

extern "C" {
void __tsan_read_range(void* pointer, size_t num_bytes) {
  emulator::check(pointer, num_bytes, 1, false, EMULATOR_CALLER);
}
void __tsan_write_range(void* pointer, size_t num_bytes) {
  emulator::check(pointer, num_bytes, 1, true, EMULATOR_CALLER);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}

// Handlers get a description that begins with the place in the source; the code address says more.
#define UNDEFINED(name, what)                                      \
  extern "C" void __ubsan_handle_##name() {                        \
    emulator::fail(EMULATOR_CALLER, "undefined behaviour: " what); \
  }
UNDEFINED(type_mismatch_v1, "a null or misaligned pointer, or one past its object")
UNDEFINED(add_overflow, "a sum overflows")
UNDEFINED(sub_overflow, "a difference overflows")
UNDEFINED(mul_overflow, "a product overflows")
UNDEFINED(negate_overflow, "a negation overflows")
UNDEFINED(divrem_overflow, "a division by zero, or one that overflows")
UNDEFINED(shift_out_of_bounds, "a shift by too much")
UNDEFINED(out_of_bounds, "an index past its array")
UNDEFINED(builtin_unreachable, "code that cannot be reached was")
UNDEFINED(missing_return, "a function ends without its value")
UNDEFINED(vla_bound_not_positive, "an array of no size")
UNDEFINED(load_invalid_value, "a bool or enum of no valid value")
UNDEFINED(invalid_builtin, "a bit count of zero")
UNDEFINED(nonnull_arg, "a null argument")
UNDEFINED(nonnull_return_v1, "a null result")
UNDEFINED(pointer_overflow, "a pointer wraps")
