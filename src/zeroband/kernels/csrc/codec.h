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

// Bytes that n values take.
size_t encoded_size(CodecId codec, size_t n);

// Values that share a scale; 1 where there are no scales.
size_t block_of(CodecId codec);

// The part of an encoding that holds the values [start, start + n) of `total`, as an encoding of its own; and back.
// `start` is a multiple of the block, and so is n unless the part is the last one.
void take_part(CodecId codec, const uint8_t* whole, size_t total, size_t start, size_t n, uint8_t* part);
void put_part(CodecId codec, const uint8_t* part, size_t start, size_t n, uint8_t* whole, size_t total);

// The variants that this processor can run, the best one last.
int variant_count();
const char* variant_name(int variant);
const Codec& codec_of(CodecId codec, int variant);

// Of the best variant.
const Codec& codec_of(CodecId codec);

}  // namespace zeroband
