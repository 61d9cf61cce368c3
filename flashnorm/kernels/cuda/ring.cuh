// A ring of slots in shared memory that one thread fills with bulk copies and all the others read, in one order
// that both know: the stream never stops between one linear and the next, since weights do not wait for activations.
// Macros: STAGES, SLOT (bytes, a multiple of 128), WARPS, ON_THE_WAY (whole slots that are asked for at once: enough to
// keep memory busy; more would only make everybody else wait longer), TIMED (count what threads wait for).

constexpr int THREADS = WARP * WARPS;  // that consume
constexpr u32 SOME_TIME = 100;         // nanoseconds that the producing thread may sleep, for it takes time from others

// Cycles that the first consuming thread and the first producing one spend waiting, by what for, and in all.
enum Waiting { FOR_SLOT, FOR_WORDS, FOR_WARPS, FOR_MEMORY, FOR_ROOM, IN_ALL, WAITING };

struct Ring {
    alignas(128) char slots[STAGES][SLOT];
    u64 full[STAGES], empty[STAGES];
    u32 bytes[STAGES];  // asked for
    u64 waited[WAITING];

    __device__ __forceinline__ void init() {
        for (int slot = 0; slot < STAGES; slot++) {
            barrier_init(&full[slot], 1);
            barrier_init(&empty[slot], WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
};

template <class Wait>
__device__ __forceinline__ void timed(Ring& ring, Waiting what, Wait wait) {
    const long long begun = TIMED ? clock64() : 0;
    wait();
    if (TIMED && threadIdx.x % THREADS == 0) ring.waited[what] += clock64() - begun;
}

// One side's place in the ring.
struct Cursor {
    int slot = 0;
    u32 phase = 0;

    __device__ __forceinline__ void advance() {
        if (++slot == STAGES) slot = 0, phase ^= 1;
    }
};

// The producing thread's.
struct Filler {
    Ring& ring;
    Cursor at, coming;
    int slots = 0;  // that have been asked for and not been seen to come
    u32 bytes = 0;  // in them
    u64 policy = evict_first();

    // Until the next slot may be filled; `meanwhile`, again and again.
    template <class Meanwhile>
    __device__ __forceinline__ void await_room(Meanwhile meanwhile) {
        timed(ring, FOR_ROOM, [&] {
            while (!barrier_passed(&ring.empty[at.slot], at.phase ^ 1, SOME_TIME)) meanwhile();
        });
    }

    // Until so few bytes are on their way that `more` may be asked for.
    __device__ __forceinline__ void await_arrivals(u32 more) {
        timed(ring, FOR_MEMORY, [&] {
            while (slots == STAGES || (slots && bytes + more > ON_THE_WAY * SLOT)) {
                barrier_wait(&ring.full[coming.slot], coming.phase);
                slots--, bytes -= ring.bytes[coming.slot];
                coming.advance();
            }
        });
    }

    // The next slot comes: so many bytes, a multiple of 16.
    __device__ __forceinline__ void expect(u32 more) {
        barrier_expect(&ring.full[at.slot], more);
        slots++, bytes += ring.bytes[at.slot] = more;
    }

    // `more` of them, to `to`, a multiple of 16, in the slot.
    __device__ __forceinline__ void fill(u32 to, const void* from, u32 more) {
        load_bytes_once(ring.slots[at.slot] + to, from, more, &ring.full[at.slot], policy);
    }
};

__device__ __forceinline__ const char* await(Ring& ring, const Cursor& at) {
    timed(ring, FOR_SLOT, [&] { barrier_wait(&ring.full[at.slot], at.phase); });
    return ring.slots[at.slot];
}

// The warp has read all it needs of the slot. `read` is made from every load of it.
__device__ __forceinline__ void done(Ring& ring, Cursor& at, u32 read) {
    loads_have_come(read);
    __syncwarp();
    release(&ring.empty[at.slot]);
    at.advance();
}

__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }
