// What this machine executes, and which of the compiled instruction sets serves.
#include <stdint.h>
#include <string.h>

#include <atomic>

#include "engine.h"
#include "status.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace orchard {
namespace {

#if defined(__x86_64__)

struct X86 {
  bool avx2, avx512, avx512_bf16;
};

constexpr bool has(uint32_t word, int bit) { return (word >> bit) & 1; }

// Which registers the system saves when it switches threads.
uint64_t saved_state() {
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t{high} << 32 | low;
}

X86 x86() {
  X86 found{};
  uint32_t a, b, c, d;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return found;
  const bool xsave = has(c, 27), avx = has(c, 28), fma = has(c, 12), f16c = has(c, 29);
  if (!xsave || !avx || !fma || !f16c) return found;
  const uint64_t state = saved_state();
  if ((state & 0x6) != 0x6 || __get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return found;
  const uint32_t subleaves = a;
  found.avx2 = has(b, 5);
  found.avx512 =
      found.avx2 && (state & 0xe0) == 0xe0 && has(b, 16) && has(b, 17) && has(b, 30) && has(b, 31);
  const bool vnni = has(c, 11);
  if (found.avx512 && vnni && subleaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0)
    found.avx512_bf16 = has(a, 5);
  return found;
}

[[maybe_unused]] bool runs_avx2() { return x86().avx2; }
[[maybe_unused]] bool runs_avx512() { return x86().avx512; }
[[maybe_unused]] bool runs_avx512_bf16() { return x86().avx512_bf16; }

#elif defined(__aarch64__)

[[maybe_unused]] bool runs_neon() { return true; }

[[maybe_unused]] bool runs_neon_bf16() {
#if defined(__linux__)
  constexpr unsigned long fphp = 1ul << 9, asimdhp = 1ul << 10, bf16 = 1ul << 14;
  return (getauxval(AT_HWCAP) & (fphp | asimdhp)) == (fphp | asimdhp) &&
         (getauxval(AT_HWCAP2) & bf16) != 0;
#elif defined(__APPLE__)
  int found = 0;
  size_t size = sizeof(found);
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &found, &size, nullptr, 0) == 0 && found != 0;
#else
  return false;
#endif
}

#endif

bool runs_portable() { return true; }

struct Variant {
  const char *name;
  bool (*runs)();
  const Kernels &(*kernels)() noexcept;
};

// Best first.
constexpr Variant kVariants[] = {
#if defined(ORCHARD_HAVE_AVX512_BF16)
    {"avx512_bf16", runs_avx512_bf16, kernels_avx512_bf16},
#endif
#if defined(ORCHARD_HAVE_AVX512)
    {"avx512", runs_avx512, kernels_avx512},
#endif
#if defined(ORCHARD_HAVE_AVX2)
    {"avx2", runs_avx2, kernels_avx2},
#endif
#if defined(ORCHARD_HAVE_NEON_BF16)
    {"neon_bf16", runs_neon_bf16, kernels_neon_bf16},
#endif
#if defined(ORCHARD_HAVE_NEON)
    {"neon", runs_neon, kernels_neon},
#endif
    {"portable", runs_portable, kernels_portable},
};

struct Machine {
  bool runs[sizeof(kVariants) / sizeof(kVariants[0])] = {};
  const Variant *best = nullptr;
  char compiled[128] = "", available[128] = "";

  Machine() {
    size_t index = 0;
    for (const Variant &variant : kVariants) {
      append(compiled, variant.name);
      if ((runs[index++] = variant.runs())) {
        append(available, variant.name);
        if (best == nullptr) best = &variant;
      }
    }
  }

 private:
  static void append(char (&list)[128], const char *name) {
    if (list[0] != '\0') strcat(list, ",");
    strcat(list, name);
  }
};

// Asked at load time; a lock here could be met half way by a fork.
const Machine machine;
constinit std::atomic<const Variant *> chosen{nullptr};  // nullptr: the best

const Variant &current() {
  const Variant *variant = chosen.load(std::memory_order_relaxed);
  return variant != nullptr ? *variant : *machine.best;
}

}  // namespace

const Kernels &current_kernels() noexcept { return current().kernels(); }

}  // namespace orchard

const char *orchard_isa_compiled(void) { return orchard::machine.compiled; }
const char *orchard_isa_available(void) { return orchard::machine.available; }
const char *orchard_isa(void) { return orchard::current().name; }

int orchard_select_isa(const char *name) {
  using namespace orchard;
  if (name == nullptr) {
    chosen.store(nullptr, std::memory_order_relaxed);
    return succeed();
  }
  size_t index = 0;
  for (const Variant &variant : kVariants) {
    const bool runs = machine.runs[index++];
    if (strcmp(name, variant.name) != 0) continue;
    if (!runs)
      return fail(ORCHARD_INVALID_ARGUMENT, "this machine does not run '%s'; it runs %s",
                  variant.name, machine.available);
    chosen.store(&variant, std::memory_order_relaxed);
    return succeed();
  }
  return fail(ORCHARD_INVALID_ARGUMENT,
              "no instruction set '%.40s' is compiled in; this machine runs %s", name,
              machine.available);
}
