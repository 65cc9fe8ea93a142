// Runs the threads of a threadgroup as fibers and watches what they do to memory.
//
// Freestanding: memory comes from the caller, and a fiber finds its own record by the address of
// its stack, so there are no globals, no thread-local state and no library to link.
#include "runtime.h"

enum {
  STACK = 1 << 18,
  RECORD = 384,  // distance of fiber records, so that they do not share cache sets
  SIMDGROUPS = 32,
  BUFFERS = 31,
  SLOTS = 64,
  SLOT_BITS = 37,
  ARRAYS = 64,
  ARRAY_BITS = 16,
};

enum { IN_ORDER, REVERSED, RANDOM };

enum {
  FINE,
  BUFFER_BOUNDS,
  READ_ONLY,
  ARRAY_BOUNDS,
  WILD,
  MISALIGNED,
  RACE,
  BARRIER_DIVERGENCE,
  SIMD_DIVERGENCE,
  STACK_OVERFLOW,
  UNDEFINED,
};

typedef struct {
  emu_u64 low, high;  // addresses that may be accessed
  emu_u32 writable, unused;
} Slot;

typedef struct {
  emu_u64 multiplies, shuffles, reductions, votes, simdgroup_barriers, threadgroup_barriers;
  emu_u64 device_read, device_written, inline_read, threadgroup_read, threadgroup_written;
  emu_u64 threadgroups, switches;
} Counters;

typedef struct {
  emu_u32 kind, thread, group[3], slot, size, write, other, other_write, lanes, expected;
  emu_u64 address, start;
  emu_site site, other_site;  // where the thread last met others; where others are
  const char *detail;
} Report;

typedef struct {
  emu_u32 write_epoch, writer, write_simd_epoch;
  emu_u32 read_epoch, read_simdgroups, read_lanes, read_simd_epoch, unused;
} Shadow;  // of one or two bytes of threadgroup memory

typedef struct {
  emu_u32 exists, run, waiting, at_barrier;
  emu_u32 kind, flags, mixed, epoch;
  emu_site site;
  emu_combine combine;
  float a[8][8], b[8][8], c[8][8], d[8][8];
  emu_payload in[EMU_LANES], out[EMU_LANES];
  emu_u32 source[EMU_LANES];
} Simd;

typedef struct {
  emu_u64 start, size, offset;  // offset: as if the arrays lay without gaps
} Array;

typedef struct Worker {
  // The launch, filled in by the caller.
  void (*entry)(void *const *buffers, const emu_u32 (*builtins)[3]);
  emu_u32 threads[3], group[3];
  emu_u32 first, step, schedule, seed, divergence, slots;
  void *buffers[BUFFERS];
  Slot slot[SLOTS];
  emu_u64 heap, stacks, arena;
  Shadow *shadow;
  emu_u32 granule, unused;  // log2 of the bytes that share a shadow
  Array array[ARRAYS];
  // What comes back.
  Counters counters;
  Report report;
  // The runtime's own. Epochs go on from launch to launch, since the shadow does.
  emu_u32 epoch, count, simdgroups, blocked, mixed, flags, random;
  emu_u32 position[3];
  void *home;
  emu_site site;
  emu_u64 image_low, image_high;
  Simd simd[SIMDGROUPS];
} Worker;

typedef struct {
  Worker *worker;
  Simd *simd;
  void *stack;
  emu_u32 thread, lane, kind, pending;
  emu_combine combine;
  emu_site site;
  emu_u64 pending_address, pending_value[2];
  emu_u32 pending_size, pending_other, pending_slot;
  emu_u32 builtins[EMU_BUILTINS][3];
} Fiber;

_Static_assert(sizeof(Fiber) <= RECORD, "records overlap");

// ---- Fibers

