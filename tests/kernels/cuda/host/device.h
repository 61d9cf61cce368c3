// Multiprocessors on the CPU, in place of what is written in PTX: the threads of a grid take turns.
//
// Barriers, warps and the copy engine behave as PTX has them; copies, and words for other blocks, land late and out of
// order. What a GPU would not forgive ends the run with a message: a copy outside of its buffers or not aligned, an
// index outside of its array, one arrival too many, a hang.
// Macros: IS_BF16.

#include "turns.h"

#include <math.h>
#include <string.h>

#include <map>
#include <utility>

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(threads, blocks)
#define asm
#define volatile(...)  // `asm volatile(...)`: fences between the threads and the copy engine

typedef unsigned short u16;
using std::max;
using std::min;
using turns::fault;

struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

namespace device {

using turns::LANES;
constexpr u32 GUARD = 256, ALIGNING = 1024;

struct Warp {
    turns::Meeting meeting;
    alignas(16) char given[2][LANES][32];
};

struct Block {
    std::vector<char> memory;  // and a guard behind it
    turns::Meeting all, consumers;
    std::vector<Warp> warps;
};

inline std::vector<Block> blocks;
inline Block& block() { return blocks[blockIdx.x]; }
// Where its shared memory begins: at a multiple of 1024 bytes in every block.
inline char* aligned(Block& block) { return block.memory.data() + (1024 - (u64)block.memory.data() % 1024) % 1024; }
inline char* shared_memory() { return aligned(block()); }
inline Warp& warp() { return block().warps[threadIdx.x / LANES]; }

// What each lane of the warp gives. Valid until the warp exchanges again: lanes are never two exchanges apart.
template <class T>
const T* of_all_lanes(T own) {
    T* given = (T*)warp().given[turns::self->exchanges++ % 2];
    given[threadIdx.x % LANES] = own;
    warp().meeting.arrive_and_wait();
    return given;
}

}  // namespace device

// Threads that meet.

inline void __syncthreads() { device::block().all.arrive_and_wait(); }
inline void __syncwarp() { device::warp().meeting.arrive_and_wait(); }
inline void sync_consumers() { device::block().consumers.arrive_and_wait(); }

namespace device {

inline u32 cluster = 1;  // blocks
inline std::vector<turns::Meeting> clusters;

}  // namespace device

inline void sync_cluster() { device::clusters[blockIdx.x / device::cluster].arrive_and_wait(); }
inline float of_block(const float* own, u32 rank) {
    if (rank >= device::cluster) fault("reads outside of its cluster");
    device::Block& other = device::blocks[blockIdx.x / device::cluster * device::cluster + rank];
    return *(const float*)(device::aligned(other) + ((const char*)own - device::aligned(device::block())));
}

template <class T>
T __shfl_xor_sync(u32, T value, int apart) { return device::of_all_lanes(value)[threadIdx.x % device::LANES ^ apart]; }

template <class T>
T __shfl_down_sync(u32, T value, u32 apart) {
    const u32 lane = threadIdx.x % device::LANES;
    return device::of_all_lanes(value)[lane + apart < device::LANES ? lane + apart : lane];
}

template <class T>
T __ldcg(const T* at) { return *at; }

// Barriers in shared memory ("mbarrier").

namespace device {

struct Barrier {
    u32 count, pending;
    long long bytes = 0;
    u64 phase = 0;
};
inline std::map<const void*, Barrier> barriers;

inline void change(const void* at, u32 arrivals, long long bytes) {
    Barrier& barrier = barriers.at(at);
    if (arrivals > barrier.pending) fault("arrives too often");
    barrier.pending -= arrivals;
    barrier.bytes += bytes;
    turns::events++;
    if (barrier.pending || barrier.bytes) return;
    barrier.pending = barrier.count;
    barrier.phase++;
}

}  // namespace device

inline void barrier_init(u64* at, u32 count) { device::barriers[at] = {count, count}; }
inline void barrier_expect(u64* at, u32 bytes) { device::change(at, 1, bytes); }
inline void barrier_arrive(u64* at) { device::change(at, 1, 0); }
inline void loads_have_come(u32) {}  // here they always have: see test_compile.py
inline bool barrier_passed(u64* at, u32 parity, u32) {
    turns::pause();
    return device::barriers.at(at).phase % 2 != parity;
}
inline void barrier_wait(u64* at, u32 parity) {
    const u64& phase = device::barriers.at(at).phase;
    while (phase % 2 == parity) turns::await_change(phase, phase);
}

// The copy engine.

namespace device {

struct Memory {
    const char* from;
    u64 bytes;
    bool complete;  // before the kernel in front has ended

    bool holds(const void* at, u64 some) const {
        return at >= from && (const char*)at + some <= from + bytes;
    }
};
struct Copy {
    void* to;
    const void* from;
    u32 bytes;
    u64* barrier;
    std::vector<std::pair<char*, const char*>> pieces;  // of a tile, 16 bytes each; null: zeros
};
inline std::vector<Memory> readable;
inline std::vector<Memory> rings;  // of blocks
inline std::vector<Copy> copies;
inline u64 bytes_read;

inline void check_source(const void* from, u32 bytes) {
    if ((u64)from % 16 || bytes % 16 || bytes == 0) fault("copies what is not aligned");
    if (std::none_of(readable.begin(), readable.end(), [&](Memory one) { return one.holds(from, bytes); }))
        fault("reads outside");
}

inline void count_read(const void* from, u32 bytes) {
    check_source(from, bytes);
    const auto there = [&](Memory one) { return one.holds(from, bytes) && (one.complete || turns::self->waited); };
    if (std::none_of(readable.begin(), readable.end(), there)) fault("reads too early");
    bytes_read += bytes;
}

inline void land_a_copy() {
    if (copies.empty() || turns::random(4)) return;
    std::swap(copies[turns::random(copies.size())], copies.back());
    const Copy copy = copies.back();
    copies.pop_back();
    if (copy.pieces.empty()) memcpy(copy.to, copy.from, copy.bytes);
    for (const auto& [to, from] : copy.pieces) from ? memcpy(to, from, 16) : memset(to, 0, 16);
    change(copy.barrier, 0, -(long long)copy.bytes);
}

}  // namespace device

inline u64 evict_first() { return 0; }
inline void prefetch_bytes(const void* from, u32 bytes) { device::check_source(from, bytes); }
inline void load_bytes_once(void* to, const void* from, u32 bytes, u64* barrier, u64) {
    device::count_read(from, bytes);
    if ((u64)to % 16 || !device::rings[blockIdx.x].holds(to, bytes)) fault("writes outside");
    device::copies.push_back({to, from, bytes, barrier});
}

// Tiles of a matrix, as the swizzle of 128 bytes leaves them. A map is what tests/kernels/cuda/on_host.py makes.

namespace device {

struct Map {
    const char* from;
    u64 rows, columns, stride;  // elements, the stride bytes
    u32 box_rows, box_columns;
};

}  // namespace device

inline void prefetch_map(const void*) {}
inline void load_tile(void* to, const void* opaque, int column, int row, u64* barrier) {
    const device::Map& map = *(const device::Map*)opaque;
    const u32 bytes = map.box_rows * map.box_columns * 2;
    if ((u64)to % 128 || !device::rings[blockIdx.x].holds(to, bytes)) fault("writes outside");
    device::Copy copy = {to, nullptr, bytes, barrier};
    for (u32 at = 0; at < bytes; at += 16) {
        const u64 place = (char*)to + at - device::aligned(device::block());
        const u64 r = row + at / (2 * map.box_columns), c = column + at / 2 % map.box_columns;
        const char* from = r < map.rows && c < map.columns ? map.from + r * map.stride + c * 2 : nullptr;
        if (from) device::count_read(from, 16);
        copy.pieces.push_back({device::aligned(device::block()) + (place ^ place / 128 % 8 * 16), from});
    }
    device::copies.push_back(copy);
}

// Words that blocks write for each other. Those of one address land in order; and those of a block, at its fences.

namespace device {

struct Word {
    u64 *to, data;
    u32 block;
};
inline std::vector<Word> words;

template <class Which>
void land_words(Which which) {
    const auto landed = [&](const Word& word) {
        if (!which(word)) return false;
        *word.to = word.data;
        turns::events++;
        return true;
    };
    words.erase(std::remove_if(words.begin(), words.end(), landed), words.end());
}

}  // namespace device

