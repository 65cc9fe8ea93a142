#!/usr/bin/env bash
# The native tests in every build: plain, under each sanitizer, and for another architecture.
#
#   native/tests/run.sh [plain] [address] [thread] [aarch64]      without a name: all of them
set -euo pipefail
cd "$(dirname "$0")/../.."

jobs=$(getconf _NPROCESSORS_ONLN)

have() {
  local tool
  for tool in "$@"; do command -v "$tool" >/dev/null || return 1; done
}

# Tools, and after -- the Debian packages that bring them; false where nobody here may install.
need() {
  local tools=()
  while [[ $1 != -- ]]; do tools+=("$1") && shift; done
  have "${tools[@]}" && return
  if [[ $(id -u) != 0 ]] || ! have apt-get; then
    echo "notice: skipped, for ${tools[*]} are needed and apt-get is not at hand (${*:2})"
    return 1
  fi
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update --quiet=2 && apt-get install --quiet=2 --no-install-recommends "${@:2}"; } ||
    exit 1
}

# Builds the tests in build/native-NAME and runs those that $2 does not match, side by side.
build_and_test() {
  local name=$1 without=$2
  shift 2
  cmake -S native -B "build/native-$name" -DORCHARD_BUILD_TESTS=ON "$@" >"build/native-$name.log" ||
    { cat "build/native-$name.log" && return 1; }
  cmake --build "build/native-$name" --parallel "$jobs" >>"build/native-$name.log" ||
    { cat "build/native-$name.log" && return 1; }
  (cd "build/native-$name" && "${under[@]}" ctest --parallel "$jobs" --output-on-failure \
    --exclude-regex "$without")
}

plain() {
  build_and_test plain none
}

# At -O1: sanitizers make the kernels ten times larger, and the compiler slow with them.
address() {
  local fill=max_malloc_fill_size=1000000000:malloc_fill_byte=255  # with NaN
  ASAN_OPTIONS=detect_stack_use_after_return=1:$fill UBSAN_OPTIONS=print_stacktrace=1 \
    build_and_test address none -DORCHARD_SANITIZE='address;undefined' \
    -DCMAKE_CXX_FLAGS_RELEASE=-O1 -DORCHARD_DRIVER_ARGUMENTS=--quick \
    -DORCHARD_FUZZ_ARGUMENTS='--seconds;60'
}

# ThreadSanitizer wants memory where it expects it: without randomised addresses, where allowed.
thread() {
  if setarch -R true 2>/dev/null; then local under=(setarch -R); fi
  TSAN_OPTIONS=halt_on_error=1 \
    build_and_test thread none -DORCHARD_SANITIZE=thread -DCMAKE_CXX_FLAGS_RELEASE=-O1 \
    -DORCHARD_DRIVER_ARGUMENTS='--quick;--isa;best' -DORCHARD_FUZZ_ARGUMENTS='--runs;500'
}

# Without the pool's test: the emulator neither executes itself again nor limits memory.
aarch64() {
  need aarch64-linux-gnu-g++ qemu-aarch64 -- g++-aarch64-linux-gnu qemu-user || return 0
  build_and_test aarch64 '^pool$' -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
    -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
    -DCMAKE_CROSSCOMPILING_EMULATOR='qemu-aarch64;-cpu;max;-L;/usr/aarch64-linux-gnu' \
    -DORCHARD_DRIVER_ARGUMENTS='--quick;--isa;neon_bf16,neon,portable' \
    -DORCHARD_FUZZ_ARGUMENTS='--runs;200'
}

under=(env)
mkdir -p build
need cmake g++ make -- cmake g++ make || exit 0
if (($# == 0)); then set -- plain address thread aarch64; fi
for name in "$@"; do
  echo "== native tests: $name"
  started=$SECONDS
  "$name"
  echo "== native tests: $name took $((SECONDS - started)) s"
done
