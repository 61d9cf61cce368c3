// What a block reads of weights and cache in one step, in the order in which it does: the producing thread's view.
//
// Memory is asked at a steady pace, a block's share of its speed: whoever asks for more at once makes the others wait, and
// all wait for the slowest. While the ring is full, what comes behind it is asked into the L2, more slowly: blocks then wait
// for each other, and their small reads for the memory.
// Macros: AHEAD (slots behind the ring, at most), PACE, AHEAD_PACE (cycles per KiB), HIDDEN, INNER, GATED.

enum Linear { TO_QKV, FROM_ATTENTION, UP, DOWN, HEAD };  // in the order in which a step takes them, but for the last

__device__ __forceinline__ Place place_of(const Step& step) {
    const long long slot = *step.slot;
    return {(int)slot, (int)step.chosen[slot], (int)step.lengths[slot]};
}

__device__ __forceinline__ Linear linear_of(const Step& step, int index) {
    return index == 4 * step.layers ? HEAD : (Linear)(index % 4);
}

// A linear of a layer, or the head.
__device__ __forceinline__ Matrix matrix_of(Linear linear, const Step& step, const Layer& layer) {
    switch (linear) {
        case TO_QKV: return {layer.qkv, QKV, 1, HIDDEN, Form<HIDDEN>::rows};
        case FROM_ATTENTION: return {layer.out, HIDDEN, 1, ATTENDED, Form<ATTENDED>::rows};
        case UP: return {layer.up, INNER, GATED ? 2 : 1, HIDDEN, Form<HIDDEN>::rows};
        case DOWN: return {layer.down, HIDDEN, 1, INNER, Form<INNER>::rows};
        default: return {step.head, step.vocabulary, 1, HIDDEN, Form<HIDDEN>::rows};
    }
}

// What fills a slot: rows of weights; or keys and, in its second half, values.
struct Chunk {
    const char *from, *values;  // values: null, or as many bytes
    u32 bytes;

    __device__ __forceinline__ u32 all() const { return values ? 2 * bytes : bytes; }

    __device__ __forceinline__ void load(Filler& filler) const {
        filler.expect(all());
        filler.fill(0, from, bytes);
        if (values) filler.fill(SLOT / 2, values, bytes);
        filler.at.advance();
    }

    __device__ __forceinline__ void prefetch() const {
        prefetch_bytes(from, bytes);
        if (values) prefetch_bytes(values, bytes);
    }
};

// A single thread goes through it chunk by chunk, so whatever holds for all chunks of a weight is found out once.
struct Stream {
    const Step& step;
    const Share* shares;  // of each linear
    const Place place;
    const char *at = nullptr, *values = nullptr;  // what comes next
    u32 left = 0, size = 0;                       // bytes from there on, and of a whole chunk
    long long apart = 0;                          // bytes from gate's rows to up's; 0: there is no up
    bool up = false;                              // of gate's rows and up's, up's are next
    int linear = -1, index = -1;                  // `index`: of the next stretch of the cache; below zero: none is left

    __device__ __forceinline__ Stream(const Step& step, const Share* shares)
        : step(step), shares(shares), place(place_of(step)) {}

    // Whether there is a next chunk, and that.
    __device__ __forceinline__ bool next(Chunk& chunk) {
        while (!left)
            if (!begin()) return false;
        chunk = {up ? at + apart : at, values, min(size, left)};
        if (apart && (up = !up)) return true;
        at += chunk.bytes, left -= chunk.bytes;
        if (values) values += chunk.bytes;
        return true;
    }

    // The next stretch or weight, of which this block may have nothing; false at the end of the step.
    __device__ __forceinline__ bool begin() {
        if (index < 0) {
            if (++linear > 4 * step.layers) return false;
            if (linear_of(step, linear) == FROM_ATTENTION) index = blockIdx.x;
        }
        const Layer& layer = step.layer[min(linear / 4, step.layers - 1)];
        if (index < 0 || !begin_stretch(layer)) begin_weight(layer);
        return true;
    }

    __device__ __forceinline__ bool begin_stretch(const Layer& layer) {
        const Spread spread(layer, place.position);
        const Stretch stretch(layer, place.position, spread, index);
        index = index < KV_HEADS * spread.count ? index + (int)gridDim.x : -1;
        if (index < 0) return false;
        const long long from = cached(step, place, stretch.head, stretch.span.start);
        at = (const char*)(layer.keys + from), values = (const char*)(layer.values + from), apart = 0;
        left = (stretch.span.stop - stretch.span.start) * HEAD_DIM * 2, size = TOKENS * HEAD_DIM * 2;
        return true;
    }

    __device__ __forceinline__ void begin_weight(const Layer& layer) {
        const Matrix of = matrix_of(linear_of(step, linear), step, layer);
        const Share share = shares[linear_of(step, linear)];
        at = (const char*)(of.weight + (long long)share.first * of.width), values = nullptr;
        apart = of.parts == 2 ? 2ll * of.n * of.width : 0;
        left = share.count * of.width * 2, size = of.rows * of.width * 2;
    }
};

__device__ __forceinline__ void produce(Ring& ring, const Step& step, const Share* shares) {
    Filler filler = {ring};
    Stream stream(step, shares), ahead(step, shares);
    int lead = 0;        // slots by which `ahead` is in front
    long long free = 0;  // when memory may be asked again
    Chunk chunk, later;
    const auto take_turn = [&](u32 bytes, u32 pace) { free = max(free, clock64()) + (bytes >> 10) * pace; };
    const auto look_ahead = [&] {
        if (lead == AHEAD || clock64() < free || !ahead.next(later)) return;
        later.prefetch();
        take_turn(later.all(), AHEAD_PACE);
        lead++;
    };
#pragma unroll 1
    while (stream.next(chunk)) {
        filler.await_room(look_ahead);
        filler.await_arrivals(chunk.all());
        if (lead) {  // it comes out of the L2: memory would be idle
            look_ahead();
            lead--;
        } else {
            if (AHEAD) ahead.next(later);
            while (clock64() < free) {}
            take_turn(chunk.all(), PACE);
        }
        chunk.load(filler);
    }
}