#if defined(__x86_64__)
__attribute__((naked, noinline)) static void jump(void **from, void *to) {
  __asm__(
      "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
      "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
      "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret");
}
enum { SAVED = 6, RETURN = 6, FRAME = 8 };  // in words; one null word above the return address
#elif defined(__aarch64__)
__attribute__((naked, noinline)) static void jump(void **from, void *to) {
  __asm__(
      "sub sp, sp, #160\n"
      "stp x19, x20, [sp]\n stp x21, x22, [sp, #16]\n stp x23, x24, [sp, #32]\n"
      "stp x25, x26, [sp, #48]\n stp x27, x28, [sp, #64]\n stp x29, x30, [sp, #80]\n"
      "stp d8, d9, [sp, #96]\n stp d10, d11, [sp, #112]\n"
      "stp d12, d13, [sp, #128]\n stp d14, d15, [sp, #144]\n"
      "mov x9, sp\n str x9, [x0]\n mov sp, x1\n"
      "ldp x19, x20, [sp]\n ldp x21, x22, [sp, #16]\n ldp x23, x24, [sp, #32]\n"
      "ldp x25, x26, [sp, #48]\n ldp x27, x28, [sp, #64]\n ldp x29, x30, [sp, #80]\n"
      "ldp d8, d9, [sp, #96]\n ldp d10, d11, [sp, #112]\n"
      "ldp d12, d13, [sp, #128]\n ldp d14, d15, [sp, #144]\n"
      "add sp, sp, #160\n ret");
}
enum { SAVED = 20, RETURN = 11, FRAME = 20 };
#else
#error "fibers are written for x86-64 and aarch64"
#endif

static inline Fiber *record(emu_u64 base) {
  return (Fiber *)(base + ((base / STACK) % EMU_LANES) * RECORD);
}

static inline Fiber *self(void) {
  return record((emu_u64)__builtin_frame_address(0) & -(emu_u64)STACK);
}

static inline Fiber *fiber(Worker *w, emu_u32 thread) {
  return record(w->stacks + (emu_u64)thread * STACK);
}

__attribute__((noinline, noreturn)) static void fail(Fiber *f, emu_u32 kind) {
  Worker *w = f->worker;
  Report *r = &w->report;
  r->kind = kind;
  r->thread = f->thread;
  r->site = f->site;
  for (int i = 0; i < 3; i++) r->group[i] = w->position[i];
  jump(&f->stack, w->home);
  __builtin_unreachable();
}

// ---- Scheduling: a simdgroup runs until all of it waits for others, never round robin.

static emu_u32 next_random(Worker *w) {
  w->random = w->random * 1664525u + 1013904223u;
  return w->random >> 8;
}

static emu_u32 choose(Worker *w, emu_u32 set) {
  if (w->schedule == IN_ORDER) return (emu_u32)__builtin_ctz(set);
  if (w->schedule == REVERSED) return 31u - (emu_u32)__builtin_clz(set);
  for (emu_u32 skip = next_random(w) % (emu_u32)__builtin_popcount(set); skip; skip--)
    set &= set - 1;
  return (emu_u32)__builtin_ctz(set);
}

static inline int same(emu_site a, emu_site b) {
  return a.line == b.line && a.column == b.column && a.file == b.file;
}

// Lanes of a simdgroup that wait at different places, or not all of them, are at odds. A barrier
// or a matrix operation does not allow it. For the rest it is an error too unless `divergence`
// says otherwise; then those at the first place in the source go on alone.
static emu_u32 diverged(Worker *w, Simd *s) {
  emu_u32 first = (emu_u32)__builtin_ctz(s->waiting), lanes = 0, number = (emu_u32)(s - w->simd);
  for (emu_u32 set = s->waiting; set; set &= set - 1) {
    emu_u32 lane = (emu_u32)__builtin_ctz(set);
    emu_site at = fiber(w, number * EMU_LANES + lane)->site;
    emu_site best = fiber(w, number * EMU_LANES + first)->site;
    if (at.line < best.line || (at.line == best.line && at.column < best.column)) first = lane;
  }
  Fiber *f = fiber(w, number * EMU_LANES + first);
  for (emu_u32 set = s->waiting; set; set &= set - 1) {
    emu_u32 lane = (emu_u32)__builtin_ctz(set);
    Fiber *other = fiber(w, number * EMU_LANES + lane);
    if (same(other->site, f->site))
      lanes |= 1u << lane;
    else
      w->report.other_site = other->site;
  }
  if (!w->divergence || f->kind >= EMU_MULTIPLY) {
    w->report.lanes = lanes;
    w->report.expected = s->exists;
    fail(f, SIMD_DIVERGENCE);
  }
  s->kind = f->kind;
  s->combine = f->combine;
  return lanes;
}

