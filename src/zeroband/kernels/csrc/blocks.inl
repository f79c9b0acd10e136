// The codecs' inner loops in portable C++, included by codec.cpp once per instruction set, inside a namespace.
//
// Every variant performs the same IEEE operations in the same order (no fused multiply-add, no fast-math), so all give
// the same bits; the loops are written for auto-vectorisation. Must not include a header, whose inline functions would
// be compiled for an instruction set that the processor may lack. The includer defines, per instruction set,
// `store_away(block, n, x)`, which writes whole blocks with non-temporal stores, and `stored_away()`, a store fence:
// non-temporal stores are weakly ordered, and without it other threads may not see them after a release.

// Rounds to the nearest integer, ties to even, for |v| < 2^22.
inline float round_even(float v) {
    const float magic = 12582912.0f;
    return (v + magic) - magic;
}

inline int32_t bits_of(float v) {
    int32_t bits;
    __builtin_memcpy(&bits, &v, 4);
    return bits;
}

inline float float_of(int32_t bits) {
    float v;
    __builtin_memcpy(&v, &bits, 4);
    return v;
}

inline float load_scale(const uint8_t* at) {
    float scale;
    __builtin_memcpy(&scale, at, 4);
    return scale;
}

// Bytes of the scales of n values.
inline size_t scale_bytes(size_t n, size_t block) { return (n + block - 1) / block * 4; }

// Prefetch distance of encoders.
constexpr size_t PREFETCHED = 512;

inline void prefetch(const float* x, size_t n) {
    for (size_t i = 0; i < n; i += 16) __builtin_prefetch(x + i);
}

// Bits of the largest |x|; at least INFINITE if a value is not finite.
inline int32_t magnitude(const float* x, size_t n) {
    int32_t top = 0;
    for (size_t i = 0; i < n; ++i) {
        const int32_t bits = bits_of(x[i]) & 0x7fffffff;
        top = bits > top ? bits : top;
    }
    return top;
}

inline int64_t first_non_finite(const float* x, size_t n) {
    for (size_t i = 0; i < n; ++i)
        if ((bits_of(x[i]) & 0x7fffffff) >= INFINITE) return static_cast<int64_t>(i);
    return -1;
}

// -- float32 -----------------------------------------------------------------------------------------------------

// Values per step: they stay in the L1 cache between check and copy.
constexpr size_t FP32_BLOCK = 256;

int64_t encode_fp32(const float* x, size_t n, uint8_t* out) {
    for (size_t start = 0; start < n; start += FP32_BLOCK) {
        const size_t size = n - start < FP32_BLOCK ? n - start : FP32_BLOCK;
        if (n - start >= PREFETCHED + FP32_BLOCK) prefetch(x + start + PREFETCHED, FP32_BLOCK);
        if (magnitude(x + start, size) >= INFINITE)
            return static_cast<int64_t>(start) + first_non_finite(x + start, size);
        __builtin_memcpy(out + 4 * start, x + start, 4 * size);
    }
    return -1;
}

struct Fp32Values {
    static constexpr size_t BLOCK = FP32_BLOCK;
    Fp32Values(const uint8_t* in, size_t) : values(in) {}
    void decode(size_t start, size_t n, float* x) const { __builtin_memcpy(x, values + 4 * start, 4 * n); }
    const uint8_t* values;
};

float largest_fp32(const uint8_t* in, size_t n) {
    int32_t top = 0;
    for (size_t i = 0; i < n; ++i) {
        const int32_t bits = bits_of(load_scale(in + 4 * i)) & 0x7fffffff;
        top = bits > top ? bits : top;
    }
    return float_of(top);
}

void add_fp32(const uint8_t* in, size_t n, float weight, float* sum) {
    for (size_t i = 0; i < n; ++i) sum[i] += weight * load_scale(in + 4 * i);
}

// -- bfloat16: the upper half, rounded to even; the largest value in place of infinity ---------------------------------

