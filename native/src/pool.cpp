// Open calls are jobs. A caller works on its own until no task is left; workers go round robin
// over all of them. One mutex guards everything here that is not atomic.
#include "pool.h"

#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include <algorithm>
#include <atomic>
#include <type_traits>

namespace orchard {
namespace {

constexpr int kMostThreads = 256;
constexpr size_t kLine = 64;
constexpr size_t kPage = 4096;
constexpr size_t kMostKeptBytes = size_t{8} << 20;
constexpr size_t kLeastStackBytes = size_t{1} << 20;
constexpr int64_t kSpinNanoseconds = 40'000;

// std::mutex and, on Linux, std::atomic::wait would bring the whole C++ library into the binary,
// to throw what is never thrown.
class Lock {
 public:
  explicit Lock(pthread_mutex_t &mutex) : mutex_(mutex) { lock(); }
  ~Lock() {
    if (held_) unlock();
  }
  Lock(const Lock &) = delete;
  Lock &operator=(const Lock &) = delete;
  void lock() {
    pthread_mutex_lock(&mutex_);
    held_ = true;
  }
  void unlock() {
    held_ = false;
    pthread_mutex_unlock(&mutex_);
  }

 private:
  pthread_mutex_t &mutex_;
  bool held_ = false;
};

void sleep_while(std::atomic<uint32_t> &word, uint32_t value) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
  word.wait(value);
#endif
}

void wake(std::atomic<uint32_t> &word, int sleepers) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, sleepers, nullptr, nullptr, 0);
#else
  for (; sleepers > 0 && sleepers < INT_MAX; --sleepers) word.notify_one();
  if (sleepers > 0) word.notify_all();
#endif
}

int64_t nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <class Done>
bool spin(Done done) {
  const int64_t deadline = nanoseconds() + kSpinNanoseconds;
  do {
    for (int i = 0; i < 16; ++i) {
      if (done()) return true;
      relax();
    }
  } while (nanoseconds() < deadline);
  return done();
}

int cores() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(CPU_COUNT(&set), 1);
#endif
  return static_cast<int>(std::max(sysconf(_SC_NPROCESSORS_ONLN), 1L));
}

// Rounding and the treatment of subnormals, which a worker takes over from the caller.
uint64_t float_mode() {
#if defined(__x86_64__)
  return __builtin_ia32_stmxcsr();
#elif defined(__aarch64__)
  uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
#else
  return 0;
#endif
}

void set_float_mode([[maybe_unused]] uint64_t mode) {
#if defined(__x86_64__)
  __builtin_ia32_ldmxcsr(static_cast<unsigned>(mode));
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" : : "r"(mode));
#endif
}

// The head of a block of scratch.
struct alignas(kLine) Arena {
  Arena *next;
  size_t bytes;
  void *scratch() { return this + 1; }
};
static_assert(sizeof(Arena) == kLine);

void push(Arena *&list, Arena *arena) {
  arena->next = list;
  list = arena;
}

Arena *pop(Arena *&list) {
  Arena *arena = list;
  if (arena != nullptr) list = arena->next;
  return arena;
}

void release_all(Arena *list) {
  while (Arena *arena = pop(list)) release(arena);
}

// Nothing may depend on what was in scratch before: tests fill it with NaN.
void prepare(Arena *arena) {
#if defined(ORCHARD_POISON_SCRATCH)
  memset(arena->scratch(), 0xff, arena->bytes);
#endif
  memset(arena->scratch(), 0, kLine);
}

struct Job {
  Task task;
  void *context;
  int64_t count;
  size_t scratch_bytes;
  uint32_t limit;           // participants at once, the caller included
  uint64_t float_mode;      // the caller's
  Arena *arenas = nullptr;  // of helpers that are elsewhere now; contents are kept
  Job *before = nullptr, *after = nullptr;
  bool caller_sleeps = false;
  std::atomic<uint32_t> helpers{0};             // changes under the mutex
  alignas(kLine) std::atomic<int64_t> next{0};  // the first task that nobody has claimed