static void count(Counters *c, emu_u32 kind) {
  switch (kind) {
    case EMU_REDUCTION:
      c->reductions++;
      break;
    case EMU_SHUFFLE:
      c->shuffles++;
      break;
    case EMU_VOTE:
      c->votes++;
      break;
    case EMU_MULTIPLY:
      c->multiplies++;
      break;
    case EMU_SIMDGROUP_BARRIER:
      c->simdgroup_barriers++;
      break;
  }
}

static void shuffle_lanes(Simd *s, emu_u32 lanes) {
  for (emu_u32 lane = 0; lane < EMU_LANES; lane++) {
    if (!(lanes >> lane & 1)) continue;
    emu_u32 source = s->source[lane];
    int active = source < EMU_LANES && (lanes >> source & 1);
    for (int i = 0; i < EMU_PAYLOAD / 8; i++) s->out[lane][i] = active ? s->in[source][i] : ~0ull;
  }
}

typedef float Row __attribute__((vector_size(32), aligned(4)));

static void multiply(Simd *s) {
  for (int i = 0; i < 8; i++) {
    Row sum = *(Row *)s->c[i];
    for (int k = 0; k < 8; k++) sum += s->a[i][k] * *(Row *)s->b[k];
    *(Row *)s->d[i] = sum;
  }
}

static void complete(Worker *w, Simd *s) {
  emu_u32 lanes = s->waiting;
  emu_u32 expected = s->kind == EMU_MULTIPLY ? ~0u : s->exists;
  if (s->mixed || lanes != expected) lanes = diverged(w, s);
  count(&w->counters, s->kind);
  if (s->kind == EMU_MULTIPLY)
    multiply(s);
  else if (s->kind == EMU_SHUFFLE)
    shuffle_lanes(s, lanes);
  else if (s->kind == EMU_SIMDGROUP_BARRIER)
    s->epoch += s->flags / EMU_MEM_THREADGROUP & 1;
  else
    s->combine(s->in, s->out, lanes);
  s->run |= lanes;
  s->waiting &= ~lanes;
  s->mixed = s->waiting != 0;  // those left behind are looked at one by one
}

static void release(Worker *w) {
  if (w->mixed || w->blocked != w->count) {
    Fiber *first = 0;
    for (emu_u32 t = 0; t < w->count; t++) {
      Fiber *f = fiber(w, t);
      if (!(f->simd->at_barrier >> f->lane & 1)) continue;
      if (!first)
        first = f;
      else if (!same(f->site, first->site))
        w->report.other_site = f->site;
    }
    w->report.lanes = w->blocked;
    w->report.expected = w->count;
    fail(first, BARRIER_DIVERGENCE);
  }
  w->blocked = 0;
  w->counters.threadgroup_barriers++;
  if (w->flags & EMU_MEM_THREADGROUP) w->epoch++;
  for (emu_u32 i = 0; i < w->simdgroups; i++) {
    w->simd[i].run = w->simd[i].at_barrier;
    w->simd[i].at_barrier = 0;
  }
}

// The simdgroups that have something to do, as a set.
static emu_u32 busy(Worker *w) {
  emu_u32 set = 0;
  for (emu_u32 i = 0; i < w->simdgroups; i++)
    if (w->simd[i].run | w->simd[i].waiting) set |= 1u << i;
  return set;
}

static void next(Fiber *f) {
  Worker *w = f->worker;
  Simd *s = f->simd;
  while (!s->run) {
    if (s->waiting) {
      complete(w, s);
      if (w->schedule != RANDOM) break;
    }
    emu_u32 set = busy(w);
    if (!set) {
      if (!w->blocked) {
        jump(&f->stack, w->home);
        return;
      }
      release(w);
      set = busy(w);
    }
    s = &w->simd[choose(w, set)];
  }
  // After a collective the lane that completed it goes on: one switch less.
  emu_u32 lane = s == f->simd && w->schedule != RANDOM && (s->run >> f->lane & 1)
                     ? f->lane
                     : choose(w, s->run);
  Fiber *to = fiber(w, (emu_u32)(s - w->simd) * EMU_LANES + lane);
  if (to == f) return;
  w->counters.switches++;
  jump(&f->stack, to->stack);
}

static void settle(Fiber *f);