int64_t encode_bf16(const float* x, size_t n, uint8_t* out) {
    if (magnitude(x, n) >= INFINITE) return first_non_finite(x, n);
    for (size_t i = 0; i < n; ++i) {
        const int32_t bits = bits_of(x[i]);
        const int32_t size = bits & 0x7fffffff;
        int32_t half = (size + 0x7fff + ((size >> 16) & 1)) >> 16;
        half = half > 0x7f7f ? 0x7f7f : half;
        const uint16_t word = static_cast<uint16_t>(half | ((bits >> 16) & 0x8000));
        __builtin_memcpy(out + 2 * i, &word, 2);
    }
    return -1;
}

inline float load_bf16(const uint8_t* in) {
    uint16_t word;
    __builtin_memcpy(&word, in, 2);
    return float_of(static_cast<int32_t>(static_cast<uint32_t>(word) << 16));
}

struct Bf16Values {
    static constexpr size_t BLOCK = FP32_BLOCK;
    Bf16Values(const uint8_t* in, size_t) : values(in) {}
    void decode(size_t start, size_t n, float* x) const {
        for (size_t i = 0; i < n; ++i) x[i] = load_bf16(values + 2 * (start + i));
    }
    const uint8_t* values;
};

float largest_bf16(const uint8_t* in, size_t n) {
    uint16_t top = 0;
    for (size_t i = 0; i < n; ++i) {
        uint16_t word;
        __builtin_memcpy(&word, in + 2 * i, 2);
        word &= 0x7fff;
        top = word > top ? word : top;
    }
    return float_of(static_cast<int32_t>(static_cast<uint32_t>(top) << 16));
}

void add_bf16(const uint8_t* in, size_t n, float weight, float* sum) {
    for (size_t i = 0; i < n; ++i) sum[i] += weight * load_bf16(in + 2 * i);
}

// -- float16 with a power of two for each block, so that its largest value lies in [1, 2) -----------------------------

inline int32_t half_bits(float v) {
    const int32_t bits = bits_of(v);
    const int32_t size = bits & 0x7fffffff;
    const int32_t normal = ((size + 0xfff + ((size >> 13) & 1)) >> 13) - (112 << 10);
    const int32_t small = static_cast<int32_t>(round_even(float_of(size) * 16777216.0f));
    int32_t half = size < (113 << 23) ? small : normal;
    half = half > 0x3fff ? 0x3fff : half;
    return half | ((bits >> 16) & 0x8000);
}

inline float half_value(uint16_t word) {
    const int32_t size = word & 0x7fff;
    const float normal = float_of((size << 13) + (112 << 23));
    const float small = static_cast<float>(size) * 5.9604644775390625e-08f;
    const int32_t sign = static_cast<int32_t>(static_cast<uint32_t>(word & 0x8000) << 16);
    return float_of(bits_of(size < 0x400 ? small : normal) | sign);
}

int64_t encode_fp16(const float* x, size_t n, uint8_t* out) {
    const size_t blocks = (n + FP16_BLOCK - 1) / FP16_BLOCK;
    uint8_t* words = out + 4 * blocks;
    for (size_t block = 0; block < blocks; ++block) {
        const size_t start = block * FP16_BLOCK;
        const size_t size = n - start < FP16_BLOCK ? n - start : FP16_BLOCK;
        const int32_t top = magnitude(x + start, size);
        if (top >= INFINITE) return static_cast<int64_t>(start) + first_non_finite(x + start, size);
        const bool is_tiny = float_of(top) < TINY;
        const int32_t exponent = top & 0x7f800000;
        const float scale = is_tiny ? 0.0f : float_of(exponent);
        // 2^-e is subnormal for the largest exponents: multiply twice by its root instead, exactly.
        const int32_t e = (exponent >> 23) - 127;
        const float inverse_a = is_tiny ? 0.0f : float_of((127 - e / 2) << 23);
        const float inverse_b = is_tiny ? 0.0f : float_of((127 - (e - e / 2)) << 23);
        __builtin_memcpy(out + 4 * block, &scale, 4);
        for (size_t i = start; i < start + size; ++i) {
            const uint16_t word = static_cast<uint16_t>(half_bits(x[i] * inverse_a * inverse_b));
            __builtin_memcpy(words + 2 * i, &word, 2);
        }
    }
    return -1;
}

