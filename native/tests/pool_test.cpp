// The thread pool by itself, and calls from many threads, around fork, exit and lack of memory.
//
// The pool's source is compiled into this program too, for the library does not export it.
#include "pool.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "check.h"
#include "problem.h"

namespace orchard_test {
namespace {

using orchard::end_turn;
using orchard::parallel_for;
using orchard::Turn;
using orchard::wait_for_turn;
using Body = std::function<void(int64_t index, void *scratch)>;

constexpr unsigned kSecondsPerTest = kThreadSanitizer || kAddressSanitizer ? 240 : 60;

bool for_all(int64_t count, int threads, size_t scratch_bytes, const Body &body) {
  const auto task = [](void *context, int64_t index, void *scratch) {
    (*static_cast<const Body *>(context))(index, scratch);
  };
  return parallel_for(count, threads, scratch_bytes, task, const_cast<Body *>(&body));
}

void in_threads(int count, const std::function<void(int)> &body) {
  std::vector<std::thread> threads;
  for (int t = 0; t < count; ++t) threads.emplace_back(body, t);
  for (std::thread &thread : threads) thread.join();
}

std::string run_each_once() {
  for (int threads = 0; threads <= 8; ++threads)
    for (const int64_t count : {0, 1, 2, 3, 100, 5000}) {
      std::vector<std::atomic<int>> runs(count);
      std::atomic<int> active = 0, most = 0;
      const bool ran = for_all(count, threads, 100, [&](int64_t index, void *) {
        const int now = ++active;
        for (int seen = most; seen < now && !most.compare_exchange_weak(seen, now);) {
        }
        ++runs[index];
        --active;
      });
      if (!ran) return "it says that scratch could not be had";
      for (const auto &times : runs)
        if (times != 1) return "a task ran " + std::to_string(times) + " times";
      if (threads > 0 && most > threads)
        return std::to_string(most) + " ran at once, of " + std::to_string(threads);
    }
  return "";
}

std::string run_scratch() {
  for (const size_t bytes : {size_t{1}, size_t{64}, size_t{5000}, size_t{3} << 20}) {
    std::mutex mutex;
    std::map<void *, uint8_t> left;  // by its last task
    std::map<void *, int> users;
    std::string defect;
    for_all(300, 8, bytes, [&](int64_t index, void *scratch) {
      const auto mark = static_cast<uint8_t>(index);
      uint8_t *const data = static_cast<uint8_t *>(scratch);
      {
        const std::lock_guard lock(mutex);
        if (reinterpret_cast<uintptr_t>(scratch) % 64 != 0) defect = "not aligned";
        if (++users[scratch] != 1) defect = "two tasks share it";
        const auto found = left.find(scratch);
        if (found != left.end() && (data[0] != found->second || data[bytes - 1] != found->second))
          defect = "its contents changed between tasks";
        left[scratch] = mark;
      }
      std::memset(data, mark, bytes);
      std::this_thread::yield();
      const std::lock_guard lock(mutex);
      --users[scratch];
    });
    if (!defect.empty()) return defect;
    if (left.size() > 8) return std::to_string(left.size()) + " blocks for 8 threads";
  }
  return "";
}

std::string run_many_callers() {
  std::atomic<int64_t> total = 0;
  std::atomic<bool> failed = false;
  in_threads(64, [&](int t) {
    for (int round = 0; round < 20; ++round) {
      std::atomic<int64_t> own = 0;
      if (!for_all(50, 1 + t % 8, 1000, [&](int64_t index, void *) { own += index; }) ||
          own != 1225)
        failed = true;
      total += own;
    }
  });
  return failed || total != 64 * 20 * 1225 ? "a sum is wrong" : "";
}

std::string run_nested() {
  std::atomic<int> leaves = 0;
  in_threads(4, [&](int) {
    for_all(6, 4, 64, [&](int64_t, void *) {
      for_all(5, 4, 64,
              [&](int64_t, void *) { for_all(4, 0, 64, [&](int64_t, void *) { ++leaves; }); });
    });
  });
  return leaves == 4 * 6 * 5 * 4 ? "" : std::to_string(leaves) + " tasks ran, not 480";
}

// Each task waits for the one before it, as kernels do that add in a fixed order.
std::string run_turns() {
  std::atomic<bool> wrong = false;
  in_threads(8, [&](int t) {
    for (int round = 0; round < 10; ++round) {
      Turn turn{};
      std::vector<int64_t> order;  // guarded by turn
      for_all(40, 1 + t, 64, [&](int64_t index, void *) {
        if (index % 7 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
        wait_for_turn(turn, static_cast<uint32_t>(index));
        order.push_back(index);
        end_turn(turn);
      });
      for (int64_t at = 0; at < 40; ++at)
        if (order.size() != 40 || order[at] != at) wrong = true;
    }
  });
  return wrong ? "tasks took their turns in another order" : "";
}

// A call with its answer.
struct Known {
  Known() : call(what(), ORCHARD_FLOAT32, Edge::kEnd) {
    call.expect();
    defects = call.forward_and_compare(1) + call.backward_and_compare(1);
    forward = call.forward_bytes();
    backward = call.backward_bytes();
  }
  static Case what() {
    return {.name = "known",
            .heads = 4,
            .rows = 90,
            .keys = 130,
            .dim = 40,
            .value_dim = 40,
            .high = 40,
            .drop = 6554};
  }
  // Anew in memory of the caller's own.
  std::string run(int threads) const {
    Call mine(what(), ORCHARD_FLOAT32, Edge::kEnd);
    mine.expect_as(call);
    const std::string found = mine.forward(threads) + mine.backward(threads);
    if (!found.empty()) return found;
    return mine.forward_bytes() == forward && mine.backward_bytes() == backward
               ? ""
               : "other bits than alone; ";
  }

  Call call;
  std::string defects;
  std::vector<std::vector<uint8_t>> forward, backward;
};

std::string run_many_calls(const Known &known) {
  std::mutex mutex;
  std::string defects = known.defects;
  in_threads(64, [&](int t) {
    for (int round = 0; round < 2; ++round) {
      const std::string found = known.run(t % 9);
      const std::lock_guard lock(mutex);
      if (!found.empty()) defects = found;
    }
  });
  return defects;
}

std::string wait_for_child(pid_t child, const char *what) {
  int status = 0;
  if (waitpid(child, &status, 0) != child) return "waitpid failed";
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return "";
  return std::string(what) + (WIFSIGNALED(status)
                                  ? " got signal " + std::to_string(WTERMSIG(status))
                                  : " exited with " + std::to_string(WEXITSTATUS(status)));
}

std::string fork_and_call(const Known &known, int times) {
  std::fflush(nullptr);
  for (int round = 0; round < times; ++round) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(kSecondsPerTest / 2);
      bool right = known.run(3).empty();
      if (round == 0) {  // and the same in its own child
        const pid_t grandchild = fork();
        if (grandchild == 0) _exit(known.run(3).empty() ? 0 : 1);
        right = right && wait_for_child(grandchild, "").empty();
      }
      if (kAddressSanitizer) _exit(right ? 0 : 1);  // its search for leaks expects the threads
      std::exit(right ? 0 : 1);
    }
    const std::string defects = wait_for_child(child, "a child");
    if (!defects.empty()) return defects;
  }
  return known.run(3);
}

std::string run_fork_in_the_middle(const Known &known) {
  std::atomic<bool> stop = false;
  std::vector<std::thread> others;
  for (int t = 0; t < 4; ++t)
    others.emplace_back([&] {
      while (!stop) known.run(3);
    });
  const std::string defects = fork_and_call(known, 15);
  stop = true;
  for (std::thread &other : others) other.join();
  return defects;
}

std::string run_self(const char *program, const char *mode, const char *argument) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(kSecondsPerTest / 2);
    execl(program, program, mode, argument, nullptr);
    _exit(127);
  }
  return wait_for_child(child, mode);
}

