// What kernels (C++, through shim.h) and the runtime (C) share.
#pragma once

typedef unsigned char emu_u8;
typedef unsigned short emu_u16;
typedef unsigned int emu_u32;
typedef unsigned long long emu_u64;

// Where in the source a collective stands.
typedef struct {
  const char *file;
  emu_u32 line, column;
} emu_site;

enum { EMU_REDUCTION, EMU_SHUFFLE, EMU_VOTE, EMU_MULTIPLY, EMU_SIMDGROUP_BARRIER };
enum { EMU_MEM_DEVICE = 1, EMU_MEM_THREADGROUP = 2 };
enum { EMU_LANES = 32, EMU_PAYLOAD = 32, EMU_BUILTINS = 13 };

// One threadgroup array of the kernel; the compiler collects them in a section.
typedef struct {
  emu_u32 slot, size, align, element;
} emu_array_info;

typedef emu_u64 emu_payload[EMU_PAYLOAD / 8];
typedef void (*emu_combine)(const emu_payload *in, emu_payload *out, emu_u32 lanes);

#ifdef __cplusplus
extern "C" {
#endif
// All active lanes of a simdgroup hand in a value; `combine` computes what each gets back.
void emu_exchange(const void *in, void *out, emu_u32 size, emu_combine combine, emu_u32 kind,
                  emu_site site);
// The value of lane `source`, for every lane its own.
void emu_shuffle(const void *in, void *out, emu_u32 size, emu_u32 source, emu_site site);
// d = a * b + c on 8x8 matrices, of which a lane holds two elements each.
void emu_multiply(const float a[2], const float b[2], const float c[2], float d[2], emu_site site);
void emu_simdgroup_barrier(emu_u32 flags, emu_site site);
void emu_threadgroup_barrier(emu_u32 flags, emu_site site);
void *emu_array(emu_u32 slot);
emu_u32 emu_lane(void);
// A reference parameter binds all of its object.
void emu_require(const void *object, emu_u32 size);
void emu_atomic_access(const volatile void *address, emu_u32 size);
#ifdef __cplusplus
}
#endif