  bool run_one(void *scratch) {
    const int64_t index = next.fetch_add(1, std::memory_order_relaxed);
    if (index >= count) return false;
    task(context, index, scratch);
    return true;
  }
  bool has_room() const {
    return next.load(std::memory_order_relaxed) < count &&
           helpers.load(std::memory_order_relaxed) + 1 < limit;
  }
};

class Pool {
 public:
  bool run(Job &job) noexcept;
  void share(TeamRunner team) { team_.store(team, std::memory_order_relaxed); }
  int size() const { return workers_.load(std::memory_order_relaxed); }

  void before_fork() { pthread_mutex_lock(&mutex_); }
  void after_fork_in_parent() { pthread_mutex_unlock(&mutex_); }
  void after_fork_in_child();

 private:
  static void *main(void *pool);
  static void join_team(void *call);
  [[noreturn]] void work();
  void help(Job &job, Lock &lock);
  void rest(Lock &lock);
  void hire(int wanted);
  int open(Job &job);
  void close(Job &job, Lock &lock);
  void link(Job &job);
  void unlink(Job &job);
  Job *next_job();
  Arena *take(size_t bytes, Lock &lock);
  void give(Arena *arena, Arena *&surplus);

  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  Job *first_ = nullptr, *last_ = nullptr;
  std::atomic<int> open_jobs_{0};
  std::atomic<uint32_t> openings_{0};  // counts them; idle workers watch it
  std::atomic<int> workers_{0};
  int spinning_ = 0, sleeping_ = 0;  // idle workers
  int callers_ = 0, most_threads_ = 0;
  Arena *kept_ = nullptr;
  int kept_count_ = 0;
  std::atomic<TeamRunner> team_{nullptr};
};

constinit Pool pool;
// Workers may be busy while the process exits.
static_assert(std::is_trivially_destructible_v<Pool>);

void Pool::link(Job &job) {
  job.before = last_;
  job.after = nullptr;
  (last_ != nullptr ? last_->after : first_) = &job;
  last_ = &job;
}

void Pool::unlink(Job &job) {
  (job.before != nullptr ? job.before->after : first_) = job.after;
  (job.after != nullptr ? job.after->before : last_) = job.before;
}

Job *Pool::next_job() {
  for (Job *job = first_; job != nullptr; job = job->after) {
    if (!job->has_room()) continue;
    unlink(*job);
    link(*job);
    return job;
  }
  return nullptr;
}

Arena *Pool::take(size_t bytes, Lock &lock) {
  Arena **best = nullptr;
  for (Arena **arena = &kept_; *arena != nullptr; arena = &(*arena)->next) {
    const size_t size = (*arena)->bytes;
    if (size >= bytes && (best == nullptr || size < (*best)->bytes)) best = arena;
  }
  // Where none is large enough, one of the small ones makes way for the new one.
  Arena *arena = pop(best != nullptr ? *best : kept_);
  if (arena != nullptr) --kept_count_;
  if (best != nullptr) return arena;
  lock.unlock();
  release(arena);
  arena = static_cast<Arena *>(allocate(sizeof(Arena) + bytes));
  if (arena != nullptr) arena->bytes = bytes;
  lock.lock();
  return arena;
}

void Pool::give(Arena *arena, Arena *&surplus) {
  const bool keep = arena->bytes <= kMostKeptBytes && kept_count_ < most_threads_;
  if (keep) ++kept_count_;
  push(keep ? kept_ : surplus, arena);
}