// The process ends while other threads are in calls.
int exit_amid_calls(int milliseconds) {
  const Known *known = new Known;  // outlives the process
  for (int t = 0; t < 3; ++t)
    std::thread([=] {
      for (;;) known->run(3);
    }).detach();
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
  std::exit(known->defects.empty() ? 0 : 1);
}

std::string run_exits(const char *program) {
  for (int round = 0; round < 12; ++round) {
    const std::string milliseconds = std::to_string(round * 3);
    const std::string defects = run_self(program, "--exit", milliseconds.c_str());
    if (!defects.empty()) return defects;
  }
  return "";
}

size_t address_space() {
  unsigned long pages = 0;
  if (FILE *file = std::fopen("/proc/self/statm", "r")) {
    if (std::fscanf(file, "%lu", &pages) != 1) pages = 0;
    std::fclose(file);
  }
  return pages * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

void limit_address_space(size_t bytes) {
  rlimit limit{};
  getrlimit(RLIMIT_AS, &limit);
  limit.rlim_cur = bytes;
  setrlimit(RLIMIT_AS, &limit);
}

// Grows the stack beforehand: at the limit it cannot.
__attribute__((noinline)) void touch_stack() {
  volatile char stack[512 * 1024];
  for (size_t at = 0; at < sizeof stack; at += 512) stack[at] = 0;
}

constexpr int kNoLimitHere = 77;

// All memory that can be had, in blocks that are chained through themselves.
class Hoard {
 public:
  bool take_all() {  // false where there is no end
    constexpr size_t kMost = size_t{2} << 30;
    for (size_t size = size_t{1} << 18; size >= sizeof(Block); size /= 2)
      while (void *memory = held_ < kMost ? std::malloc(size) : nullptr) {
        blocks_ = new (memory) Block{blocks_, size};
        held_ += size;
      }
    return held_ < kMost;
  }
  bool give_back(size_t bytes) {  // false where nothing is left
    for (size_t given = 0; blocks_ != nullptr && given < bytes;) {
      Block *const block = blocks_;
      blocks_ = block->next;
      given += block->size;
      std::free(block);
    }
    return blocks_ != nullptr;
  }

 private:
  struct Block {
    Block *next;
    size_t size;
  };
  Block *blocks_ = nullptr;
  size_t held_ = 0;
};

// Everything is taken, then given back bit by bit. Each call on the way is served, or says that
// memory is short.
int call_without_memory() {
  const Case what{.name = "with a gradient of the mask",
                  .heads = 4,
                  .rows = 300,
                  .keys = 130,
                  .dim = 40,
                  .value_dim = 40,
                  .high = -150,
                  .mask_dtype = ORCHARD_FLOAT32,
                  .mask_axes = "sd",
                  .grad_mask = true};
  Call call(what, ORCHARD_FLOAT32, Edge::kEnd);
  call.expect();
  touch_stack();
  limit_address_space(address_space() + (size_t{64} << 20));
  Hoard hoard;
  if (!hoard.take_all()) return kNoLimitHere;
  int refused = 0;
  for (const int threads : {1, 8}) {
    call.forward_args.threads = call.backward_args.threads = threads;
    for (const bool forward : {true, false}) {
      const auto run = [&] {
        return forward ? orchard_attention_forward(&call.forward_args)
                       : orchard_attention_backward(&call.backward_args);
      };
      while (const int status = run()) {
        ++refused;
        const char *defect = status != ORCHARD_OUT_OF_MEMORY     ? "another status"
                             : *orchard_last_error() == '\0'     ? "no message"
                             : !hoard.give_back(size_t{1} << 14) ? "refused with all memory there"
                                                                 : nullptr;
        if (defect == nullptr) continue;
        std::fprintf(stderr, "%s with %d threads: %s\n", forward ? "forward" : "backward", threads,
                     defect);
        return 1;
      }
    }
  }
  hoard.give_back(SIZE_MAX);
  const std::string defects = call.forward_and_compare(3) + call.backward_and_compare(3);
  return refused > 0 && defects.empty() ? 0 : 1;
}

// Scratch can be had, stacks for threads cannot.
int call_without_threads() {
  Call call(Known::what(), ORCHARD_FLOAT32, Edge::kEnd);
  call.expect();
  touch_stack();
  limit_address_space(address_space() + (size_t{6} << 20));
  const std::string defects = call.forward_and_compare(8) + call.backward_and_compare(8);
  if (orchard_pool_threads() != 0) return kNoLimitHere;
  return defects.empty() ? 0 : 1;
}

int run(const char *program) {
  Report report;
  const auto test = [&](const char *name, const auto &body) {
    now_running(name);
    alarm(kSecondsPerTest);
    report.test(name, body());
    alarm(0);
  };
  const auto limited = [&](const char *name, const char *mode) {
    if (kThreadSanitizer || kAddressSanitizer)
      return report.skip(name, "a sanitizer's own memory does not fit under a limit");
    const std::string defects = run_self(program, mode, "");
    if (defects == std::string(mode) + " exited with " + std::to_string(kNoLimitHere))
      return report.skip(name, "this system does not limit the address space");
    test(name, [&] { return defects; });
  };

  test("each task runs once, on no more threads than asked for", run_each_once);
  test("scratch is aligned, private and kept", run_scratch);
  test("64 callers at once", run_many_callers);
  test("calls from tasks", run_nested);
  test("tasks that wait for earlier ones", run_turns);
  const Known known;
  test("64 threads in attention", [&] { return run_many_calls(known); });
  if (kThreadSanitizer) {
    report.skip("fork", "ThreadSanitizer does not follow threads that a forked child starts");
  } else {
    test("fork between calls", [&] { return fork_and_call(known, 3); });
    if (kAddressSanitizer)
      report.skip("fork amid other threads' calls", "its allocator's locks are not kept over fork");
    else
      test("fork amid other threads' calls", [&] { return run_fork_in_the_middle(known); });
  }
  test("exit amid other threads' calls", [&] { return run_exits(program); });
  limited("no memory for scratch", "--no-memory");
  limited("no memory for threads", "--no-threads");
  return report.finish();
}

}  // namespace
}  // namespace orchard_test

int main(int argc, char **argv) {
  using namespace orchard_test;
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "--exit" && argc > 2) return exit_amid_calls(std::atoi(argv[2]));
  if (mode == "--no-memory") return call_without_memory();
  if (mode == "--no-threads") return call_without_threads();
  report_faults();
  return run("/proc/self/exe");
}
