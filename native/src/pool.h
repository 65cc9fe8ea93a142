// Threads shared by every caller of the library.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace orchard {

using Task = void (*)(void *context, int64_t index, void *scratch);

// Runs task(context, i, scratch) for every i in [0, count) on at most `threads` threads, the
// caller one of them (0: one for each core). Indices are claimed in increasing order, so a task
// may wait for one with a smaller index. `scratch` is 64-byte aligned, private to the thread, and
// keeps its contents from one task of a call to the next. False, with nothing run, where scratch
// for the caller itself cannot be had.
bool parallel_for(int64_t count, int threads, size_t scratch_bytes, Task task,
                  void *context) noexcept;

int pool_threads() noexcept;

// The most threads that a call which asks for `asked` is given.
int thread_count(int asked) noexcept;

// See orchard_share_threads.
using TeamRunner = void (*)(void (*task)(void *), void *data, unsigned threads, unsigned flags);
void share_threads(TeamRunner team) noexcept;

// Turns: values grow one at a time, and a thread waits for the value that is its turn.
struct Turn {
  uint32_t value;
};
void wait_for_turn(Turn &turn, uint32_t value) noexcept;
void end_turn(Turn &turn) noexcept;  // value + 1

// 64-byte aligned memory, or nullptr.
void *allocate(size_t bytes) noexcept;
void release(void *memory) noexcept;

}  // namespace orchard
