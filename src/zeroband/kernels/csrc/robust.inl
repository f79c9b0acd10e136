// Inner loops of robust combinations in portable C++, included by codec.cpp once per instruction set after blocks.inl
// and hash_stripes, under the same rules: the same IEEE operations in the same order, no headers.

// Sums over a row are kept in lanes, value i in lane i % LANES, and the lanes added from the first to the last.
constexpr size_t LANES = 16;

template <typename Lane, typename Term>
inline double sum_in_lanes(size_t n, Term term) {
    Lane lanes[LANES] = {};
    const size_t whole = n - n % LANES;
    for (size_t i = 0; i < whole; i += LANES)
        for (size_t lane = 0; lane < LANES; ++lane) lanes[lane] += term(i + lane);
    for (size_t i = whole; i < n; ++i) lanes[i - whole] += term(i);
    double sum = 0;
    for (size_t lane = 0; lane < LANES; ++lane) sum += static_cast<double>(lanes[lane]);
    return sum;
}

// In float32, which handles twice as many values at a time; repeated in float64 on overflow or underflow. A piece's
// sums are exact to about 1e-5, far below the differences between members.
inline bool is_exact_enough(double sum) {
    const double size = sum < 0 ? -sum : sum;
    return size > 1e-20 && size < 1e30;
}

double dot(const float* a, const float* b, size_t n) {
    const double sum = sum_in_lanes<float>(n, [=](size_t i) { return a[i] * b[i]; });
    if (is_exact_enough(sum)) return sum;
    return sum_in_lanes<double>(n, [=](size_t i) { return static_cast<double>(a[i]) * static_cast<double>(b[i]); });
}

double squared_distance(const float* a, const float* b, size_t n) {
    const double sum = sum_in_lanes<float>(n, [=](size_t i) {
        const float off = a[i] - b[i];
        return off * off;
    });
    if (is_exact_enough(sum)) return sum;
    return sum_in_lanes<double>(n, [=](size_t i) {
        const double off = static_cast<double>(a[i]) - static_cast<double>(b[i]);
        return off * off;
    });
}

// sum += weight * x
void add_scaled(const float* x, size_t n, float weight, float* sum) {
    for (size_t i = 0; i < n; ++i) sum[i] += weight * x[i];
}

// sum += weight * (x - from)
void add_difference(const float* x, const float* from, size_t n, float weight, float* sum) {
    for (size_t i = 0; i < n; ++i) sum[i] += weight * (x[i] - from[i]);
}

// Trimmed mean of each column, without the `trim` smallest and largest values, added in ascending order. `network`: a
// sorting network, as pairs of rows to compare and swap.
void middle(const float* const* rows, size_t count, size_t trim, const uint32_t (*network)[2], size_t pairs, size_t n,
            float* room, float* out) {
    constexpr size_t WIDTH = 64;
    const float left = static_cast<float>(count - 2 * trim);
    for (size_t start = 0; start < n; start += WIDTH) {
        const size_t width = n - start < WIDTH ? n - start : WIDTH;
        for (size_t row = 0; row < count; ++row) {
            float* column = room + row * WIDTH;
            __builtin_memcpy(column, rows[row] + start, width * sizeof(float));
            for (size_t i = 0; i < WIDTH; ++i) column[i] += 0.0f;  // turns -0 into +0: equal values get equal bits
        }
        for (size_t pair = 0; pair < pairs; ++pair) {
            float* __restrict a = room + network[pair][0] * WIDTH;
            float* __restrict b = room + network[pair][1] * WIDTH;
            for (size_t i = 0; i < WIDTH; ++i) {
                const float x = a[i], y = b[i];
                a[i] = x < y ? x : y;
                b[i] = x < y ? y : x;
            }
        }
        float* __restrict sum = room + trim * WIDTH;
        for (size_t row = trim + 1; row < count - trim; ++row)
            for (size_t i = 0; i < WIDTH; ++i) sum[i] += room[row * WIDTH + i];
        for (size_t i = 0; i < width; ++i) out[start + i] = sum[i] / left;
    }
}

uint64_t hash(const uint8_t* data, size_t bytes, const uint32_t* key) {
    const size_t stripes = bytes / HASH_STRIPE, whole = stripes * HASH_STRIPE;
    uint8_t last[HASH_STRIPE] = {};
    __builtin_memcpy(last, data + whole, bytes - whole);
    return hash_stripes(data, stripes, key) + (whole < bytes ? hash_stripes(last, 1, key + whole / 4) : 0);
}

const RobustKernels ROBUST = {dot, squared_distance, add_scaled, add_difference, middle, hash};
