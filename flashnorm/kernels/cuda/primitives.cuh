// What the kernels share: barriers, the copy engine, number formats. The element type comes as HALF ("bf16" or "f16")
// and IS_BF16, the activation of gated kernels as ACTIVATION.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;  // one element

enum { LINEAR, SILU, GELU_TANH, RELU, GELU, RELU2 };

struct alignas(64) TensorMap { char opaque[128]; };

constexpr int WARP = 32, WARPGROUP = 128;
constexpr int EIGHT = 8;  // elements that a thread takes together: 16 bytes of 16-bit floats

__device__ __forceinline__ u32 address(const void* shared) { return (u32)__cvta_generic_to_shared(shared); }

__device__ __forceinline__ void barrier_init(u64* barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(address(barrier)), "r"(parity) : "memory");
}

// Whether it has passed, perhaps after some wait of at most so many nanoseconds.
__device__ __forceinline__ bool barrier_passed(u64* barrier, u32 parity, u32 nanoseconds) {
    u32 passed;
    asm volatile(
        "{ .reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2, %3;\n"
        "selp.u32 %0, 1, 0, done; }" : "=r"(passed) : "r"(address(barrier)), "r"(parity), "r"(nanoseconds) : "memory");
    return passed;
}

__device__ __forceinline__ void barrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}

// Until the loads from which `value` was made have come. Nothing else keeps the copy engine from overwriting what they have
// yet to read: an arrival at a barrier takes another way through the multiprocessor than loads from shared memory, and
// passes those that are held up behind another kernel's. So an instruction that uses what was loaded has to come between;
// this one counts an event, of which nobody keeps count, for one value in four billion.
__device__ __forceinline__ void loads_have_come(u32 value) {
    asm volatile("{ .reg .pred used;\n"
                 "setp.eq.u32 used, %0, 0x9E3779B9;\n"
                 "@used pmevent 0; }" ::"r"(value) : "memory");
}

// One lane arrives for its warp, which has read all it needs: its loads have come.
__device__ __forceinline__ void release(u64* empty) {
    if (threadIdx.x % WARP == 0) barrier_arrive(empty);
}

__device__ __forceinline__ void load_bytes(void* to, const void* from, u32 bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     address(to)),
                 "l"(from), "r"(bytes), "r"(address(barrier)) : "memory");
}

// For what is read once: it leaves the L2 before all else.
__device__ __forceinline__ u64 evict_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void load_bytes_once(void* to, const void* from, u32 bytes, u64* barrier, u64 policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
                 "%4;" ::"r"(address(to)), "l"(from), "r"(bytes), "r"(address(barrier)), "l"(policy) : "memory");
}

__device__ __forceinline__ void prefetch_bytes(const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// The map itself, which the first copy would otherwise have to wait for.
__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void load_tile(void* to, const TensorMap* map, int column, int row, u64* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            address(to)),
        "l"(map), "r"(column), "r"(row), "r"(address(barrier)) : "memory");
}

__device__ __forceinline__ void prefetch_tile(const TensorMap* map, int column, int row) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(column), "r"(row)
                 : "memory");
}

__device__ __forceinline__ void store_tile(const TensorMap* map, int column, int row, const void* from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(column),
                 "r"(row), "r"(address(from)) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void stores_have_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// c += a b for sixteen rows of a and eight columns of b.
__device__ __forceinline__ void multiply(float (&c)[4], const uint4& a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." HALF "." HALF ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// A tile of rows of 128 bytes under the 128-byte swizzle; eight rows are 1024 bytes apart from the next eight.
__device__ __forceinline__ u64 descriptor(const void* tile) {
    return (u64)((address(tile) & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// All threads of a cluster's blocks meet. What each has written to shared memory, all may read.
__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// What lies in another block of the cluster where `own` lies in this one.
__device__ __forceinline__ float of_block(const float* own, u32 rank) {
    float value;
    asm volatile("{ .reg .u32 there;\n"
                 "mapa.shared::cluster.u32 there, %1, %2;\n"
                 "ld.shared::cluster.f32 %0, [there]; }" : "=f"(value) : "r"(address(own)), "r"(rank) : "memory");
    return value;
}

__device__ __forceinline__ void sync_warpgroup(int id) {
    asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory");
}

// All that a kernel reads or writes may be in use by the kernel before it; only after this wait it may be touched, and
// only then may the kernel after it be started (see kernels/launch.py).
__device__ __forceinline__ void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }

__device__ __forceinline__ u32 packed(float low, float high) {
    u32 pair;
    asm("cvt.rn." HALF "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ float widened(u16 bits) {
    float value;
    if (IS_BF16) return __uint_as_float((u32)bits << 16);
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ float low_of(u32 pair) {
    return IS_BF16 ? __uint_as_float(pair << 16) : widened(pair & 0xFFFF);
}

__device__ __forceinline__ float high_of(u32 pair) {
    return IS_BF16 ? __uint_as_float(pair & 0xFFFF0000) : widened(pair >> 16);
}

// 2 to this power; 0 where that is no normal number.
__device__ __forceinline__ float exp2_of(float power) {
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(power));
    return value;
}

// Floats of shared memory that follow each other, where there are at least four from a multiple of 16 bytes on.
template <int COUNT>
__device__ __forceinline__ void load_floats(float (&to)[COUNT], const float* from) {
    constexpr int FOURS = COUNT % 4 ? 0 : COUNT;
#pragma unroll
    for (int i = 0; i < FOURS; i += 4) {
        const float4 four = *(const float4*)(from + i);
        to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
    }
#pragma unroll
    for (int i = FOURS; i < COUNT; i++) to[i] = from[i];
}

template <int COUNT>
__device__ __forceinline__ float sum_of(const float (&from)[COUNT]) {
    float own[COUNT], sum = 0;
    load_floats(own, from);
#pragma unroll
    for (int i = 0; i < COUNT; i++) sum += own[i];
    return sum;
}

__device__ __forceinline__ float add_squares(u32 pair, float sum) {
    return fmaf(high_of(pair), high_of(pair), fmaf(low_of(pair), low_of(pair), sum));
}

__device__ __forceinline__ float add_squares(uint4 eight, float sum) {
    return add_squares(eight.w, add_squares(eight.z, add_squares(eight.y, add_squares(eight.x, sum))));
}

__device__ __forceinline__ float sum_of_warp(float sum) {
    for (int apart = 1; apart < WARP; apart *= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    return sum;
}

// SiLU and GELU's tanh form are gate / (1 + exp(-u)), the latter with u = 2 sqrt(2/pi) (gate + 0.044715 gate³).
__device__ __forceinline__ float activated(float gate) {
    if (ACTIVATION == RELU) return gate < 0 ? 0 : gate;  // keeps a NaN
    if (ACTIVATION == RELU2) return gate < 0 ? 0 : gate * gate;
    if (ACTIVATION == GELU) return 0.5f * gate * (1 + erff(gate * 0.7071067812f));
    const float u = ACTIVATION == SILU ? gate : 1.5957691216f * gate * fmaf(0.044715f * gate, gate, 1.f);
    return __fdividef(gate, 1 + __expf(-u));
}
