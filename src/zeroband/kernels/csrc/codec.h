// Codecs: encodings of float32 values. Pure functions; one variant per instruction set, all bit-identical.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zeroband {

enum CodecId : int { FP32 = 0, BF16 = 1, FP16 = 2, INT8 = 3, INT4 = 4, CODEC_COUNT = 5 };

constexpr size_t FP16_BLOCK = 256;
constexpr size_t INT8_BLOCK = 256;
constexpr size_t INT4_BLOCK = 128;

struct Codec {
    // Returns -1, or the index of the first non-finite value; `out` is then undefined.
    int64_t (*encode)(const float* x, size_t n, uint8_t* out);
    void (*decode)(const uint8_t* in, size_t n, float* x);
    // Like decode, with non-temporal stores if the processor has them: for results that are not read soon.
    void (*decode_away)(const uint8_t* in, size_t n, float* x);
    // sum[i] += weight * decoded[i]; the weight is multiplied into the block's scale first.
    void (*add)(const uint8_t* in, size_t n, float weight, float* sum);
    // Largest |decoded|; infinite or NaN if a value is. Much faster than decoding.
    float (*largest)(const uint8_t* in, size_t n);
};

// Building blocks of robust combinations (robust.h); one variant per instruction set, all bit-identical.
struct RobustKernels {
    double (*dot)(const float* a, const float* b, size_t n);
    double (*squared_distance)(const float* a, const float* b, size_t n);
    void (*add_scaled)(const float* x, size_t n, float weight, float* sum);
    void (*add_difference)(const float* x, const float* from, size_t n, float weight, float* sum);
    // `room`: scratch for 64 values per row.
    void (*middle)(const float* const* rows, size_t count, size_t trim, const uint32_t (*network)[2], size_t pairs,
                   size_t n, float* room, float* out);
    // 64-bit keyed hash: NH of UMAC. `key` is as long as the data, rounded up to stripes. Without the key, other bytes
    // of equal length and hash are found with probability 2^-32 per try.
    uint64_t (*hash)(const uint8_t* data, size_t bytes, const uint32_t* key);
};

// Building blocks of the outer step (outer.h); one variant per instruction set, all bit-identical.
struct OuterKernels {
    float (*difference)(const float* outer, const float* inner, size_t n, float* out);
    void (*nesterov)(float* params, float* momentum, const float* delta, size_t n, float lr, float factor);
    void (*plain_momentum)(float* params, float* momentum, const float* delta, size_t n, float lr, float factor);
    void (*copy)(const float* from, size_t n, float* to);
};

// Bytes that a hash consumes at a time; a key is rounded up to a multiple.
constexpr size_t HASH_STRIPE = 64;

// Encoded bytes of n values.
size_t encoded_size(CodecId codec, size_t n);

// Values that share a scale; 1 without scales.
size_t block_of(CodecId codec);

// Copies the values [start, start + n) of an encoding of `total` values to a separate encoding, and back.
// `start` is a multiple of the block, and so is n except in the last part.
void take_part(CodecId codec, const uint8_t* whole, size_t total, size_t start, size_t n, uint8_t* part);
void put_part(CodecId codec, const uint8_t* part, size_t start, size_t n, uint8_t* whole, size_t total);

// Variants that this processor can run, best last.
int variant_count();
const char* variant_name(int variant);
const Codec& codec_of(CodecId codec, int variant);

const RobustKernels& robust_kernels_of(int variant);
const OuterKernels& outer_kernels_of(int variant);

// The best variant.
const Codec& codec_of(CodecId codec);

}  // namespace zeroband
