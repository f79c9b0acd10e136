// Codecs: how float32 values travel. Pure functions; a variant for each instruction set, all equal in bits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zeroband {

enum CodecId : int { FP32 = 0, BF16 = 1, FP16 = 2, INT8 = 3, INT4 = 4, CODEC_COUNT = 5 };

constexpr size_t FP16_BLOCK = 256;
constexpr size_t INT8_BLOCK = 256;
constexpr size_t INT4_BLOCK = 128;

struct Codec {
    // Gives -1, or the index of the first value that is not finite; then `out` holds nothing of use.
    int64_t (*encode)(const float* x, size_t n, uint8_t* out);
    void (*decode)(const uint8_t* in, size_t n, float* x);
    // As decode, to memory that is not read soon: past the caches where the processor can.
    void (*decode_away)(const uint8_t* in, size_t n, float* x);
    // sum[i] += weight * decoded[i], the weight multiplied into the scale first.
    void (*add)(const uint8_t* in, size_t n, float weight, float* sum);
    // The largest |decoded|; infinite or not a number where one is. In a fraction of the time that decoding takes.
    float (*largest)(const uint8_t* in, size_t n);
};

// What combinations that bear liars are made of (robust.h); a variant for each instruction set, all equal in bits.
struct RobustKernels {
    double (*dot)(const float* a, const float* b, size_t n);
    double (*squared_distance)(const float* a, const float* b, size_t n);
    void (*add_scaled)(const float* x, size_t n, float weight, float* sum);
    void (*add_difference)(const float* x, const float* from, size_t n, float weight, float* sum);
    // `room`: 64 values for each row.
    void (*middle)(const float* const* rows, size_t count, size_t trim, const uint32_t (*network)[2], size_t pairs,
                   size_t n, float* room, float* out);
    // 64 bits that tell bytes from others of their number, by words of `key`, of which there are as many as bytes, in
    // whole stripes. Who does not know the key finds other bytes with the same hash once in 2^32 tries. NH, of UMAC.
    uint64_t (*hash)(const uint8_t* data, size_t bytes, const uint32_t* key);
};

// What the passes of an outer step are made of (outer.h); a variant for each instruction set, all equal in bits.
struct OuterKernels {
    float (*difference)(const float* outer, const float* inner, size_t n, float* out);
    void (*nesterov)(float* params, float* momentum, const float* delta, size_t n, float lr, float factor);
    void (*plain_momentum)(float* params, float* momentum, const float* delta, size_t n, float lr, float factor);
    void (*copy)(const float* from, size_t n, float* to);
};

// Bytes that a hash takes at a time: a key has at most this many more than what is hashed.
constexpr size_t HASH_STRIPE = 64;

// Bytes that n values take.
size_t encoded_size(CodecId codec, size_t n);

// Values that share a scale; 1 where there are no scales.
size_t block_of(CodecId codec);

// The part of an encoding that holds the values [start, start + n) of `total`, as a separate encoding; and back.
// `start` is a multiple of the block, and so is n unless the part is the last one.
void take_part(CodecId codec, const uint8_t* whole, size_t total, size_t start, size_t n, uint8_t* part);
void put_part(CodecId codec, const uint8_t* part, size_t start, size_t n, uint8_t* whole, size_t total);

// The variants that this processor can run, the best one last.
int variant_count();
const char* variant_name(int variant);
const Codec& codec_of(CodecId codec, int variant);

const RobustKernels& robust_kernels_of(int variant);
const OuterKernels& outer_kernels_of(int variant);

// Of the best variant.
const Codec& codec_of(CodecId codec);

}  // namespace zeroband