inline void put_word(u64* to, u32 data, u32 epoch) {
    device::land_words([&](const device::Word& word) { return word.to == to; });
    device::words.push_back({to, (u64)epoch << 32 | data, blockIdx.x});
}
inline void load_words(const u64* from, u64& low, u64& high) {
    turns::pause();
    low = from[0], high = from[1];
}
inline void __threadfence() {
    device::land_words([](const device::Word& word) { return word.block == blockIdx.x; });
}
inline u64 atomicMax(u64* at, u64 value) { return std::exchange(*at, max(*at, value)); }
inline u64 atomicExch(u64* at, u64 value) { return std::exchange(*at, value); }
inline u32 atomicAdd(u32* at, u32 value) { return std::exchange(*at, *at + value); }

inline u32 announced;
inline bool hasty;  // somebody announced before its own wait
inline void wait_for_predecessor() { turns::self->waited = true; }
inline void launch_dependents() { announced++, hasty |= !turns::self->waited; }
inline long long clock64() {
    static long long cycles = 0;
    return cycles += 10;
}

// Numbers.

template <class To, class From>
To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline u32 __float_as_uint(float value) { return same_bits<u32>(value); }
inline float __uint_as_float(u32 bits) { return same_bits<float>(bits); }
inline float __int_as_float(int bits) { return same_bits<float>(bits); }
inline float rsqrtf(float value) { return 1 / sqrtf(value); }
inline float __expf(float value) { return expf(value); }
inline float exp2_of(float value) { return exp2f(value); }
inline float __fdividef(float of, float by) { return of / by; }
inline u32 __cvta_generic_to_shared(const void* shared) { return (u32)(u64)shared; }

inline u16 to_half(float value) {
    const u16 sign = signbit(value) ? 0x8000 : 0;
    value = fabsf(value);
    if (!(value < 65520)) return sign | (isnan(value) ? 0x7FFF : 0x7C00);
    const int exponent = value < 0x1p-14f ? -14 : ilogbf(value);
    return sign | (exponent + 14) * 1024 + (int)nearbyintf(ldexpf(value, 10 - exponent));
}
inline float from_half(u16 bits) {
    const int exponent = bits >> 10 & 31, rest = bits & 1023;
    const float value = exponent ? ldexpf(1024 + rest, exponent - 25) : ldexpf(rest, -24);
    return copysignf(exponent < 31 ? value : rest ? NAN : INFINITY, bits >> 15 ? -1 : 1);
}
inline u16 to_bf16(float value) {
    const u32 bits = __float_as_uint(value);
    return isnan(value) ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline u16 narrowed(float value) { return IS_BF16 ? to_bf16(value) : to_half(value); }
inline float widened(u16 bits) { return IS_BF16 ? __uint_as_float((u32)bits << 16) : from_half(bits); }
inline u32 packed(float low, float high) { return narrowed(low) | (u32)narrowed(high) << 16; }

// The tensor cores: c += a b, by mma.m16n8k16. Lane 4 r + t has of a the rows r and r + 8, of b the column r, and of
// both the ks 2 t, 2 t + 1 and, in its second half, 2 t + 8, 2 t + 9; of c the columns 2 t and 2 t + 1 of its rows.
inline void multiply(float (&c)[4], const uint4& a, u32 b0, u32 b1) {
    struct Given { u32 a[2][2], b[2]; };  // a: by half of k and of rows
    const Given* given = device::of_all_lanes(Given{{{a.x, a.y}, {a.z, a.w}}, {b0, b1}});
    const u32 row = threadIdx.x % device::LANES / 4, column = threadIdx.x % 4 * 2;
    for (u32 i = 0; i < 4; i++)
        for (u32 k = 0; k < 8; k++) {
            const u32 left = given[4 * row + k % 4].a[k / 4][i / 2];
            const u32 right = given[4 * (column + i % 2) + k % 4].b[k / 4];
            c[i] += widened(left & 0xFFFF) * widened(right & 0xFFFF);
            c[i] += widened(left >> 16) * widened(right >> 16);
        }
}

// What the compiler puts before every index of an array.
extern "C" inline void __attribute__((used)) __ubsan_handle_out_of_bounds(void*, void*) {
    fault("indexes outside of an array");
}
