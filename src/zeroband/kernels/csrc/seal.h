// AES-256-GCM encryption of one direction of one stream, with the system's OpenSSL, loaded at run time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zeroband {

constexpr size_t KEY_BYTES = 32;
constexpr size_t TAG_BYTES = 16;

// Loads libcrypto once. Returns null, or why it is unavailable.
const char* sealing_problem();

// One direction of one stream. The nonce is a counter, so repeated, dropped or reordered data fails authentication. Not
// thread-safe.
class Sealer {
  public:
    Sealer(const uint8_t* key, bool seals);
    ~Sealer();
    Sealer(const Sealer&) = delete;
    Sealer& operator=(const Sealer&) = delete;

    // Encrypts n bytes to `out`, which may be `in`, and appends the tag. The tag also authenticates `header`, even if n
    // is 0.
    bool seal(const uint8_t* header, size_t header_bytes, const uint8_t* in, size_t n, uint8_t* out);

    // Decrypts n bytes followed by their tag in place. False: authentication failed.
    bool open(const uint8_t* header, size_t header_bytes, uint8_t* data, size_t n);

  private:
    bool start(const uint8_t* header, size_t header_bytes);

    void* context_;
    bool seals_;
    uint64_t number_ = 0;
};

}  // namespace zeroband