void Pool::hire(int wanted) {
  pthread_attr_t attributes;
  if (size() >= wanted || pthread_attr_init(&attributes) != 0) return;
  size_t stack = 0;
  if (pthread_attr_getstacksize(&attributes, &stack) == 0 && stack < kLeastStackBytes)
    pthread_attr_setstacksize(&attributes, kLeastStackBytes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  pthread_t thread;
  while (size() < wanted && pthread_create(&thread, &attributes, &Pool::main, this) == 0)
    workers_.fetch_add(1, std::memory_order_relaxed);
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
  pthread_attr_destroy(&attributes);
}

void *Pool::main(void *pool) {
#if defined(__APPLE__)
  pthread_setname_np("orchard");
#elif defined(__linux__)
  pthread_setname_np(pthread_self(), "orchard");
#endif
  static_cast<Pool *>(pool)->work();
}

void Pool::work() {
  Lock lock(mutex_);
  for (;;) {
    if (Job *job = next_job())
      help(*job, lock);
    else
      rest(lock);
  }
}

void Pool::help(Job &job, Lock &lock) {
  job.helpers.fetch_add(1, std::memory_order_relaxed);
  Arena *arena = pop(job.arenas);
  if (arena == nullptr && (arena = take(job.scratch_bytes, lock)) != nullptr) prepare(arena);
  if (arena != nullptr) {
    lock.unlock();
    set_float_mode(job.float_mode);
    while (job.run_one(arena->scratch()) && open_jobs_.load(std::memory_order_relaxed) == 1) {
    }
    lock.lock();
    push(job.arenas, arena);
  } else {
    job.limit = job.helpers.load(std::memory_order_relaxed);  // no more than there are now
  }
  // The caller looks at the job again only with the mutex, so it outlives the notification.
  const uint32_t left = job.helpers.fetch_sub(1, std::memory_order_release) - 1;
  if (left == 0 && job.caller_sleeps) wake(job.helpers, 1);
}

void Pool::rest(Lock &lock) {
  const uint32_t seen = openings_.load(std::memory_order_relaxed);
  const auto opened = [&] { return openings_.load(std::memory_order_relaxed) != seen; };
  ++spinning_;
  lock.unlock();
  spin(opened);
  lock.lock();
  --spinning_;
  if (opened()) return;
  ++sleeping_;
  lock.unlock();
  sleep_while(openings_, seen);
  lock.lock();
  --sleeping_;
}

// How many sleepers to wake.
int Pool::open(Job &job) {
  link(job);
  open_jobs_.fetch_add(1, std::memory_order_relaxed);
  openings_.fetch_add(1, std::memory_order_relaxed);
  return std::clamp(static_cast<int>(job.limit) - 1 - spinning_, 0, sleeping_);
}

void Pool::close(Job &job, Lock &lock) {
  unlink(job);
  open_jobs_.fetch_sub(1, std::memory_order_relaxed);
  const auto left = [&] { return job.helpers.load(std::memory_order_acquire) == 0; };
  if (left()) return;
  lock.unlock();
  spin(left);
  lock.lock();
  job.caller_sleeps = true;
  while (const uint32_t helpers = job.helpers.load(std::memory_order_acquire)) {
    lock.unlock();
    sleep_while(job.helpers, helpers);
    lock.lock();
  }
}

struct TeamCall {
  Pool *pool;
  Job *job;
  std::atomic<Arena *> first;  // the caller's, for whoever comes first
};

// What a member of somebody else's team does.
void Pool::join_team(void *call) {
  auto &[pool, job, first] = *static_cast<TeamCall *>(call);
  Arena *arena = first.exchange(nullptr);
  if (arena == nullptr) {
    Lock lock(pool->mutex_);
    arena = pool->take(job->scratch_bytes, lock);
    if (arena == nullptr) return;
  }
  prepare(arena);
  const uint64_t before = float_mode();
  set_float_mode(job->float_mode);
  while (job->run_one(arena->scratch())) {
  }
  set_float_mode(before);
  Lock lock(pool->mutex_);
  push(job->arenas, arena);
}

bool Pool::run(Job &job) noexcept {
  Lock lock(mutex_);
  ++callers_;
  most_threads_ = std::max(most_threads_, callers_ + size());
  Arena *arena = take(job.scratch_bytes, lock);
  if (arena == nullptr) {
    --callers_;
    return false;
  }
  // One call at a time may have the host's team; more of them share the pool's own workers.
  const TeamRunner team =
      callers_ == 1 && job.limit > 1 ? team_.load(std::memory_order_relaxed) : nullptr;
  if (team == nullptr && job.limit > 1) hire(static_cast<int>(job.limit) - 1);
  most_threads_ = std::max(most_threads_, callers_ + std::max(size(), static_cast<int>(job.limit)));
  const bool shared = team == nullptr && job.limit > 1 && size() > 0;
  const int sleepers = shared ? open(job) : 0;
  lock.unlock();

  if (team != nullptr) {
    TeamCall call{this, &job, arena};
    team(join_team, &call, job.limit, 0);
  } else {
    if (sleepers > 0) wake(openings_, sleepers);
    prepare(arena);
    while (job.run_one(arena->scratch())) {
    }
  }

  lock.lock();
  if (shared) close(job, lock);
  Arena *surplus = nullptr;
  if (team == nullptr) give(arena, surplus);
  while (Arena *helper = pop(job.arenas)) give(helper, surplus);
  --callers_;
  lock.unlock();
  release_all(surplus);
  return true;
}

// The child has this thread alone, and none of its jobs.
void Pool::after_fork_in_child() {
  first_ = last_ = nullptr;
  open_jobs_.store(0, std::memory_order_relaxed);
  workers_.store(0, std::memory_order_relaxed);
  spinning_ = sleeping_ = callers_ = 0;
  team_.store(nullptr, std::memory_order_relaxed);  // OpenMP does not survive a fork
  pthread_mutex_unlock(&mutex_);
}

// At load time, because a fork may meet the first call half way.
__attribute__((constructor)) void watch_forks() {
  pthread_atfork([] { pool.before_fork(); }, [] { pool.after_fork_in_parent(); },
                 [] { pool.after_fork_in_child(); });
}

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
std::atomic<uint32_t> &value_of(Turn &turn) {
  return reinterpret_cast<std::atomic<uint32_t> &>(turn.value);
}

constinit std::atomic<int> sleeping_for_turns{0};

}  // namespace