inline float load_fp16(const uint8_t* in) {
    uint16_t word;
    __builtin_memcpy(&word, in, 2);
    return half_value(word);
}

struct Fp16Values {
    static constexpr size_t BLOCK = FP16_BLOCK;
    Fp16Values(const uint8_t* in, size_t n) : scales(in), words(in + scale_bytes(n, BLOCK)) {}
    void decode(size_t start, size_t n, float* x) const {
        const float scale = load_scale(scales + start / BLOCK * 4);
        for (size_t i = 0; i < n; ++i) x[i] = scale * load_fp16(words + 2 * (start + i));
    }
    const uint8_t *scales, *words;
};

// The larger of two magnitudes; NaN propagates.
inline float larger(float top, float scale, float level) {
    const int32_t bits = bits_of(scale * level) & 0x7fffffff;
    return bits > bits_of(top) ? float_of(bits) : top;
}

float largest_fp16(const uint8_t* in, size_t n) {
    const size_t blocks = (n + FP16_BLOCK - 1) / FP16_BLOCK;
    const uint8_t* words = in + 4 * blocks;
    float found = 0.0f;
    for (size_t block = 0; block < blocks; ++block) {
        const size_t stop = n < (block + 1) * FP16_BLOCK ? n : (block + 1) * FP16_BLOCK;
        uint16_t top = 0;
        for (size_t i = block * FP16_BLOCK; i < stop; ++i) {
            uint16_t word;
            __builtin_memcpy(&word, words + 2 * i, 2);
            word &= 0x7fff;
            top = word > top ? word : top;
        }
        found = larger(found, load_scale(in + 4 * block), half_value(top));
    }
    return found;
}

void add_fp16(const uint8_t* in, size_t n, float weight, float* sum) {
    const size_t blocks = (n + FP16_BLOCK - 1) / FP16_BLOCK;
    const uint8_t* words = in + 4 * blocks;
    for (size_t block = 0; block < blocks; ++block) {
        const float scale = weight * load_scale(in + 4 * block);
        const size_t stop = n < (block + 1) * FP16_BLOCK ? n : (block + 1) * FP16_BLOCK;
        for (size_t i = block * FP16_BLOCK; i < stop; ++i) sum[i] += scale * load_fp16(words + 2 * i);
    }
}

// -- int8 and int4: symmetric, a float32 scale for each block ----------------------------------------------------------

// Scale and inverse of a block whose largest value has the bits `top`. Tiny blocks become zeros, so that no decoded
// value is subnormal; the largest values cannot overflow when decoded.
inline float scale_of(int32_t top, float levels, float* inverse) {
    const float largest = float_of(top);
    const bool is_tiny = largest < TINY;
    float scale = largest / levels;
    const float limit = LARGEST / levels;
    scale = scale > limit ? limit : scale;
    *inverse = is_tiny ? 0.0f : levels / largest;
    return is_tiny ? 0.0f : scale;
}

inline void quantise_block(const float* x, size_t n, float inverse, int8_t* q) {
    for (size_t i = 0; i < n; ++i) q[i] = static_cast<int8_t>(static_cast<int32_t>(round_even(x[i] * inverse)));
}

int64_t encode_int8(const float* x, size_t n, uint8_t* out) {
    const size_t blocks = (n + INT8_BLOCK - 1) / INT8_BLOCK;
    int8_t* q = reinterpret_cast<int8_t*>(out + 4 * blocks);
    for (size_t block = 0; block < blocks; ++block) {
        const size_t start = block * INT8_BLOCK;
        const bool is_full = n - start >= INT8_BLOCK;
        if (n - start >= PREFETCHED + INT8_BLOCK) prefetch(x + start + PREFETCHED, INT8_BLOCK);
        const int32_t top = is_full ? magnitude(x + start, INT8_BLOCK) : magnitude(x + start, n - start);
        if (top >= INFINITE) return static_cast<int64_t>(start) + first_non_finite(x + start, n - start);
        float inverse;
        const float scale = scale_of(top, 127.0f, &inverse);
        __builtin_memcpy(out + 4 * block, &scale, 4);
        if (is_full)
            quantise_block(x + start, INT8_BLOCK, inverse, q + start);
        else
            quantise_block(x + start, n - start, inverse, q + start);
    }
    return -1;
}

struct Int8Values {
    static constexpr size_t BLOCK = INT8_BLOCK;
    Int8Values(const uint8_t* in, size_t n)
        : scales(in), q(reinterpret_cast<const int8_t*>(in + scale_bytes(n, BLOCK))) {}
    void decode(size_t start, size_t n, float* x) const {
        const float scale = load_scale(scales + start / BLOCK * 4);
        for (size_t i = 0; i < n; ++i) x[i] = scale * static_cast<float>(q[start + i]);
    }
    const uint8_t* scales;
    const int8_t* q;
};

void add_int8(const uint8_t* in, size_t n, float weight, float* sum) {
    const size_t blocks = (n + INT8_BLOCK - 1) / INT8_BLOCK;
    const int8_t* q = reinterpret_cast<const int8_t*>(in + 4 * blocks);
    for (size_t block = 0; block < blocks; ++block) {
        const float scale = weight * load_scale(in + 4 * block);
        const size_t stop = n < (block + 1) * INT8_BLOCK ? n : (block + 1) * INT8_BLOCK;
        for (size_t i = block * INT8_BLOCK; i < stop; ++i) sum[i] += scale * static_cast<float>(q[i]);
    }
}

float largest_int8(const uint8_t* in, size_t n) {
    const size_t blocks = (n + INT8_BLOCK - 1) / INT8_BLOCK;
    const int8_t* q = reinterpret_cast<const int8_t*>(in + 4 * blocks);
    float found = 0.0f;
    for (size_t block = 0; block < blocks; ++block) {
        const size_t stop = n < (block + 1) * INT8_BLOCK ? n : (block + 1) * INT8_BLOCK;
        int8_t least = 0, most = 0;
        for (size_t i = block * INT8_BLOCK; i < stop; ++i) {
            least = q[i] < least ? q[i] : least;
            most = q[i] > most ? q[i] : most;
        }
        const int32_t level = -least > most ? -least : most;
        found = larger(found, load_scale(in + 4 * block), static_cast<float>(level));
    }
    return found;
}

// In a block of m values, byte j holds value j in the low and value ceil(m / 2) + j in the high nibble, each plus 8.
inline void pack_block(const float* x, size_t m, float inverse, uint8_t* bytes) {
    const size_t half = (m + 1) / 2, pairs = m / 2;
    for (size_t j = 0; j < pairs; ++j) {
        const int32_t low = static_cast<int32_t>(round_even(x[j] * inverse)) + 8;
        const int32_t high = static_cast<int32_t>(round_even(x[half + j] * inverse)) + 8;
        bytes[j] = static_cast<uint8_t>(low | (high << 4));
    }
    if (pairs < half) bytes[pairs] = static_cast<uint8_t>(static_cast<int32_t>(round_even(x[pairs] * inverse)) + 8);
}

int64_t encode_int4(const float* x, size_t n, uint8_t* out) {
    const size_t blocks = (n + INT4_BLOCK - 1) / INT4_BLOCK;
    uint8_t* bytes = out + 4 * blocks;
    for (size_t block = 0; block < blocks; ++block) {
        const size_t start = block * INT4_BLOCK;
        const size_t size = n - start < INT4_BLOCK ? n - start : INT4_BLOCK;
        const int32_t top = magnitude(x + start, size);
        if (top >= INFINITE) return static_cast<int64_t>(start) + first_non_finite(x + start, size);
        float inverse;
        const float scale = scale_of(top, 7.0f, &inverse);
        __builtin_memcpy(out + 4 * block, &scale, 4);
        if (size == INT4_BLOCK)
            pack_block(x + start, INT4_BLOCK, inverse, bytes + start / 2);
        else
            pack_block(x + start, size, inverse, bytes + start / 2);
    }
    return -1;
}