static inline void meet(Fiber *f, emu_u32 kind, emu_combine combine, emu_site site) {
  Simd *s = f->simd;
  if (f->pending) settle(f);
  f->site = site;
  f->kind = kind;
  f->combine = combine;
  if (!s->waiting) {
    s->site = site;
    s->kind = kind;
    s->combine = combine;
    s->mixed = 0;
  } else if (!same(s->site, site)) {
    s->mixed = 1;
  }
  s->run &= ~(1u << f->lane);
  s->waiting |= 1u << f->lane;
  next(f);
}

static inline void copy(void *to, const void *from, emu_u32 size) {
  for (emu_u32 i = 0; i < size; i++) ((emu_u8 *)to)[i] = ((const emu_u8 *)from)[i];
}

void emu_exchange(const void *in, void *out, emu_u32 size, emu_combine combine, emu_u32 kind,
                  emu_site site) {
  Fiber *f = self();
  copy(f->simd->in[f->lane], in, size);
  meet(f, kind, combine, site);
  copy(out, f->simd->out[f->lane], size);
}

void emu_shuffle(const void *in, void *out, emu_u32 size, emu_u32 source, emu_site site) {
  Fiber *f = self();
  copy(f->simd->in[f->lane], in, size);
  f->simd->source[f->lane] = source;
  meet(f, EMU_SHUFFLE, 0, site);
  copy(out, f->simd->out[f->lane], size);
}

void emu_multiply(const float a[2], const float b[2], const float c[2], float d[2], emu_site site) {
  Fiber *f = self();
  Simd *s = f->simd;
  emu_u32 lane = f->lane;
  emu_u32 row = (lane >> 4) * 4 + (lane >> 2 & 1) * 2 + (lane >> 1 & 1);
  emu_u32 column = (lane >> 3 & 1) * 4 + (lane & 1) * 2;
  for (int i = 0; i < 2; i++) {
    s->a[row][column + i] = a[i];
    s->b[row][column + i] = b[i];
    s->c[row][column + i] = c[i];
  }
  meet(f, EMU_MULTIPLY, 0, site);
  for (int i = 0; i < 2; i++) d[i] = s->d[row][column + i];
}

void emu_simdgroup_barrier(emu_u32 flags, emu_site site) {
  Fiber *f = self();
  f->simd->flags = flags;
  meet(f, EMU_SIMDGROUP_BARRIER, 0, site);
}

void emu_threadgroup_barrier(emu_u32 flags, emu_site site) {
  Fiber *f = self();
  Worker *w = f->worker;
  if (f->pending) settle(f);
  f->site = site;
  if (!w->blocked++) {
    w->site = site;
    w->flags = flags;
    w->mixed = 0;
  } else if (!same(w->site, site)) {
    w->mixed = 1;
  }
  f->simd->run &= ~(1u << f->lane);
  f->simd->at_barrier |= 1u << f->lane;
  next(f);
}

void *emu_array(emu_u32 slot) { return (void *)self()->worker->array[slot % ARRAYS].start; }

emu_u32 emu_lane(void) { return self()->lane; }

// ---- Memory: every access of a kernel is announced before it happens.

extern char __ehdr_start[] __attribute__((visibility("hidden")));
extern char _end[] __attribute__((visibility("hidden")));

__attribute__((noinline, noreturn)) static void fail_access(Fiber *f, emu_u32 kind, emu_u64 address,
                                                            emu_u32 size, emu_u32 write,
                                                            emu_u32 slot, emu_u64 start) {
  Report *r = &f->worker->report;
  r->address = address;
  r->size = size;
  r->write = write;
  r->slot = slot;
  r->start = start;
  fail(f, kind);
}

__attribute__((noinline, noreturn)) static void fail_race(Fiber *f, emu_u64 address, emu_u32 size,
                                                          emu_u32 write, emu_u32 slot,
                                                          emu_u32 other, emu_u32 other_write) {
  Report *r = &f->worker->report;
  r->other = other;
  r->other_write = other_write;
  r->other_site = fiber(f->worker, other)->site;
  fail_access(f, RACE, address, size, write, slot, f->worker->array[slot].start);
}

