// How the blocks of one kernel hand vectors to each other without a barrier: every word carries its number.
//
// A word of 64 bits holds 32 bits of data and the epoch in which they were written. A reader polls the very words that
// it needs until they show its epoch: data and flag arrive together, so nothing has to be fenced, counted or awaited
// twice. Epochs grow from layer to layer and from launch to launch, so the words need not be cleared.
//
// A word may be overwritten only when all its readers have read it. That follows from the flow of data: whoever writes
// a vector of layer l + 1 has received vectors to which every reader of that vector of layer l contributed afterwards.

// Macros: HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM.

constexpr int ATTENDED = HEADS * HEAD_DIM, QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM;

// Where the words of each vector lie: one element in fp32 in a word, or a pair in 16 bits each.
struct Words {
    u64* base;

    __device__ __forceinline__ u64* qkv() const { return base; }
    __device__ __forceinline__ u64* attended() const { return qkv() + QKV; }  // in pairs
    __device__ __forceinline__ u64* attention() const { return attended() + ATTENDED / 2; }
    __device__ __forceinline__ u64* inner() const { return attention() + HIDDEN; }  // in pairs
    __device__ __forceinline__ u64* mlp() const { return inner() + INNER / 2; }
    __device__ __forceinline__ u64* parts() const { return mlp() + HIDDEN; }  // of attention, by stretches
};

__device__ __forceinline__ void put_word(u64* to, u32 data, u32 epoch) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"((u64)epoch << 32 | data) : "memory");
}

__device__ __forceinline__ void load_words(const u64* from, u64& low, u64& high) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(low), "=l"(high) : "l"(from) : "memory");
}

// Two words at each of COUNT places, the first `valid` of them. All are asked for at once, and those that are late again
// until they have come: what is polled takes its share of the L2's speed. `place(i)`: the address of place i;
// `take(i, first, second)`: its data have come.
template <int COUNT, class Place, class Take>
__device__ __forceinline__ void receive(Place place, int valid, u32 epoch, Take take) {
    static_assert(COUNT < 32, "a bit for each place");
    u32 late = (1u << max(0, min(valid, COUNT))) - 1;
#pragma unroll 1
    while (late) {
        u64 words[COUNT][2];
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            words[i][0] = words[i][1] = 0;  // of no epoch
            if (late >> i & 1) load_words(place(i), words[i][0], words[i][1]);
        }
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            if ((u32)(words[i][0] >> 32) != epoch || (u32)(words[i][1] >> 32) != epoch) continue;
            take(i, (u32)words[i][0], (u32)words[i][1]);
            late &= ~(1u << i);
        }
    }
}
