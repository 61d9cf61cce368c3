// A multiprocessor on the CPU: stands in for primitives.cuh, so that a kernel of one block at a time runs as threads.
//
// Barriers, warps and the copy engine behave as PTX has them; copies land late and out of order. What a GPU would not
// forgive ends the run with a message: a copy outside of its buffers or not aligned, one arrival too many, a hang.
// Macro: PATIENCE (seconds until a wait is a hang).

#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__
#define __launch_bounds__(threads, blocks)
#define asm
#define volatile(...) instruction(#__VA_ARGS__)  // `asm volatile(...)`, the only use that kernels make of the word

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
enum { LINEAR, SILU, GELU_TANH, RELU, GELU, RELU2 };
constexpr int WARP = 32;

struct uint4 { u32 x, y, z, w; };
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
struct Index { int x; };
inline thread_local Index threadIdx;
inline Index blockIdx, gridDim;
using std::max;
using std::min;

[[noreturn]] inline void fault(const char* what) {
    printf("%s: block %d, thread %d\n", what, blockIdx.x, threadIdx.x);
    fflush(stdout);
    _exit(1);
}

// Threads that meet.

typedef std::unique_ptr<std::barrier<>> Meeting;
inline Meeting block, consumers;
inline std::vector<Meeting> warps;
inline float given[64][WARP];

inline void __syncthreads() { block->arrive_and_wait(); }
inline void __syncwarp() { warps[threadIdx.x / WARP]->arrive_and_wait(); }
inline void instruction(const char* text) {
    if (strstr(text, "bar.sync 1,")) consumers->arrive_and_wait();
}

inline float __shfl_xor_sync(u32, float value, int apart) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    given[warp][lane] = value;
    __syncwarp();
    const float taken = given[warp][lane ^ apart];
    __syncwarp();
    return taken;
}

inline float sum_of_warp(float sum) {
    for (int apart = 1; apart < WARP; apart *= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    return sum;
}

// Barriers in shared memory ("mbarrier").

struct Barrier {
    u32 count, pending;
    long long bytes = 0;
    u64 phase = 0;
};
inline std::map<const void*, Barrier> barriers;
inline std::mutex lock;
inline std::condition_variable changed;
constexpr auto HANG = std::chrono::seconds(PATIENCE);

inline void change(const void* at, u32 arrivals, long long bytes) {  // under the lock
    Barrier& barrier = barriers.at(at);
    if (arrivals > barrier.pending) fault("arrives too often");
    barrier.pending -= arrivals;
    barrier.bytes += bytes;
    if (barrier.pending || barrier.bytes) return;
    barrier.pending = barrier.count;
    barrier.phase++;
    changed.notify_all();
}

template <class Time>
bool passes(const void* at, u32 parity, Time time) {
    std::unique_lock held(lock);
    return changed.wait_for(held, time, [&] { return barriers.at(at).phase % 2 != parity; });
}

inline void barrier_init(u64* at, u32 count) { barriers[at] = {count, count}; }
inline void barrier_wait(u64* at, u32 parity) {
    if (!passes(at, parity, HANG)) fault("hangs");
}
inline bool barrier_passed(u64* at, u32 parity, u32) {
    static thread_local int tries = 0;
    const auto some_time = std::chrono::microseconds(50);
    const bool passed = passes(at, parity, some_time);
    tries = passed ? 0 : tries + 1;
    if (tries > HANG / some_time) fault("hangs");
    return passed;
}
inline void barrier_expect(u64* at, u32 bytes) {
    const std::lock_guard held(lock);
    change(at, 1, bytes);
}
inline void barrier_arrive(u64* at) {
    const std::lock_guard held(lock);
    change(at, 1, 0);
}
inline void release(u64* empty) {
    if (threadIdx.x % WARP == 0) barrier_arrive(empty);
}

// The copy engine.

typedef std::pair<const char*, size_t> Stretch;
struct Copy {
    void* to;
    const void* from;
    u32 bytes;
    u64* barrier;
};
inline std::vector<Stretch> readable;
inline Stretch ring_memory;
inline std::vector<Copy> copies;
inline u64 bytes_read;
inline int announced;

inline bool within(const void* from, u32 bytes, Stretch stretch) {
    return from >= stretch.first && (const char*)from + bytes <= stretch.first + stretch.second;
}

inline void check_source(const void* from, u32 bytes) {
    if ((uintptr_t)from % 16 || bytes % 16 || bytes == 0) fault("copies what is not aligned");
    if (std::none_of(readable.begin(), readable.end(), [&](Stretch one) { return within(from, bytes, one); }))
        fault("reads outside");
}

inline u32 address(const void* shared) { return (u32)(uintptr_t)shared; }
inline u64 evict_first() { return 0; }
inline void prefetch_bytes(const void* from, u32 bytes) { check_source(from, bytes); }
inline void load_bytes_once(void* to, const void* from, u32 bytes, u64* barrier, u64) {
    check_source(from, bytes);
    if ((uintptr_t)to % 16 || !within(to, bytes, ring_memory)) fault("writes outside");
    const std::lock_guard held(lock);
    bytes_read += bytes;
    copies.push_back({to, from, bytes, barrier});
}

// One copy, if there is any.
inline bool copy_one(std::mt19937& random) {
    const std::lock_guard held(lock);
    if (copies.empty()) return false;
    std::swap(copies[random() % copies.size()], copies.back());
    const Copy copy = copies.back();
    copies.pop_back();
    memcpy(copy.to, copy.from, copy.bytes);
    change(copy.barrier, 0, -(long long)copy.bytes);
    return true;
}

inline void wait_for_predecessor() {}
inline void launch_dependents() { announced++; }
inline long long clock64() { return std::chrono::steady_clock::now().time_since_epoch().count() * 2; }  // at 2 GHz

// Numbers: bf16.

inline float widened(u16 bits) {
    const u32 wide = (u32)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}
inline float low_of(u32 pair) { return widened(pair & 0xFFFF); }
inline float high_of(u32 pair) { return widened(pair >> 16); }
inline u16 rounded(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    return std::isnan(value) ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline u32 packed(float low, float high) { return rounded(low) | (u32)rounded(high) << 16; }
inline float rsqrtf(float value) { return 1 / std::sqrt(value); }
inline float activated(float gate) { return gate / (1 + std::exp(-gate)); }  // SiLU

inline char memory[1 << 18];