// Two threads that write the same value to the same place are no race. What the second wrote is
// only known after its store, so the comparison waits for whatever it does next.
static void settle(Fiber *f) {
  emu_u64 now[2] = {0, 0};
  f->pending = 0;
  copy(now, (void *)f->pending_address, f->pending_size);
  if (now[0] != f->pending_value[0] || now[1] != f->pending_value[1])
    fail_race(f, f->pending_address, f->pending_size, 1, f->pending_slot, f->pending_other, 1);
}

// Accesses are ordered by a threadgroup barrier between them or, within a simdgroup, by a
// simdgroup barrier; either must be one for threadgroup memory.
static void touch(Fiber *f, Shadow *e, emu_u64 address, emu_u32 size, emu_u32 write, emu_u32 slot) {
  Worker *w = f->worker;
  Simd *s = f->simd;
  emu_u32 simdgroup = f->thread / EMU_LANES, bit = 1u << f->lane, group_bit = 1u << simdgroup;
  int written = e->write_epoch == w->epoch && e->writer != f->thread &&
                (e->writer / EMU_LANES != simdgroup || e->write_simd_epoch == s->epoch);
  if (!write) {
    if (written) fail_race(f, address, size, 0, slot, e->writer, 1);
    if (e->read_epoch != w->epoch) {
      e->read_epoch = w->epoch;
      e->read_simdgroups = 0;
    }
    if (e->read_simdgroups == group_bit && e->read_simd_epoch == s->epoch)
      e->read_lanes |= bit;
    else
      e->read_lanes = bit;  // of the last simdgroup; if there are several any write is a race
    e->read_simd_epoch = s->epoch;
    e->read_simdgroups |= group_bit;
    return;
  }
  if (e->read_epoch == w->epoch) {
    emu_u32 apart = e->read_simdgroups & ~group_bit, near = e->read_lanes & ~bit;
    if (apart) fail_race(f, address, size, 1, slot, (emu_u32)__builtin_ctz(apart) * EMU_LANES, 0);
    if (near && e->read_simd_epoch == s->epoch)
      fail_race(f, address, size, 1, slot, simdgroup * EMU_LANES + (emu_u32)__builtin_ctz(near), 0);
  }
  if (written && !f->pending) {
    f->pending = 1;
    f->pending_address = address;
    f->pending_size = size;
    f->pending_slot = slot;
    f->pending_other = e->writer;
    f->pending_value[0] = f->pending_value[1] = 0;
    copy(f->pending_value, (void *)address, size);
  }
  e->write_epoch = w->epoch;
  e->write_simd_epoch = s->epoch;
  e->writer = f->thread;
}

static void touch_array(Fiber *f, emu_u64 address, emu_u32 size, emu_u32 write, int atomic) {
  Worker *w = f->worker;
  emu_u32 slot = (emu_u32)((address - w->arena) >> ARRAY_BITS);
  const Array *array = &w->array[slot];
  emu_u64 at = address - array->start;
  if (address < array->start || at + size > array->size)
    fail_access(f, ARRAY_BOUNDS, address, size, write, slot, array->start);
  if (write)
    w->counters.threadgroup_written += size;
  else
    w->counters.threadgroup_read += size;
  if (atomic) return;
  at += array->offset;
  for (emu_u64 i = at >> w->granule; i <= (at + size - 1) >> w->granule; i++)
    touch(f, &w->shadow[i], address, size, write, slot);
}

static void touch_buffer(Fiber *f, emu_u64 address, emu_u32 size, emu_u32 write) {
  Worker *w = f->worker;
  emu_u32 number = (emu_u32)((address - w->heap) >> SLOT_BITS);
  const Slot *slot = &w->slot[number];
  if (address < slot->low || address + size > slot->high)
    fail_access(f, BUFFER_BOUNDS, address, size, write, number, slot->low);
  if (write && !slot->writable) fail_access(f, READ_ONLY, address, size, write, number, slot->low);
  if (write)
    w->counters.device_written += size;
  else if (slot->writable)
    w->counters.device_read += size;
  else
    w->counters.inline_read += size;
}

