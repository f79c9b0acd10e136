// Hash of whole stripes with AVX2, included by codec.cpp for each instruction set that has it.
inline uint64_t hash_stripes(const uint8_t* data, size_t stripes, const uint32_t* key) {
    __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    for (size_t i = 0; i < 2 * stripes; ++i) {
        const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data) + i);
        const __m256i keyed = _mm256_add_epi32(words, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(key) + i));
        sums[i % 2] = _mm256_add_epi64(sums[i % 2], _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32)));
    }
    uint64_t lanes[4];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), _mm256_add_epi64(sums[0], sums[1]));
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}
