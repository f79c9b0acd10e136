// The inner loops of an outer step's passes, included by codec.cpp once for each instruction set, after blocks.inl: the
// same IEEE operations in the same order in every variant. Must not include a header.

// Writes whole cache lines with non-temporal stores, and the rest normally.
inline void copy_away(const float* from, size_t n, float* to) {
    constexpr size_t LINE = 16;
    const size_t beyond = reinterpret_cast<uintptr_t>(to) / sizeof(float) % LINE;
    const size_t before = beyond == 0 ? 0 : LINE - beyond, head = before < n ? before : n, lines = (n - head) / LINE * LINE;
    __builtin_memcpy(to, from, head * sizeof(float));
    store_away(from + head, lines, to + head);
    __builtin_memcpy(to + head + lines, from + head + lines, (n - head - lines) * sizeof(float));
}

void outer_copy(const float* from, size_t n, float* to) {
    copy_away(from, n, to);
    stored_away();
}

float outer_difference(const float* outer, const float* inner, size_t n, float* out) {
    int32_t top = 0;
    float block[FP32_BLOCK];
    for (size_t start = 0; start < n; start += FP32_BLOCK) {
        const size_t size = n - start < FP32_BLOCK ? n - start : FP32_BLOCK;
        for (size_t i = 0; i < size; ++i) block[i] = outer[start + i] - inner[start + i];
        const int32_t found = magnitude(block, size);
        top = found > top ? found : top;
        copy_away(block, size, out + start);
    }
    stored_away();
    return float_of(top);
}

template <bool IS_NESTEROV>
void outer_sgd(float* params, float* momentum, const float* delta, size_t n, float lr, float factor) {
    float* __restrict theta = params;
    float* __restrict v = momentum;
    for (size_t i = 0; i < n; ++i) {
        const float moved = v[i] * factor + delta[i];
        const float step = IS_NESTEROV ? moved * factor + delta[i] : moved;
        v[i] = moved;
        theta[i] = theta[i] - step * lr;
    }
}

const OuterKernels OUTER = {outer_difference, outer_sgd<true>, outer_sgd<false>, outer_copy};