static inline void access(Fiber *f, emu_u64 address, emu_u32 size, emu_u32 write, int atomic) {
  Worker *w = f->worker;
  emu_u64 base = (emu_u64)f & -(emu_u64)STACK;
  if (address - base < STACK) {
    if (address - base < EMU_LANES * RECORD) fail(f, STACK_OVERFLOW);
    return;
  }
  if (f->pending) settle(f);
  if (address & (size - 1)) fail_access(f, MISALIGNED, address, size, write, 0, 0);
  if (address - w->arena < (emu_u64)ARRAYS << ARRAY_BITS)
    touch_array(f, address, size, write, atomic);
  else if (address - w->heap < (emu_u64)w->slots << SLOT_BITS)
    touch_buffer(f, address, size, write);
  else if (address - w->image_low >= w->image_high - w->image_low)
    fail_access(f, WILD, address, size, write, 0, 0);
}

#define CALLBACKS(size)                                   \
  void __sanitizer_cov_load##size(const void *address) {  \
    access(self(), (emu_u64)address, size, 0, 0);         \
  }                                                       \
  void __sanitizer_cov_store##size(const void *address) { \
    access(self(), (emu_u64)address, size, 1, 0);         \
  }
CALLBACKS(1)
CALLBACKS(2)
CALLBACKS(4)
CALLBACKS(8)
CALLBACKS(16)

void emu_require(const void *object, emu_u32 size) {
  Fiber *f = self();
  emu_u64 address = (emu_u64)object;
  emu_u32 number = (emu_u32)((address - f->worker->heap) >> SLOT_BITS);
  const Slot *slot = &f->worker->slot[number];
  if (address + size > slot->high)
    fail_access(f, BUFFER_BOUNDS, address, size, 0, number, slot->low);
}

void emu_atomic_access(const volatile void *address, emu_u32 size) {
  access(self(), (emu_u64)address, size, 0, 1);
  access(self(), (emu_u64)address, size, 1, 1);
}

#define UNDEFINED_BEHAVIOUR(name)                    \
  void __ubsan_handle_##name##_minimal_abort(void) { \
    self()->worker->report.detail = #name;           \
    fail(self(), UNDEFINED);                         \
  }
UNDEFINED_BEHAVIOUR(add_overflow)
UNDEFINED_BEHAVIOUR(alignment_assumption)
UNDEFINED_BEHAVIOUR(builtin_unreachable)
UNDEFINED_BEHAVIOUR(divrem_overflow)
UNDEFINED_BEHAVIOUR(float_cast_overflow)
UNDEFINED_BEHAVIOUR(invalid_builtin)
UNDEFINED_BEHAVIOUR(load_invalid_value)
UNDEFINED_BEHAVIOUR(local_out_of_bounds)
UNDEFINED_BEHAVIOUR(missing_return)
UNDEFINED_BEHAVIOUR(mul_overflow)
UNDEFINED_BEHAVIOUR(negate_overflow)
UNDEFINED_BEHAVIOUR(nonnull_arg)
UNDEFINED_BEHAVIOUR(out_of_bounds)
UNDEFINED_BEHAVIOUR(pointer_overflow)
UNDEFINED_BEHAVIOUR(shift_out_of_bounds)
UNDEFINED_BEHAVIOUR(sub_overflow)
UNDEFINED_BEHAVIOUR(type_mismatch)

// Not in every compiler's own library.
__bf16 __truncsfbf2(float value) {
  emu_u32 bits = __builtin_bit_cast(emu_u32, value);
  emu_u32 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  if ((bits & 0x7fffffff) > 0x7f800000) rounded = bits >> 16 | 0x40;
  return __builtin_bit_cast(__bf16, (emu_u16)rounded);
}

// ---- A launch

__attribute__((noinline, noreturn)) static void start(void) {
  Fiber *f = self();
  void *buffers[BUFFERS];
  emu_u32 builtins[EMU_BUILTINS][3];
  copy(buffers, f->worker->buffers, sizeof buffers);  // a kernel may read its own stack only
  copy(builtins, f->builtins, sizeof builtins);
  f->worker->entry(buffers, builtins);
  if (f->pending) settle(f);
  f->simd->run &= ~(1u << f->lane);
  next(f);
  __builtin_unreachable();
}

static void set(emu_u32 to[3], emu_u32 x, emu_u32 y, emu_u32 z) {
  to[0] = x;
  to[1] = y;
  to[2] = z;
}

