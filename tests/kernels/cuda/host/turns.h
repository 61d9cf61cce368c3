// The threads of a grid take turns on one thread of the CPU: each runs until it waits.
//
// Who comes next is random, by a seed; threads, warps and blocks nap, so that others run ahead of them as far as the
// kernel lets them. A fault ends the run with a message.

#include <setjmp.h>
#include <stdio.h>
#include <ucontext.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;

struct Index { u32 x; };
inline Index threadIdx, blockIdx, gridDim;  // whose turn it is

namespace turns {

constexpr u32 STACK = 1 << 16;
constexpr char UNUSED = 0x55;    // at its end
constexpr u32 LANES = 32;        // of a warp
constexpr u32 LONGEST = 5000;    // rounds that a nap takes
constexpr u32 PATIENCE = 10000;  // rounds in which nothing happens, until that is a hang

struct Thread {
    u32 block, index, nap = 0;
    u32 exchanges = 0;             // that its warp has made
    const u64* watched = nullptr;  // it waits until that is no longer `seen`
    u64 seen = 0;
    bool begun = false, over = false;
    bool waited = false;  // for the kernel in front
    jmp_buf here;
    std::unique_ptr<char[]> stack{new char[STACK]};  // not written before it is needed
};

inline std::vector<Thread> threads;
inline std::vector<u32> order, naps;  // of threads; rounds for which each warp of the grid naps
inline void (*kernel)();
inline Thread* self;  // null: between turns
inline jmp_buf between, outside;
inline char message[200];
inline u32 left;    // threads that are not over
inline u64 events;  // whatever may be what somebody waits for
inline u64 state;

inline u32 random(u32 below) {  // xorshift64
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (u32)(state >> 32) % below;
}

[[noreturn]] inline void fault(const char* what) {
    snprintf(message, sizeof message, "%s: block %u, thread %u", what, blockIdx.x, threadIdx.x);
    _longjmp(outside, 1);
}

inline void pause() {
    if (!_setjmp(self->here)) _longjmp(between, 1);
}

inline void await_change(const u64& of, u64 from) {
    self->watched = &of, self->seen = from;
    while (of == from) pause();
    self->watched = nullptr;
}

struct Meeting {
    u32 expected = 0, there = 0;
    u64 times = 0;

    void arrive_and_wait() {
        events++;
        const u64 before = times;
        if (++there == expected)
            there = 0, times++;
        else
            await_change(times, before);
    }
};

inline void begin() {
    kernel();
    self->over = true;
    if (self->stack[0] != UNUSED) fault("leaves its stack");
    left--, events++;
    _longjmp(between, 1);
}

inline void take_turn(Thread& thread) {
    self = &thread, blockIdx.x = thread.block, threadIdx.x = thread.index;
    if (_setjmp(between)) return;
    if (thread.begun) _longjmp(thread.here, 1);
    thread.begun = true;
    ucontext_t context;
    getcontext(&context);
    thread.stack[0] = UNUSED;
    context.uc_stack.ss_sp = thread.stack.get(), context.uc_stack.ss_size = STACK;
    makecontext(&context, begin, 0);
    setcontext(&context);
}

inline void nap(u32 first, u32 count, u32 rounds) { std::fill_n(naps.begin() + first, count, rounds); }

inline void begin_naps() {
    for (u32& rounds : naps) rounds -= rounds > 0;
    const u32 warps = naps.size() / gridDim.x;
    if (random(32) == 0) nap(random(naps.size()), 1, random(300));
    if (random(512) == 0) nap(random(gridDim.x) * warps, warps, random(random(8) ? 500 : LONGEST));
}

inline bool naps_now(Thread& thread, u32 warp) {
    if (naps[warp]) return true;
    if (thread.nap) return thread.nap--;
    if (random(64) == 0) thread.nap = random(16);
    return false;
}

// One turn for everybody who waits for nothing.
inline void take_turns() {
    begin_naps();
    if (random(16) == 0)
        for (u32 i = order.size(); i > 1; i--) std::swap(order[i - 1], order[random(i)]);
    const u32 first = random(order.size());
    for (u32 i = 0; i < order.size(); i++) {
        const u32 index = order[(first + i) % order.size()];
        Thread& thread = threads[index];
        const bool waits = thread.watched && *thread.watched == thread.seen;
        if (!thread.over && !waits && !naps_now(thread, index / LANES)) take_turn(thread);
    }
    self = nullptr;
}

// Runs `entry` on every thread of the grid, `between_rounds` again and again, and `after` when all are over. Returns
// what went wrong, or nothing.
template <class Between, class After>
const char* run(u32 blocks, u32 threads_of_block, u64 seed, void (*entry)(), Between between_rounds, After after) {
    gridDim.x = blocks, kernel = entry, state = seed * 2654435769u + 1;
    threads.clear(), order.clear(), naps.assign(blocks * threads_of_block / LANES, 0), message[0] = 0;
    left = blocks * threads_of_block;
    for (u32 i = 0; i < left; i++) {
        order.push_back(i);
        threads.emplace_back();
        threads.back().block = i / threads_of_block, threads.back().index = i % threads_of_block;
    }
    if (_setjmp(outside)) return message;
    for (u32 quiet = 0; left;) {
        const u64 before = events;
        take_turns();
        between_rounds();
        quiet = events == before ? quiet + 1 : 0;
        if (quiet > PATIENCE) fault("hangs");
    }
    after();
    return message;
}

}  // namespace turns