struct Int4Values {
    static constexpr size_t BLOCK = INT4_BLOCK;
    Int4Values(const uint8_t* in, size_t n) : scales(in), bytes(in + scale_bytes(n, BLOCK)) {}
    void decode(size_t start, size_t n, float* x) const {
        const float scale = load_scale(scales + start / BLOCK * 4);
        const size_t half = (n + 1) / 2, pairs = n / 2;
        const uint8_t* packed = bytes + start / 2;
        for (size_t j = 0; j < half; ++j) x[j] = scale * static_cast<float>((packed[j] & 15) - 8);
        for (size_t j = 0; j < pairs; ++j) x[half + j] = scale * static_cast<float>((packed[j] >> 4) - 8);
    }
    const uint8_t *scales, *bytes;
};

void add_int4(const uint8_t* in, size_t n, float weight, float* sum) {
    const size_t blocks = (n + INT4_BLOCK - 1) / INT4_BLOCK;
    const uint8_t* bytes = in + 4 * blocks;
    for (size_t block = 0; block < blocks; ++block) {
        const float scale = weight * load_scale(in + 4 * block);
        const size_t start = block * INT4_BLOCK;
        const size_t size = n - start < INT4_BLOCK ? n - start : INT4_BLOCK;
        const size_t half = (size + 1) / 2, pairs = size / 2;
        const uint8_t* packed = bytes + start / 2;
        for (size_t j = 0; j < half; ++j) sum[start + j] += scale * static_cast<float>((packed[j] & 15) - 8);
        for (size_t j = 0; j < pairs; ++j) sum[start + half + j] += scale * static_cast<float>((packed[j] >> 4) - 8);
    }
}

float largest_int4(const uint8_t* in, size_t n) {
    const size_t blocks = (n + INT4_BLOCK - 1) / INT4_BLOCK;
    const uint8_t* bytes = in + 4 * blocks;
    float found = 0.0f;
    for (size_t block = 0; block < blocks; ++block) {
        const size_t start = block * INT4_BLOCK;
        const size_t size = n - start < INT4_BLOCK ? n - start : INT4_BLOCK;
        const size_t half = (size + 1) / 2, pairs = size / 2;
        const uint8_t* packed = bytes + start / 2;
        uint8_t least = 8, most = 8;
        for (size_t j = 0; j < half; ++j) {
            const uint8_t low = packed[j] & 15;
            least = low < least ? low : least;
            most = low > most ? low : most;
        }
        for (size_t j = 0; j < pairs; ++j) {
            const uint8_t high = packed[j] >> 4;
            least = high < least ? high : least;
            most = high > most ? high : most;
        }
        const int32_t level = 8 - least > most - 8 ? 8 - least : most - 8;
        found = larger(found, load_scale(in + 4 * block), static_cast<float>(level));
    }
    return found;
}

// -- every codec ---------------------------------------------------------------------------------------------------

// `Values` locates and decodes the blocks of an encoding.
template <class Values>
void decode(const uint8_t* in, size_t n, float* x) {
    const Values values(in, n);
    const size_t whole = n / Values::BLOCK * Values::BLOCK;
    for (size_t start = 0; start < whole; start += Values::BLOCK) values.decode(start, Values::BLOCK, x + start);
    if (whole < n) values.decode(whole, n - whole, x + whole);
}

template <class Values>
void decode_away(const uint8_t* in, size_t n, float* x) {
    const Values values(in, n);
    const size_t whole = n / Values::BLOCK * Values::BLOCK;
    float block[Values::BLOCK];
    for (size_t start = 0; start < whole; start += Values::BLOCK) {
        values.decode(start, Values::BLOCK, block);
        store_away(block, Values::BLOCK, x + start);
    }
    if (whole < n) values.decode(whole, n - whole, x + whole);
    stored_away();
}

const Codec CODECS[CODEC_COUNT] = {
    {encode_fp32, decode<Fp32Values>, decode_away<Fp32Values>, add_fp32, largest_fp32},
    {encode_bf16, decode<Bf16Values>, decode_away<Bf16Values>, add_bf16, largest_bf16},
    {encode_fp16, decode<Fp16Values>, decode_away<Fp16Values>, add_fp16, largest_fp16},
    {encode_int8, decode<Int8Values>, decode_away<Int8Values>, add_int8, largest_int8},
    {encode_int4, decode<Int4Values>, decode_away<Int4Values>, add_int4, largest_int4},
};
