#include "codec.h"

#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#define ZEROBAND_X86 1
#include <immintrin.h>
#endif

namespace zeroband {
namespace {

constexpr int32_t INFINITE = 0x7f800000;
constexpr float TINY = 0x1p-118f;     // blocks with a smaller largest value become zeros
constexpr float LARGEST = 0x1.fffffcp127f;  // one unit below the largest float

// Location of a part in an encoding: its scales and its values.
struct Part {
    Part(CodecId codec, size_t start, size_t n, size_t total)
        : scale_bytes(scale_bytes_of(codec, n)),
          value_bytes(encoded_size(codec, n) - scale_bytes),
          scales_at(scale_bytes_of(codec, start)),
          values_at(scale_bytes_of(codec, total) + encoded_size(codec, start) - scales_at) {}

    static size_t scale_bytes_of(CodecId codec, size_t n) {
        const size_t block = block_of(codec);
        return block == 1 ? 0 : 4 * ((n + block - 1) / block);
    }

    size_t scale_bytes, value_bytes, scales_at, values_at;
};

}  // namespace

namespace generic {
namespace {
inline void store_away(const float* block, size_t n, float* x) { std::memcpy(x, block, n * sizeof(float)); }
inline void stored_away() {}

// Hash of whole stripes: the sum over i of (word 2i + key 2i) * (word 2i+1 + key 2i+1).
inline uint64_t hash_stripes(const uint8_t* data, size_t stripes, const uint32_t* key) {
    uint64_t sum = 0;
    for (size_t i = 0; i < stripes * HASH_STRIPE / 4; i += 2) {
        uint32_t words[2];
        std::memcpy(words, data + 4 * i, sizeof words);
        sum += static_cast<uint64_t>(words[0] + key[i]) * (words[1] + key[i + 1]);
    }
    return sum;
}

#include "blocks.inl"
#include "robust.inl"
#include "outer.inl"
}
}  // namespace generic

#ifdef ZEROBAND_X86
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,prefer-256-bit"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
namespace avx2 {
namespace {
inline void store_away(const float* block, size_t n, float* x) {
    if (reinterpret_cast<uintptr_t>(x) % 32 != 0) return void(std::memcpy(x, block, n * sizeof(float)));
    for (size_t i = 0; i < n; i += 8) _mm256_stream_ps(x + i, _mm256_loadu_ps(block + i));
}
inline void stored_away() { _mm_sfence(); }
#include "keyed_hash_x86.inl"
#include "blocks.inl"
#include "robust.inl"
#include "outer.inl"
}
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")
#endif
namespace avx512 {
namespace {
inline void store_away(const float* block, size_t n, float* x) {
    if (reinterpret_cast<uintptr_t>(x) % 64 != 0) return void(std::memcpy(x, block, n * sizeof(float)));
    for (size_t i = 0; i < n; i += 16) _mm512_stream_ps(x + i, _mm512_loadu_ps(block + i));
}
inline void stored_away() { _mm_sfence(); }
#include "keyed_hash_x86.inl"
#include "blocks.inl"
#include "robust.inl"
#include "outer.inl"
}
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

size_t encoded_size(CodecId codec, size_t n) {
    switch (codec) {
        case FP32: return 4 * n;
        case BF16: return 2 * n;
        case FP16: return 2 * n + 4 * ((n + FP16_BLOCK - 1) / FP16_BLOCK);
        case INT8: return n + 4 * ((n + INT8_BLOCK - 1) / INT8_BLOCK);
        case INT4: return (n + 1) / 2 + 4 * ((n + INT4_BLOCK - 1) / INT4_BLOCK);
        default: return 0;
    }
}

size_t block_of(CodecId codec) {
    switch (codec) {
        case FP16: return FP16_BLOCK;
        case INT8: return INT8_BLOCK;
        case INT4: return INT4_BLOCK;
        default: return 1;
    }
}

void take_part(CodecId codec, const uint8_t* whole, size_t total, size_t start, size_t n, uint8_t* part) {
    const Part at(codec, start, n, total);
    std::memcpy(part, whole + at.scales_at, at.scale_bytes);
    std::memcpy(part + at.scale_bytes, whole + at.values_at, at.value_bytes);
}

void put_part(CodecId codec, const uint8_t* part, size_t start, size_t n, uint8_t* whole, size_t total) {
    const Part at(codec, start, n, total);
    std::memcpy(whole + at.scales_at, part, at.scale_bytes);
    std::memcpy(whole + at.values_at, part + at.scale_bytes, at.value_bytes);
}

int variant_count() {
#ifdef ZEROBAND_X86
    static const int count = [] {
        __builtin_cpu_init();
        const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
        return !__builtin_cpu_supports("avx2") ? 1 : has_avx512 ? 3 : 2;
    }();
    return count;
#else
    return 1;
#endif
}

const char* variant_name(int variant) {
    static const char* const names[] = {"generic", "avx2", "avx512"};
    return names[variant];
}

const Codec& codec_of(CodecId codec, int variant) {
#ifdef ZEROBAND_X86
    if (variant == 2) return avx512::CODECS[codec];
    if (variant == 1) return avx2::CODECS[codec];
#endif
    (void)variant;
    return generic::CODECS[codec];
}

const RobustKernels& robust_kernels_of(int variant) {
#ifdef ZEROBAND_X86
    if (variant == 2) return avx512::ROBUST;
    if (variant == 1) return avx2::ROBUST;
#endif
    (void)variant;
    return generic::ROBUST;
}

const OuterKernels& outer_kernels_of(int variant) {
#ifdef ZEROBAND_X86
    if (variant == 2) return avx512::OUTER;
    if (variant == 1) return avx2::OUTER;
#endif
    (void)variant;
    return generic::OUTER;
}

const Codec& codec_of(CodecId codec) { return codec_of(codec, variant_count() - 1); }

}  // namespace zeroband