int thread_count(int asked) noexcept {
  return std::clamp(asked > 0 ? asked : cores(), 1, kMostThreads);
}

bool parallel_for(int64_t count, int threads, size_t scratch_bytes, Task task,
                  void *context) noexcept {
  if (count <= 0) return true;
  if (scratch_bytes > SIZE_MAX / 2) return false;
  Job job{};
  job.task = task;
  job.context = context;
  job.count = count;
  job.float_mode = float_mode();
  job.scratch_bytes = std::max((scratch_bytes + kPage - 1) / kPage, size_t{1}) * kPage;
  job.limit = static_cast<uint32_t>(std::min<int64_t>(thread_count(threads), count));
  return pool.run(job);
}

int pool_threads() noexcept { return pool.size(); }

void share_threads(TeamRunner team) noexcept { pool.share(team); }

void wait_for_turn(Turn &turn, uint32_t value) noexcept {
  std::atomic<uint32_t> &now = value_of(turn);
  const auto mine = [&] {
    return static_cast<int32_t>(now.load(std::memory_order_acquire) - value) >= 0;
  };
  if (mine() || spin(mine)) return;
  for (int i = 0; i < 16; ++i) {
    sched_yield();
    if (mine()) return;
  }
  // Sequentially consistent, here and in end_turn: either the sleeper sees the new value, or the
  // one who wrote it sees the sleeper.
  sleeping_for_turns.fetch_add(1);
  for (;;) {
    const uint32_t seen = now.load();
    if (mine()) break;
    sleep_while(now, seen);
  }
  sleeping_for_turns.fetch_sub(1);
}

void end_turn(Turn &turn) noexcept {
  std::atomic<uint32_t> &now = value_of(turn);
  now.fetch_add(1);
  if (sleeping_for_turns.load() > 0) wake(now, INT_MAX);
}

void *allocate(size_t bytes) noexcept {
  void *memory = nullptr;
  return posix_memalign(&memory, kLine, std::max(bytes, kLine)) == 0 ? memory : nullptr;
}

void release(void *memory) noexcept { free(memory); }

}  // namespace orchard
