// What a block reads of weights and cache in one step, in the order in which it does: the producing thread's view.
//
// Memory is asked at a steady pace, a block's share of its speed: whoever asks for more at once makes the others wait, and
// all wait for the slowest. While the ring is full, what comes behind it is asked into the L2.
// Macros: AHEAD (slots behind the ring, at most), PACE (cycles per KiB), HIDDEN, INNER, GATED.

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
    const void *from, *values;  // values: null, or as many bytes
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

struct Stream {
    const Step& step;
    const Share* shares;  // of each linear
    const Place place;
    Matrix of;
    Stretch stretch;
    int linear = -1, row = 0, part = 0, index = 0, token = 0;  // `index`, `token`: of stretches of the cache, and in one

    __device__ __forceinline__ Stream(const Step& step, const Share* shares)
        : step(step), shares(shares), place(place_of(step)) {
        begin_linear();
    }

    __device__ __forceinline__ const Layer& layer() const { return step.layer[min(linear / 4, step.layers - 1)]; }

    __device__ __forceinline__ void begin_linear() {
        if (++linear > 4 * step.layers) return;
        of = matrix_of(linear_of(step, linear), step, layer());
        row = part = 0;
        index = blockIdx.x - gridDim.x;
        stretch = {};
        token = 0;
        if (linear_of(step, linear) == FROM_ATTENTION) begin_stretch();
    }

    // The block's next stretch of the cache that holds any tokens; without one, `token` and `stretch.stop` are the same.
    __device__ __forceinline__ void begin_stretch() {
        const int stretches = stretches_of(layer(), place.position);
        do {
            index += gridDim.x;
            if (index >= KV_HEADS * stretches) break;
            stretch = stretch_of(layer(), place.position, stretches, index);
            token = stretch.start;
        } while (token >= stretch.stop);
    }

    // Whether there is a next chunk, and that.
    __device__ __forceinline__ bool next(Chunk& chunk) {
        while (linear <= 4 * step.layers && token >= stretch.stop && row >= shares[linear_of(step, linear)].count)
            begin_linear();
        if (linear > 4 * step.layers) return false;
        if (token < stretch.stop) {
            const long long from = cached(step, place, stretch.head, token);
            chunk = {layer().keys + from, layer().values + from, (u32)min(TOKENS, stretch.stop - token) * HEAD_DIM * 2};
            if ((token += TOKENS) >= stretch.stop) token = stretch.stop, begin_stretch();
        } else {
            const Share share = shares[linear_of(step, linear)];
            const long long at = (long long)part * of.n + share.first + row;
            chunk = {of.weight + at * of.width, nullptr, (u32)min(of.rows, share.count - row) * of.width * 2};
            if (++part == of.parts) part = 0, row += of.rows;
        }
        return true;
    }
};

__device__ __forceinline__ void produce(Ring& ring, const Step& step, const Share* shares) {
    Filler filler = {ring};
    Stream stream(step, shares), ahead(step, shares);
    int lead = 0;        // slots by which `ahead` is in front
    long long free = 0;  // when memory may be asked again
    Chunk chunk, later;
    const auto take_turn = [&](u32 bytes) { free = max(free, clock64()) + (bytes >> 10) * PACE; };
    const auto look_ahead = [&] {
        if (lead == AHEAD || clock64() < free || !ahead.next(later)) return;
        later.prefetch();
        take_turn(later.all());
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
            take_turn(chunk.all());
        }
        chunk.load(filler);
    }
}
