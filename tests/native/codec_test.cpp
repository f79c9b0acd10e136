// Every variant of every codec: what is decoded past the caches has the bits of what is decoded through them.

#include "codec.h"
#include "support.h"

using namespace zeroband;

namespace {

void same_bits(CodecId codec, int variant, size_t n, size_t offset) {
    const Codec& found = codec_of(codec, variant);
    std::mt19937 random(static_cast<unsigned>(n + offset));
    std::normal_distribution<float> normal;
    std::vector<float> values(n + 1);
    for (float& value : values) value = normal(random);
    std::vector<uint8_t> encoded(encoded_size(codec, n) + 1);
    REQUIRE(found.encode(values.data(), n, encoded.data()) == -1);
    std::vector<float> through(n + offset + 1, 7.0f), past = through;
    found.decode(encoded.data(), n, through.data() + offset);
    found.decode_away(encoded.data(), n, past.data() + offset);
    REQUIRE(std::memcmp(through.data(), past.data(), through.size() * sizeof(float)) == 0);
    REQUIRE(past[n + offset] == 7.0f);
}

void finds_first_bad(CodecId codec, int variant, size_t n, size_t at) {
    std::vector<float> values(n, 1.0f);
    for (size_t i = at; i < n; ++i) values[i] = -__builtin_inff();
    std::vector<uint8_t> encoded(encoded_size(codec, n) + 1);
    REQUIRE(codec_of(codec, variant).encode(values.data(), n, encoded.data()) == static_cast<int64_t>(at));
}

}  // namespace

int main() {
    for (int codec = 0; codec < CODEC_COUNT; ++codec)
        for (int variant = 0; variant < variant_count(); ++variant)
            for (const size_t n : {0, 1, 127, 128, 255, 256, 257, 4099, 65536}) {
                for (const size_t offset : {0, 1, 4, 8}) same_bits(static_cast<CodecId>(codec), variant, n, offset);
                if (n > 0) finds_first_bad(static_cast<CodecId>(codec), variant, n, n - 1);
                if (n > 700) finds_first_bad(static_cast<CodecId>(codec), variant, n, 700);
            }
    std::puts("ok");
}