static void prepare(Worker *w, emu_u32 thread, const emu_u32 groups[3], const emu_u32 extent[3]) {
  emu_u64 base = w->stacks + (emu_u64)thread * STACK;
  Fiber *f = record(base);
  void **stack = (void **)(base + STACK - (thread % 64) * 320 - 64) - FRAME;
  for (int i = 0; i < FRAME; i++) stack[i] = 0;
  stack[RETURN] = (void *)start;
  f->worker = w;
  f->simd = &w->simd[thread / EMU_LANES];
  f->stack = stack;
  f->thread = thread;
  f->lane = thread % EMU_LANES;
  f->pending = 0;
  f->site = (emu_site){0, 0, 0};
  emu_u32 x = thread % extent[0], y = thread / extent[0] % extent[1];
  emu_u32 z = thread / (extent[0] * extent[1]);
  const emu_u32 *at = w->position, *full = w->group;
  emu_u32 whole = (full[0] * full[1] * full[2] + EMU_LANES - 1) / EMU_LANES;
  emu_u32(*b)[3] = f->builtins;  // in the order of BUILTINS in rewriter.py
  set(b[0], at[0] * full[0] + x, at[1] * full[1] + y, at[2] * full[2] + z);
  set(b[1], x, y, z);
  set(b[2], thread, 0, 0);
  set(b[3], at[0], at[1], at[2]);
  set(b[4], groups[0], groups[1], groups[2]);
  set(b[5], w->threads[0], w->threads[1], w->threads[2]);
  set(b[6], extent[0], extent[1], extent[2]);
  set(b[7], full[0], full[1], full[2]);
  set(b[8], f->lane, 0, 0);
  set(b[9], thread / EMU_LANES, 0, 0);
  set(b[10], w->simdgroups, 0, 0);
  set(b[11], whole, 0, 0);
  set(b[12], EMU_LANES, 0, 0);
}

static void run_threadgroup(Worker *w, const emu_u32 groups[3]) {
  emu_u32 extent[3];
  for (int i = 0; i < 3; i++) {
    emu_u32 left = w->threads[i] - w->position[i] * w->group[i];
    extent[i] = left < w->group[i] ? left : w->group[i];
  }
  w->count = extent[0] * extent[1] * extent[2];
  w->simdgroups = (w->count + EMU_LANES - 1) / EMU_LANES;
  w->blocked = 0;
  w->epoch++;
  w->counters.threadgroups++;
  for (emu_u32 i = 0; i < w->simdgroups; i++) {
    Simd *s = &w->simd[i];
    emu_u32 lanes = w->count - i * EMU_LANES;
    s->exists = s->run = lanes >= EMU_LANES ? ~0u : (1u << lanes) - 1;
    s->waiting = s->at_barrier = s->epoch = 0;
  }
  for (emu_u32 i = 0; i < ARRAYS; i++)
    for (emu_u64 j = 0; j < w->array[i].size; j++) ((emu_u8 *)w->array[i].start)[j] = 0xff;
  for (emu_u32 t = 0; t < w->count; t++) prepare(w, t, groups, extent);
  emu_u32 first = choose(w, busy(w));
  jump(&w->home, fiber(w, first * EMU_LANES + choose(w, w->simd[first].run))->stack);
}

#define PUBLIC __attribute__((visibility("default")))

PUBLIC void emu_run(Worker *w) {
  emu_u32 groups[3];
  for (int i = 0; i < 3; i++) groups[i] = (w->threads[i] + w->group[i] - 1) / w->group[i];
  emu_u32 total = groups[0] * groups[1] * groups[2];
  w->random = w->seed * 2654435761u + 1;
  w->image_low = (emu_u64)__ehdr_start;
  w->image_high = (emu_u64)_end;
  for (emu_u32 i = w->first; i < total && !w->report.kind; i += w->step) {
    emu_u32 at = w->schedule == REVERSED ? total - 1 - i : i;
    set(w->position, at % groups[0], at / groups[0] % groups[1], at / (groups[0] * groups[1]));
    run_threadgroup(w, groups);
  }
}

PUBLIC emu_u64 emu_worker_size(void) { return sizeof(Worker); }

extern const emu_array_info __start_emu_arrays[] __attribute__((weak, visibility("hidden")));
extern const emu_array_info __stop_emu_arrays[] __attribute__((weak, visibility("hidden")));

PUBLIC const emu_array_info *emu_arrays(emu_u32 *count) {
  *count = (emu_u32)(__stop_emu_arrays - __start_emu_arrays);
  return __start_emu_arrays;
}
