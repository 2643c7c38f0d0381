// Stacks to switch between: a saved stack pointer is a whole context. Switches are a few
// instructions of assembly where they are known, and swapcontext, twenty times slower, elsewhere.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <ucontext.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#if (defined(__x86_64__) || defined(__aarch64__)) && !defined(EMULATOR_UCONTEXT)
#define EMULATOR_FAST_SWITCH 1
#else
#define EMULATOR_FAST_SWITCH 0
#endif

namespace emulator {

struct Fiber {
  char* stack = nullptr;  // lowest address
  size_t stack_bytes = 0;
  void* stack_pointer = nullptr;
  ucontext_t context;
  void* fake_stack = nullptr;
};

#if EMULATOR_FAST_SWITCH
// Saves what a called function must keep on the present stack, its pointer to *from, and goes on at
// `to`.
extern "C" void emulator_switch(void** from, void* to);

#if defined(__x86_64__)
asm(R"(
.text
.type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch, . - emulator_switch
)");
constexpr int kSavedWords = 7;
constexpr int kReturnWord = 6;
#else
asm(R"(
.text
.type emulator_switch, @function
emulator_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size emulator_switch, . - emulator_switch
)");
constexpr int kSavedWords = 20;
constexpr int kReturnWord = 11;
#endif
#endif

// Makes `fiber` start at `entry`, which must not return, when it is next switched to.
inline void prepare(Fiber& fiber, void (*entry)()) {
#if EMULATOR_FAST_SWITCH
  // Above the saved registers lies a zero where a caller's address would be: debuggers stop there.
  // Functions start with the stack 8 bytes off a 16-byte boundary on x86-64, and on one elsewhere.
  uintptr_t top = (reinterpret_cast<uintptr_t>(fiber.stack) + fiber.stack_bytes) & ~uintptr_t{15};
  void** words = reinterpret_cast<void**>(top) - 2 - kSavedWords;
#if defined(__x86_64__)
  words += 1;
#endif
  for (int i = 0; i < kSavedWords + 1; ++i) words[i] = nullptr;
  words[kReturnWord] = reinterpret_cast<void*>(entry);
  fiber.stack_pointer = words;
#else
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = fiber.stack_bytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
#endif
  fiber.fake_stack = nullptr;
}

// Leaves `from`, which goes on here when somebody switches back to it. `is_over`: nobody will.
inline void switch_fiber(Fiber& from, Fiber& to, bool is_over) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(is_over ? nullptr : &from.fake_stack, to.stack, to.stack_bytes);
#else
  (void)is_over;
#endif
#if EMULATOR_FAST_SWITCH
  emulator_switch(&from.stack_pointer, to.stack_pointer);
#else
  swapcontext(&from.context, &to.context);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

}  // namespace emulator
